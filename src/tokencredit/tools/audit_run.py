"""`tokencredit audit`: audit the credit of a run of either kind at one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokencredit.distributed.processes import threads
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.runs.loop import read_back
from tokencredit.settings.control import AgentAuditConfig, ControlConfig
from tokencredit.settings.run_kind import with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig

OPTIONS = {"reward_funcs": "--reward", "train_dataset": "--prompts.dataset"}
"""Options of the command that give arguments of `PPOTrainer`."""


def given_parts(config: PPOConfig, rewards: Sequence[str], dataset: str | None) -> dict[str, Any]:
    """Arguments of `PPOTrainer` in place of those that a run got in Python: rewards and rows by name.

    Args:
        config: the run's configuration.
        rewards: `FILE.py:NAME` of each reward, or a name that `PPOTrainer` takes.
        dataset: `FILE.py:NAME` of the rows, or a data set.

    Raises:
        ConfigError: one cannot be loaded, or the run's own is in its folder.
    """
    from tokencredit.text.data.datasets import read_dataset
    from tokencredit.user_code.user_objects import load_object

    given: dict[str, Any] = {}
    if rewards:
        loaded = [load_object(name, "reward") if ".py:" in name else name for name in rewards]
        given["reward_funcs"] = loaded if isinstance(config.python.get("reward_funcs"), list) else loaded[0]
    if dataset is not None:
        given["train_dataset"] = load_object(dataset, "data") if ".py:" in dataset else read_dataset(dataset)
    for argument, option in OPTIONS.items():
        if argument in given and argument not in config.python:
            raise ConfigError(f"{option} is given, and the run's own is in its folder; leave it out")
    if rewards[1:] and not isinstance(config.python["reward_funcs"], list):
        raise ConfigError(f"--reward names {len(rewards)} rewards, and the run had one; name that one")
    return given


def audit_completions(
    run: Path,
    config: PPOConfig,
    settings: AuditConfig,
    checkpoint: int | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
    estimator: str | None = None,
) -> dict[str, Any]:
    """Audit a run at a checkpoint; returns the contents of audit.json, and writes nothing.

    Args:
        run: the run's folder; the run may be in progress.
        config: the run's configuration.
        settings: size of the audit; `every` is not read.
        checkpoint: iteration of the checkpoint; None for the newest.
        given: arguments of `PPOTrainer`, of `given_parts`.
        estimator: `FILE.py:NAME` of an estimator that is compared as well.

    Raises:
        ConfigError: there is no such checkpoint, or the run cannot be loaded by its configuration.
        RunStopped: a number in the audit is not finite.
    """
    from tokencredit.text.ppo_trainer import PPOTrainer

    of_environment = config.env.factory or "environment_factory" in config.python
    if config.python.get("reward_funcs") == [] and not of_environment:
        raise ConfigError(f"{str(run)!r} cannot be audited: its scores came from calls of learn(batch, scores)")
    if arguments := [name for name in config.python if name not in ("callbacks", "eval_dataset", *given)]:
        flags = [OPTIONS.get(name, "") for name in arguments]
        named = " ".join(f"{flag} FILE.py:NAME" for flag in flags)
        by_command = (
            f"; or give the command {named}; a FILE.py is imported, so it trains under if __name__ == '__main__':"
        )
        raise ConfigError(
            f"{str(run)!r} was begun in Python with {', '.join(arguments)}, which its folder does not hold; audit it "
            "there: trainer.audit() after trainer.train(), or of another trainer made with the same arguments"
            f"{by_command if all(flags) else ''}"
        )
    with preserved():
        python = {name: config.python[name] for name in given}
        args = replace(with_engine(config), python=python, run=replace(config.run, dir=str(run)))
        trainer = PPOTrainer(args=args, **given)
        number = read_back(trainer, checkpoint)
        auditor = trainer.auditor.beside(estimator)
        return auditor.record(number, settings, trainer.record.history, trainer.record.screen.say)


def audit_agent(
    run: Path, config: ControlConfig, settings: AgentAuditConfig, checkpoint: int | None = None
) -> dict[str, Any]:
    """As `audit_completions`, of a run of `tokencredit control`; `RunStopped` if its environment cannot be audited."""
    from tokencredit.control.control_trainer import ControlTrainer
    from tokencredit.control.vector_environments import expected_warnings

    with preserved(), threads(config.threads), expected_warnings(config.env):
        trainer = ControlTrainer(replace(config, run=replace(config.run, dir=str(run))))
        try:
            return trainer.auditor.audit(read_back(trainer, checkpoint), settings)
        finally:
            trainer.envs.close()
