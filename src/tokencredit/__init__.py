"""Tokencredit: PPO for language models from any reward, with the credit of every token in view."""
