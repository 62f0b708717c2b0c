"""`tokencredit audit` for agents: compare the credit of a run with the truth, at one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.vector_environments import expected_warnings
from tokencredit.distributed.processes import Processes, threads
from tokencredit.learn.rng import preserved
from tokencredit.runs.loop import load
from tokencredit.runs.resuming import at_iteration
from tokencredit.settings.control import AgentAuditConfig, ControlConfig


def audit_run(
    run: Path, config: ControlConfig, settings: AgentAuditConfig, checkpoint: int | None = None
) -> dict[str, Any]:
    """Audit a run at a checkpoint; writes nothing.

    Args:
        run: the run's folder; the run may still be in progress.
        config: the run's configuration.
        settings: the audit's sample sizes; `every` is ignored.
        checkpoint: the iteration; None for the newest checkpoint.

    Returns:
        The contents of audit.json.

    Raises:
        ConfigError: there is no such checkpoint, or it does not fit the configuration.
        RunStopped: the environment cannot be audited.
    """
    number, state = at_iteration(run, checkpoint, Processes().alone())
    with preserved(), threads(config.threads), expected_warnings(config.env):
        trainer = ControlTrainer(replace(config, run=replace(config.run, dir=str(run))))
        try:
            load(trainer, state, set())
            return trainer.auditor.audit(number, settings)
        finally:
            trainer.envs.close()
