"""Tokencredit: PPO for language models from any reward, with the credit of every token in view.

    import tokencredit as tc

Every name is imported on first use, so that the command answers before torch is loaded. docs/python.md shows them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokencredit import core as core
    from tokencredit.control.control_trainer import ControlTrainer as ControlTrainer
    from tokencredit.errors import ConfigError as ConfigError
    from tokencredit.errors import RunStopped as RunStopped
    from tokencredit.report.reading import read_run as read_run
    from tokencredit.runs.summary import Summary as Summary
    from tokencredit.settings.control import AgentAdvantageConfig as AgentAdvantageConfig
    from tokencredit.settings.control import AgentAuditConfig as AgentAuditConfig
    from tokencredit.settings.control import AgentConfig as AgentConfig
    from tokencredit.settings.control import AgentCriticConfig as AgentCriticConfig
    from tokencredit.settings.control import AgentRunConfig as AgentRunConfig
    from tokencredit.settings.control import AgentStopConfig as AgentStopConfig
    from tokencredit.settings.control import AgentUpdateConfig as AgentUpdateConfig
    from tokencredit.settings.control import ControlConfig as ControlConfig
    from tokencredit.settings.control import EnvConfig as EnvConfig
    from tokencredit.settings.control import EpisodesConfig as EpisodesConfig
    from tokencredit.settings.data import ClassifierTerm as ClassifierTerm
    from tokencredit.settings.data import FunctionTerm as FunctionTerm
    from tokencredit.settings.data import PromptsConfig as PromptsConfig
    from tokencredit.settings.data import RewardModelTerm as RewardModelTerm
    from tokencredit.settings.data import ScoreConfig as ScoreConfig
    from tokencredit.settings.environment import EnvironmentConfig as EnvironmentConfig
    from tokencredit.settings.model import CriticConfig as CriticConfig
    from tokencredit.settings.model import LoraConfig as LoraConfig
    from tokencredit.settings.model import ModelConfig as ModelConfig
    from tokencredit.settings.model import TunedModelConfig as TunedModelConfig
    from tokencredit.settings.off_policy import OffPolicyConfig as OffPolicyConfig
    from tokencredit.settings.offline import CompletionsConfig as CompletionsConfig
    from tokencredit.settings.offline import DPOConfig as DPOConfig
    from tokencredit.settings.offline import DPOLossConfig as DPOLossConfig
    from tokencredit.settings.offline import DPOOptimConfig as DPOOptimConfig
    from tokencredit.settings.offline import DPOPairsConfig as DPOPairsConfig
    from tokencredit.settings.offline import HeldOutConfig as HeldOutConfig
    from tokencredit.settings.offline import OfflineOptimConfig as OfflineOptimConfig
    from tokencredit.settings.offline import OfflineRunConfig as OfflineRunConfig
    from tokencredit.settings.offline import PairsConfig as PairsConfig
    from tokencredit.settings.offline import RewardModelConfig as RewardModelConfig
    from tokencredit.settings.offline import RewardModelLossConfig as RewardModelLossConfig
    from tokencredit.settings.offline import RewardModelStartConfig as RewardModelStartConfig
    from tokencredit.settings.offline import SFTConfig as SFTConfig
    from tokencredit.settings.offline import SFTLossConfig as SFTLossConfig
    from tokencredit.settings.rollout import RolloutConfig as RolloutConfig
    from tokencredit.settings.text import PPOConfig as PPOConfig
    from tokencredit.settings.training import AdvantageConfig as AdvantageConfig
    from tokencredit.settings.training import AuditConfig as AuditConfig
    from tokencredit.settings.training import EvalConfig as EvalConfig
    from tokencredit.settings.training import KLConfig as KLConfig
    from tokencredit.settings.training import OptimConfig as OptimConfig
    from tokencredit.settings.training import RunConfig as RunConfig
    from tokencredit.settings.training import ShardingConfig as ShardingConfig
    from tokencredit.settings.training import StopConfig as StopConfig
    from tokencredit.settings.training import UpdateConfig as UpdateConfig
    from tokencredit.text.callbacks import Callback as Callback
    from tokencredit.text.offline.offline_trainer import OfflineTrainer as OfflineTrainer
    from tokencredit.text.policy import load as load
    from tokencredit.text.ppo_trainer import PPOTrainer as PPOTrainer
    from tokencredit.text.rewards.calls import Term as Term

    __version__: str

_NAMES = {
    "control.control_trainer": "ControlTrainer",
    "errors": "ConfigError RunStopped",
    "report.reading": "read_run",
    "runs.summary": "Summary",
    "settings.control": "AgentAdvantageConfig AgentAuditConfig AgentConfig AgentCriticConfig AgentRunConfig "
    "AgentStopConfig AgentUpdateConfig ControlConfig EnvConfig EpisodesConfig",
    "settings.data": "ClassifierTerm FunctionTerm PromptsConfig RewardModelTerm ScoreConfig",
    "settings.environment": "EnvironmentConfig",
    "settings.model": "CriticConfig LoraConfig ModelConfig TunedModelConfig",
    "settings.offline": "CompletionsConfig DPOConfig DPOLossConfig DPOOptimConfig DPOPairsConfig HeldOutConfig "
    "OfflineOptimConfig OfflineRunConfig PairsConfig RewardModelConfig RewardModelLossConfig RewardModelStartConfig "
    "SFTConfig SFTLossConfig",
    "settings.off_policy": "OffPolicyConfig",
    "settings.text": "PPOConfig",
    "settings.rollout": "RolloutConfig",
    "settings.training": "AdvantageConfig AuditConfig EvalConfig KLConfig OptimConfig RunConfig "
    "ShardingConfig StopConfig UpdateConfig",
    "text.callbacks": "Callback",
    "text.offline.offline_trainer": "OfflineTrainer",
    "text.policy": "load",
    "text.rewards.calls": "Term",
    "text.ppo_trainer": "PPOTrainer",
}
"""Public names by module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULES, "core"])

if not TYPE_CHECKING:  # a type checker would let a module with __getattr__ have any name

    def __getattr__(name: str) -> Any:
        """Import a public name from its module."""
        if name == "core":
            return import_module("tokencredit.core")  # which sets the attribute
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                value = version("tokencredit")
            except PackageNotFoundError:  # imported from a folder on PYTHONPATH
                value = "unknown"
        elif name in _MODULES:
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
