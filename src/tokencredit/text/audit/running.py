"""`tokencredit audit`: the credit of a run against the truth, at one of its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn import rng
from tokencredit.runs.loop import load
from tokencredit.runs.resuming import at_iteration
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.text.pipeline import UnusableBatch
from tokencredit.text.trainer import PPOTrainer

GROUP = 8
"""Completions per prompt that group estimators compare, in an audit of a run that sampled fewer."""


def audit_run(run: Path, config: PPOConfig, settings: AuditConfig, checkpoint: int | None = None) -> dict[str, Any]:
    """Audit a run as it stood at a checkpoint; nothing is written.

    Args:
        run: its folder; it may still be going on.
        config: its configuration.
        settings: how much is measured; `every` is not read.
        checkpoint: the iteration; None for the newest checkpoint.

    Returns:
        The contents of audit.json.

    Raises:
        ConfigError: there is no such checkpoint, or the run cannot be loaded by its configuration.
        RunStopped: a number of the audit is not finite.
    """
    number, state = at_iteration(run, checkpoint)
    given = [*state["origin"]["given"], *(() if config.model.name else ("model",))]
    if given:
        raise ConfigError(
            f"{str(run)!r} was begun in Python with {', '.join(given)}, which its folder does not hold; audit it while "
            "it trains, with audit.every"
        )
    with rng.preserved():
        trainer = PPOTrainer(args=replace(config, run=replace(config.run, dir=str(run))))
        load(trainer, state, set())
        group = GROUP if config.rollout.per_prompt == 1 else config.rollout.per_prompt
        try:
            audit = replace(trainer.auditor, settings=settings, group=group).audit(number)
        except UnusableBatch as error:
            raise RunStopped(str(error)) from error
        return audit.record(number, settings, trainer.tokenizer) | audit.judge(trainer.processes)
