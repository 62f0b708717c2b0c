"""Tokencredit: PPO for language models from any reward, with the credit of every token in view."""

from typing import TYPE_CHECKING, Any

from tokencredit.settings.data import PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import (
    AdvantageConfig,
    EvalConfig,
    KLConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    StopConfig,
    UpdateConfig,
)

if TYPE_CHECKING:
    from tokencredit.text.trainer import PPOTrainer

__all__ = [
    "AdvantageConfig",
    "EvalConfig",
    "KLConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "PPOTrainer",
    "PromptsConfig",
    "RewardTerm",
    "RolloutConfig",
    "RunConfig",
    "ScoreConfig",
    "StopConfig",
    "UpdateConfig",
]


def __getattr__(name: str) -> Any:
    """Import the trainer only when it is asked for, so that the command can answer before torch is loaded."""
    if name == "PPOTrainer":
        from tokencredit.text.trainer import PPOTrainer

        return PPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
