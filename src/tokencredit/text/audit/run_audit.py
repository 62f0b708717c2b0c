"""`tokencredit audit`: audit the credit of a run at one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn import rng
from tokencredit.runs.loop import load
from tokencredit.runs.resuming import at_iteration, given_in_python
from tokencredit.settings.options import with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.text.pipeline import UnusableBatch
from tokencredit.text.ppo_trainer import PPOTrainer

GROUP = 8
"""Group size of group estimators in an audit of a run with one completion per prompt."""


def audit_run(run: Path, config: PPOConfig, settings: AuditConfig, checkpoint: int | None = None) -> dict[str, Any]:
    """Audit a run at a checkpoint; writes nothing.

    Args:
        run: the run's folder; the run may be in progress.
        config: the run's configuration.
        settings: size of the audit; `every` is not read.
        checkpoint: iteration of the checkpoint; None for the newest.

    Returns:
        The contents of audit.json.

    Raises:
        ConfigError: there is no such checkpoint, or the run cannot be loaded by its configuration.
        RunStopped: a number in the audit is not finite.
    """
    if config.several_turns():
        raise ConfigError(
            f"{str(run)!r} is a run of several turns; an audit samples continuations of a text from its middle, and an "
            "environment cannot be continued from there"
        )
    arguments = [*given_in_python(run), *(() if config.model.name else ("model",))]
    if arguments:
        raise ConfigError(
            f"{str(run)!r} was begun in Python with {', '.join(arguments)}, which its folder does not hold; audit it "
            "during training, with audit.every"
        )
    with rng.preserved():
        trainer = PPOTrainer(args=replace(with_engine(config), run=replace(config.run, dir=str(run))))
        number, state = at_iteration(run, checkpoint, trainer.processes, trainer.sharded_tensors())
        load(trainer, state, set())
        group = GROUP if config.rollout.per_prompt == 1 else config.rollout.per_prompt
        try:
            assert trainer.auditor is not None
            audit = replace(trainer.auditor, settings=settings, group=group).audit(number)
        except UnusableBatch as error:
            raise RunStopped(str(error)) from error
        return audit.record(number, settings, trainer.tokenizer) | audit.judge(trainer.processes)
