"""The command `plan`: memory, time and tokens of a run before it begins."""

from __future__ import annotations

from tokencredit.runs.folder import check_new_file
from tokencredit.settings.command_line import POSITIVE_INT, Options, Parser, new_command, to_config
from tokencredit.settings.fields import refuse_unused
from tokencredit.settings.text import PPOConfig

OWN = {
    "processes": "Number of processes of the job; by default 1.",
    "tokens": "Mean length of completions, in tokens; by default the longest.",
    "prompt_tokens": "Length of prompts, in tokens; by default they are tokenized and counted.",
}
"""Options with a value, beside the keys of `train`, with their help."""


def plan_parser() -> Parser:
    """The parser of `tokencredit plan`."""
    parser = new_command(
        "Plan a run of `tokencredit train`: memory, time and tokens; nothing is loaded.", kind=PPOConfig
    )
    for name, text in OWN.items():
        parser.add_argument(f"--{name}", type=POSITIVE_INT, metavar="N", help=text)
    parser.add_argument("--no-time", action="store_true", help="Skip the calibration of time on this machine.")
    parser.add_argument("--out", metavar="FILE", help="New JSON file for the plan.")
    return parser


def plan(options: Options) -> None:
    """Run `tokencredit plan`."""
    config = to_config(options, PPOConfig)
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
