"""Tokencredit: PPO for language models from any reward, with the credit of every token in view.

    import tokencredit as tc

Every name is imported on first use, so that the command answers before torch is loaded. docs/python.md shows them.
"""

import ast
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokencredit import core as core
    from tokencredit.control.control_trainer import ControlTrainer as ControlTrainer
    from tokencredit.errors import ConfigError as ConfigError
    from tokencredit.errors import RunStopped as RunStopped
    from tokencredit.report.comparison.compare import compare as compare
    from tokencredit.report.notebook import read_run as read_run
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
    from tokencredit.settings.data import EnvironmentConfig as EnvironmentConfig
    from tokencredit.settings.data import FunctionTerm as FunctionTerm
    from tokencredit.settings.data import PromptsConfig as PromptsConfig
    from tokencredit.settings.data import RewardModelTerm as RewardModelTerm
    from tokencredit.settings.data import ScoreConfig as ScoreConfig
    from tokencredit.settings.model import CriticConfig as CriticConfig
    from tokencredit.settings.model import LoraConfig as LoraConfig
    from tokencredit.settings.model import ModelConfig as ModelConfig
    from tokencredit.settings.model import ShardingConfig as ShardingConfig
    from tokencredit.settings.model import TunedModelConfig as TunedModelConfig
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
    from tokencredit.settings.rollout import OffPolicyConfig as OffPolicyConfig
    from tokencredit.settings.rollout import RolloutConfig as RolloutConfig
    from tokencredit.settings.text import PPOConfig as PPOConfig
    from tokencredit.settings.training import AdvantageConfig as AdvantageConfig
    from tokencredit.settings.training import AuditConfig as AuditConfig
    from tokencredit.settings.training import EvalConfig as EvalConfig
    from tokencredit.settings.training import KLConfig as KLConfig
    from tokencredit.settings.training import OptimConfig as OptimConfig
    from tokencredit.settings.training import RunConfig as RunConfig
    from tokencredit.settings.training import StopConfig as StopConfig
    from tokencredit.settings.training import UpdateConfig as UpdateConfig
    from tokencredit.text.callbacks import Callback as Callback
    from tokencredit.text.offline.offline_trainer import OfflineTrainer as OfflineTrainer
    from tokencredit.text.ppo_trainer import PPOTrainer as PPOTrainer
    from tokencredit.text.rewards.calls import Term as Term
    from tokencredit.tools.check_run import check as check
    from tokencredit.tools.limit_run import limit as limit
    from tokencredit.tools.load_run import load as load

    __version__: str

# What PyTorch and its OpenMP read when they are loaded, unless the user has set it.
# With huge pages, new memory costs a quarter of the time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# OpenMP's threads wait for each other by spinning. Beside another busy process they spin through its turns too, and an
# iteration takes 3.5 times as long; with short waits it takes 1.7 times as long (benchmarks/RESULTS.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _public_names() -> dict[str, str]:
    """Modules of the public names: the imports that type checkers see above are the only list of them."""
    block = next(
        node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULES = _public_names()
__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # a type checker would let a module with __getattr__ have any name

    def __getattr__(name: str) -> Any:
        """Import a public name from its module."""
        if name == "core":
            return import_module("tokencredit.core")  # a module, which sets the attribute
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                value = version("tokencredit")
            except PackageNotFoundError:  # imported from a folder on PYTHONPATH
                value = "unknown"
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
