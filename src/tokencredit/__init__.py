"""Tokencredit: PPO for language models from any reward, with the credit of every token in view."""

from typing import Any

__all__ = ["PPOConfig", "PPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer only when it is asked for, so that the command can answer before torch is loaded."""
    if name == "PPOConfig":
        from tokencredit.runs.config import PPOConfig

        return PPOConfig
    if name == "PPOTrainer":
        from tokencredit.text.trainer import PPOTrainer

        return PPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
