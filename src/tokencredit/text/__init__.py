"""The token world: language models trained with PPO."""
