"""Commands on models: `generate`, `chat`, `evaluate` and `check-template`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from tokencredit.commands.command_line import Given, Options, command, option, positional
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import check_new_file
from tokencredit.runs.untrusted import accept_any_bytes, visible, visible_lines
from tokencredit.settings.data import CONVERSATION
from tokencredit.settings.reader import build
from tokencredit.settings.run_kind import ModelSource, read_source
from tokencredit.tools.scoring_options import FLAGS, EvaluateOptions, GenerateOptions, SamplingOptions

SOURCE = "MODEL, the folder of a run or a model, or a hub id"
"""The model that a command reads, in words."""
MODEL = (
    positional("model", SOURCE, help="Folder of a run, a model or an adapter, or a hub id."),
    option("--base", action="store_true", help="Take the model that the run started from."),
    option("--best", action="store_true", help="Take the policy with the best evaluation, not the last."),
)
"""Arguments of the commands that sample from a model."""


def source_of(options: Options) -> tuple[ModelSource, str]:
    """The model of a command, and the one of a run's that `--base` and `--best` choose.

    Raises:
        ConfigError: both are given, or one of them without a run.
    """
    if options.base and options.best:
        raise ConfigError("--base and --best are both given; leave one of them out")
    which = "base" if options.base else "best" if options.best else "policy"
    source = read_source(options.model, options.no_code)
    if which != "policy" and source.run is None:
        raise ConfigError(f"--{which} needs a run; {options.model!r} is a model")
    return source, which


@command(
    "Sample completions from a trained policy, or any model.",
    *MODEL,
    option("-n", dest="n", action=Given, metavar="N", help="The same as --n."),
    option(
        "--prompt",
        help="Text to continue, a conversation as JSON, or - for one of them per line of standard input; by default "
        "the run's prompts in turn, or episodes.",
    ),
    option("--ids", action="store_true", help="Print token ids, a JSON list per completion."),
    kind=GenerateOptions,
)
def generate(options: Options) -> None:
    """Run `tokencredit generate`."""
    settings = build(GenerateOptions, options.settings)
    source, which = source_of(options)
    config = settings.configure(source, options.no_code)
    each, asked = settings.given("prompts"), options.prompt is not None
    if each and asked:
        raise ConfigError("--prompt and prompts.* are both given; leave one of them out")
    if not (each or asked or source.scored):
        raise source.lacks("prompts", f"--prompt, {FLAGS['prompts']}")
    played = config.several_turns() and not (each or asked)
    if played and options.ids:
        raise ConfigError("--ids has no effect on episodes, whose transcripts are printed; leave it out")
    prompts = asked_for(options.prompt) if asked else None
    from rich.console import Console

    from tokencredit.runs.console import spoken
    from tokencredit.runs.transcript import transcript
    from tokencredit.tools.trained_policy import Policy, completion_ids

    policy, console = Policy(source, which, settings, critic=False), Console(highlight=False)
    if played:
        for record in policy.play(settings.n or 5):
            console.print(spoken(transcript(record)), end="\n\n", soft_wrap=True)
        return
    n, sampling = settings.n or (1 if each or asked else 5), policy.config.rollout
    for batch in policy.complete(policy.prompts(prompts, n, sampling.max_new_tokens, each), sampling):
        lines = map(json.dumps, completion_ids(batch)) if options.ids else map(visible_lines, batch.shown())
        print("\n".join(lines), flush=True)


def asked_for(prompt: str) -> list[Any]:
    """The prompts of `--prompt`: texts, and conversations that are written as JSON.

    Raises:
        ConfigError: a conversation is not JSON, or standard input is empty.
    """
    lines = [prompt]
    if prompt == "-":
        accept_any_bytes(sys.stdin)
        lines = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
        if not lines:
            raise ConfigError("--prompt is -, and standard input has no line; give one prompt per line")
    prompts: list[Any] = []
    for line in lines:
        try:
            prompts.append(json.loads(line) if CONVERSATION.match(line) else line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--prompt is {line!r:.60}, a conversation that is not JSON: {error}") from error
    return prompts


@command(
    "Send the same messages to models, side by side.",
    *MODEL,
    option("--beside", nargs="+", default=[], metavar="MODEL", help="Further models: runs, folders or hub ids."),
    option("--message", help="Answer this one message; by default those of standard input."),
    kind=SamplingOptions,
)
def chat(options: Options) -> None:
    """Run `tokencredit chat`."""
    if options.message is not None and not options.message.strip():
        raise ConfigError("--message is empty; give a text, or leave it out to read standard input")
    settings = build(SamplingOptions, options.settings)
    source, which = source_of(options)
    sources = [(source, name) for name in dict.fromkeys((which, "policy"))]  # another one beside the last policy
    sources += [(read_source(name, options.no_code), "policy") for name in options.beside]
    for source, _ in sources:
        settings.configure(source, options.no_code)
    from rich.console import Console

    from tokencredit.tools import chat as chats

    speakers = [chats.load_speaker(source, which, settings) for source, which in sources]
    console = Console(highlight=False)
    if options.message is not None:
        chats.show(speakers, chats.answer(speakers, options.message), console)
    else:
        chats.chat(speakers, chats.typed(), console, lambda reason: print(visible(reason), file=sys.stderr))


@command(
    "Evaluate a trained policy, or any model, by any reward.",
    *MODEL,
    option("--out", metavar="FILE", help="New JSON file for the metrics and the settings."),
    kind=EvaluateOptions,
)
def evaluate(options: Options) -> None:
    """Run `tokencredit evaluate`."""
    settings = build(EvaluateOptions, options.settings)
    source, which = source_of(options)
    source = replace(source, config=settings.configure(source, options.no_code))
    reference = None if settings.reference is None else read_source(settings.reference, options.no_code)
    out = None if options.out is None else check_new_file("--out", options.out, ".json")

    from tokencredit.text.evaluation import evaluate_source, write_metrics

    metrics = evaluate_source(source, which, reference)
    if out is not None:
        write_metrics(out, source, which, reference, metrics)


@command(
    "Compare the tokens of episodes with one rendering of a model's chat template.",
    positional("model", SOURCE, help="Folder of a model or a run, or a hub id; no weights are loaded."),
    option(
        "--chat_template_kwargs",
        metavar="JSON",
        help='Keyword arguments of the chat template, such as {"enable_thinking": false}; by default the run\'s.',
    ),
    runs_code=False,
)
def check_template(options: Options) -> None:
    """Run `tokencredit check-template`."""
    config = read_source(options.model).config
    prompts = config.prompts
    if options.chat_template_kwargs is not None:
        try:
            kwargs = json.loads(options.chat_template_kwargs)
        except (ValueError, RecursionError):
            kwargs = None
        if not isinstance(kwargs, dict):
            raise ConfigError(
                f"--chat_template_kwargs is {options.chat_template_kwargs!r}; it must be a JSON object, such as "
                '{"enable_thinking": false}'
            )
        prompts = replace(prompts, chat_template_kwargs=kwargs)
    from tokencredit.text.turns.chat.template_check import check_model

    lines, wrong = check_model(config.model.name, prompts)
    for line in lines:
        print(visible(line))
    if wrong:
        raise RunStopped(f"{wrong} of the transcripts above differ in an observation, or their calls are not read back")
