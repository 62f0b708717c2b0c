"""The command on chat templates: `check-template`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.untrusted import visible
from tokencredit.settings.command_line import Options, Parser, new_command
from tokencredit.settings.source import read_source


def check_template_parser() -> Parser:
    """The parser of `tokencredit check-template`."""
    parser = new_command(
        "Compare the tokens of episodes with one rendering of a model's chat template.", runs_code=False
    )
    parser.positional(
        "model",
        "MODEL, the folder of a run or a model, or a hub id",
        help="Folder of a model or a run, or a hub id; no weights are loaded.",
    )
    parser.add_argument(
        "--chat_template_kwargs",
        metavar="JSON",
        help='Keyword arguments of the chat template, such as {"enable_thinking": false}; by default the run\'s.',
    )
    return parser


def check_template(options: Options) -> None:
    """Run `tokencredit check-template`."""
    config = read_source(options.model).config
    prompts = config.prompts
    if options.chat_template_kwargs is not None:
        prompts = replace(prompts, chat_template_kwargs=as_object(options.chat_template_kwargs))
    from tokencredit.text.turns.chat.template_check import check_model

    lines, wrong = check_model(config.model.name, prompts)
    for line in lines:
        print(visible(line))
    if wrong:
        raise RunStopped(f"{wrong} of the transcripts above differ in an observation, or their calls are not read back")


def as_object(text: str) -> dict[str, Any]:
    """The value of `--chat_template_kwargs`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        example = '{"enable_thinking": false}'
        raise ConfigError(f"--chat_template_kwargs is {text!r}; it must be a JSON object, such as {example}")
    return value
