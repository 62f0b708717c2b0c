"""`tokencredit audit`: audit the credit of a run of either kind at one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokencredit.distributed.processes import Processes, threads
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.report.reading import read_run
from tokencredit.runs.loop import load
from tokencredit.runs.resuming import at_iteration
from tokencredit.settings.control import AgentAuditConfig, ControlConfig
from tokencredit.settings.run_kind import with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig


def audit_run(
    run: Path,
    config: PPOConfig | ControlConfig,
    settings: AuditConfig | AgentAuditConfig,
    checkpoint: int | None = None,
) -> dict[str, Any]:
    """Audit a run at a checkpoint; returns the contents of audit.json, and writes nothing.

    Args:
        run: the run's folder; the run may be in progress.
        config: the run's configuration.
        settings: size of the audit, in the class of the run's own; `every` is not read.
        checkpoint: iteration of the checkpoint; None for the newest.

    Raises:
        ConfigError: there is no such checkpoint, or the run cannot be loaded by its configuration.
        RunStopped: a number in the audit is not finite, or the environment cannot be audited.
    """
    if isinstance(config, ControlConfig):
        assert isinstance(settings, AgentAuditConfig)
        return _audit_agent(run, config, settings, checkpoint)
    assert isinstance(settings, AuditConfig)
    return _audit_completions(run, config, settings, checkpoint)


def _audit_completions(run: Path, config: PPOConfig, settings: AuditConfig, checkpoint: int | None) -> dict[str, Any]:
    from tokencredit.text.ppo_trainer import PPOTrainer

    if arguments := [name for name in config.python if name != "callbacks"]:
        raise ConfigError(
            f"{str(run)!r} was begun in Python with {', '.join(arguments)}, which its folder does not hold; audit it "
            "there with trainer.audit() after trainer.train(), or during training with audit.every"
        )
    with preserved():
        trainer = PPOTrainer(args=replace(with_engine(config), python={}, run=replace(config.run, dir=str(run))))
        number, state = at_iteration(run, checkpoint, trainer.processes, trainer.sharded_tensors())
        load(trainer, state, set())
        rows = read_run(run, samples=False).metrics
        return trainer.auditor.record(number, settings, trainer.tokenizer, rows, trainer.record.screen.say)


def _audit_agent(
    run: Path, config: ControlConfig, settings: AgentAuditConfig, checkpoint: int | None
) -> dict[str, Any]:
    from tokencredit.control.control_trainer import ControlTrainer
    from tokencredit.control.vector_environments import expected_warnings

    number, state = at_iteration(run, checkpoint, Processes().alone())
    with preserved(), threads(config.threads), expected_warnings(config.env):
        trainer = ControlTrainer(replace(config, run=replace(config.run, dir=str(run))))
        try:
            load(trainer, state, set())
            return trainer.auditor.audit(number, settings)
        finally:
            trainer.envs.close()
