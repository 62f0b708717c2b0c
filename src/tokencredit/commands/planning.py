"""The command `plan`: memory, time and tokens of a run before it begins."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from tokencredit.runs.folder import check_new_file
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.fields import refuse_unused
from tokencredit.settings.parsing import Parser, options_parser
from tokencredit.settings.text import PPOConfig

OWN = {
    "processes": (PositiveInt | None, "Number of processes of the job; by default 1."),
    "tokens": (PositiveInt | None, "Mean length of completions, in tokens; by default the longest."),
    "prompt_tokens": (PositiveInt | None, "Length of prompts, in tokens; by default they are tokenized and counted."),
}
"""Options with a value, beside the keys of `train`: type and help."""


@cache
def plan_parser() -> Parser:
    """The parser of `tokencredit plan`."""
    parser = options_parser(PPOConfig, "Plan a run of `tokencredit train`: memory, time and tokens; nothing is loaded.")
    parser.command = "plan"
    for name, (kind, text) in OWN.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--no-time", action="store_true", help="Skip the calibration of time on this machine.")
    parser.add_argument("--out", metavar="FILE", help="New JSON file for the plan.")
    return parser


def plan(options: Namespace) -> None:
    """Run `tokencredit plan`."""
    settings = vars(plan_parser().instantiate(options))
    config = PPOConfig(**{item.name: settings[item.name] for item in fields(PPOConfig)})
    if options.no_code:
        refuse_foreign_code(config)
    refuse_unused(config, rows=())
    out = None if options.out is None else check_new_file("--out", options.out, ".json")
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.tools.plan.plan import make_plan
    from tokencredit.tools.plan.show import show, write
    from tokencredit.tools.plan.work import Options

    disable_progress_bar()
    made = make_plan(
        config, Options(options.processes or 1, options.tokens, options.prompt_tokens, not options.no_time)
    )
    show(made)
    if out is not None:
        write(made, out)
