"""The subcommands of `tokencredit`: the arguments of each, and what it does. Nothing heavy is imported at the top."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokencredit.commands import label, migrate, run_reports, train, use_model
from tokencredit.commands.command_line import Options, Parser, config_parser
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig

COMMANDS: dict[str, tuple[Callable[[], Parser], Callable[[Options], None]]] = {
    "train": (train.train_parser, train.train),
    "plan": (train.plan_parser, train.plan),
    "control": (partial(config_parser, ControlConfig), partial(train.train_run, ControlConfig)),
    "sft": (partial(config_parser, SFTConfig), partial(train.train_run, SFTConfig)),
    "reward-model": (partial(config_parser, RewardModelConfig), partial(train.train_run, RewardModelConfig)),
    "dpo": (partial(config_parser, DPOConfig), partial(train.train_run, DPOConfig)),
    "generate": (use_model.generate_parser, use_model.generate),
    "chat": (use_model.chat_parser, use_model.chat),
    "evaluate": (use_model.evaluate_parser, use_model.evaluate),
    "pairs": (label.pairs_parser, label.pairs),
    "label": (label.label_parser, label.label),
    "audit": (run_reports.audit_parser, run_reports.audit),
    "limit": (run_reports.limit_parser, run_reports.limit),
    "inspect": (run_reports.inspect_parser, run_reports.inspect),
    "play": (run_reports.play_parser, run_reports.play),
    "report": (run_reports.report_parser, run_reports.report),
    "cite": (run_reports.cite_parser, run_reports.cite),
    "compare": (run_reports.compare_parser, run_reports.compare),
    "sweep": (train.sweep_parser, train.sweep),
    "doctor": (run_reports.doctor_parser, run_reports.doctor),
    "migrate": (migrate.migrate_parser, migrate.migrate),
    "schema": (train.schema_parser, train.schema),
    "check-template": (use_model.check_template_parser, use_model.check_template),
}
"""Subcommands: parser and function."""
