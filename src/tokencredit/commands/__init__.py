"""The subcommands of `tokencredit`: the arguments of each, and what it does. Nothing heavy is imported at the top."""

from __future__ import annotations

from functools import partial
from typing import Any

from tokencredit.commands import label, migrate, run_reports, train, use_model
from tokencredit.commands.command_line import Command, config_parser
from tokencredit.settings.run_kind import CONTROL, OFFLINE
from tokencredit.settings.text import PPOConfig


def _trains(kind: Any) -> Command:
    """A command that trains by a configuration of this class."""
    return Command(partial(config_parser, kind), partial(train.train_run, kind))


COMMANDS: dict[str, Command] = {
    "train": Command(partial(config_parser, PPOConfig, train.CHECK), train.train),
    "plan": train.plan,
    **{run_kind.command: _trains(run_kind.config) for run_kind in (CONTROL, *OFFLINE)},
    "generate": use_model.generate,
    "chat": use_model.chat,
    "evaluate": use_model.evaluate,
    "pairs": label.pairs,
    "label": label.label,
    "audit": run_reports.audit,
    "limit": run_reports.limit,
    "inspect": run_reports.inspect,
    "play": run_reports.play,
    "report": run_reports.report,
    "picture": run_reports.picture,
    "cite": run_reports.cite,
    "compare": run_reports.compare,
    "sweep": train.sweep,
    "doctor": run_reports.doctor,
    "migrate": migrate.migrate,
    "schema": train.schema,
    "check-template": use_model.check_template,
}
"""Subcommands, by name."""
