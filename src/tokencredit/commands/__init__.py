"""The subcommands of `tokencredit`: the arguments of each, and what it does. Nothing heavy is imported at the top."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jsonargparse import Namespace

from tokencredit.commands import models, planning, preferences, results, templates, training
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig
from tokencredit.settings.parsing import Parser, config_parser
from tokencredit.settings.text import PPOConfig

COMMANDS: dict[str, tuple[Callable[[], Parser], Callable[[Namespace], None]]] = {
    "train": (partial(config_parser, PPOConfig), training.train),
    "plan": (planning.plan_parser, planning.plan),
    "control": (partial(config_parser, ControlConfig), training.control),
    "sft": (partial(config_parser, SFTConfig), partial(training.offline, SFTConfig)),
    "reward-model": (partial(config_parser, RewardModelConfig), partial(training.offline, RewardModelConfig)),
    "dpo": (partial(config_parser, DPOConfig), partial(training.offline, DPOConfig)),
    "generate": (models.generate_parser, models.generate),
    "chat": (models.chat_parser, models.chat),
    "evaluate": (models.evaluate_parser, models.evaluate),
    "pairs": (preferences.pairs_parser, preferences.pairs),
    "label": (preferences.label_parser, preferences.label),
    "audit": (results.audit_parser, results.audit),
    "inspect": (results.inspect_parser, results.inspect),
    "play": (results.play_parser, results.play),
    "report": (results.report_parser, results.report),
    "compare": (results.compare_parser, results.compare),
    "sweep": (training.sweep_parser, training.sweep),
    "doctor": (results.doctor_parser, results.doctor),
    "check-template": (templates.check_template_parser, templates.check_template),
}
"""Subcommands: parser and function."""
