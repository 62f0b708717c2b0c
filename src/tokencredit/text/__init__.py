"""PPO for language models."""
