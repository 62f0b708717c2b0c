"""Commands on models: `generate`, `chat`, `evaluate` and `check-template`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from tokencredit.commands.command_line import POSITIVE_FLOAT, POSITIVE_INT, SEED, Options, Parser, checked, new_command
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import check_new_file
from tokencredit.runs.untrusted import visible
from tokencredit.settings.reader import build
from tokencredit.settings.rollout import EngineName
from tokencredit.settings.run_kind import read_policy_config, read_source, run_config_file, with_engine
from tokencredit.tools.scoring_options import EvaluateOptions


def generate_parser() -> Parser:
    """The parser of `tokencredit generate`."""
    parser = new_command("Sample completions from a trained policy.")
    parser.positional("run", "RUN, the folder of a run", help="Folder of a run.")
    parser.add_argument("--prompt", help="Prompt to complete; by default the run's prompts in turn, or episodes.")
    parser.add_argument(
        "--chat", action="store_true", help="Format the prompt as a user message with the chat template."
    )
    parser.add_argument("-n", "--samples", type=POSITIVE_INT, default=5, help="Number of completions.")
    parser.add_argument("--base", action="store_true", help="Sample from the model that the run started from.")
    parser.add_argument(
        "--max_new_tokens", type=POSITIVE_INT, help="Longest completion, in tokens; by default the run's."
    )
    parser.add_argument("--temperature", type=POSITIVE_FLOAT, help="Sampling temperature; by default the run's.")
    parser.add_argument("--seed", type=SEED, default=1, help="Seed of all randomness.")
    parser.add_argument(
        "--engine", type=checked(EngineName), default="local", help="Sampling engine (docs/engines.md)."
    )
    parser.add_argument("--server", help="Address of a vLLM server, with --engine vllm.")
    parser.add_argument("--server_folder", help="Folder through which weights reach the server; by default temporary.")
    return parser


def generate(options: Options) -> None:
    """Run `tokencredit generate`."""
    if options.chat and not options.prompt:
        raise ConfigError("--chat needs --prompt, the user message")
    config = read_policy_config(Path(options.run), options.no_code)
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.runs.console import spoken
    from tokencredit.runs.transcript import transcript
    from tokencredit.tools.trained_policy import Policy

    disable_progress_bar()
    which = "base" if options.base else "policy"
    policy = Policy(
        Path(options.run),
        with_engine(config, options.engine, options.server, options.server_folder),
        which,
        critic=False,
    )
    longest = options.max_new_tokens or config.rollout.max_new_tokens
    if config.several_turns() and options.prompt is None:
        console = Console(highlight=False)
        for record in policy.play(options.samples, longest, options.temperature, options.seed):
            console.print(spoken(transcript(record)), end="\n\n", soft_wrap=True)
        return
    prompts = policy.prompts(options.prompt, options.samples, longest, options.chat)
    for text in prompts.continued(policy.complete(prompts, longest, options.temperature, options.seed)):
        print(visible(text))


def chat_parser() -> Parser:
    """The parser of `tokencredit chat`."""
    parser = new_command("Send the same messages to models, side by side.")
    parser.positional(
        "model", "MODEL, the folder of a run or a model, or a hub id", help="Folder of a run or a model, or a hub id."
    )
    parser.add_argument("--base", action="store_true", help="Also show the model that the run started from.")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="MODEL", help="Further models: runs, folders or hub ids."
    )
    parser.add_argument("--message", help="Answer this one message; by default those of standard input.")
    parser.add_argument(
        "--max_new_tokens", type=POSITIVE_INT, help="Longest reply, in tokens; by default the run's, or 128."
    )
    parser.add_argument("--temperature", type=POSITIVE_FLOAT, help="Sampling temperature; by default the run's, or 1.")
    parser.add_argument("--seed", type=SEED, default=1, help="Seed of all randomness, the same for each model.")
    return parser


def chat(options: Options) -> None:
    """Run `tokencredit chat`."""
    if options.message is not None and not options.message.strip():
        raise ConfigError("--message is empty; give a text, or leave it out to read standard input")
    sources = [(read_source(name, options.no_code), "policy") for name in (options.model, *options.beside)]
    if options.base:
        if sources[0][0].run is None:
            raise ConfigError(f"--base needs a run; {options.model!r} is a model")
        sources.insert(0, (sources[0][0], "base"))
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.tools import chat as chats

    disable_progress_bar()
    settings = options.max_new_tokens, options.temperature, options.seed
    speakers = [chats.load_speaker(source, which, *settings) for source, which in sources]
    console = Console(highlight=False)
    if options.message is not None:
        chats.show(speakers, chats.answer(speakers, options.message), console)
    else:
        chats.chat(speakers, chats.typed(), console, lambda reason: print(visible(reason), file=sys.stderr))


def evaluate_parser() -> Parser:
    """The parser of `tokencredit evaluate`."""
    parser = new_command("Evaluate a trained policy, or any model, by any reward.", kind=EvaluateOptions)
    parser.add_argument("run", nargs="?", help="Folder of a run.")
    parser.add_argument("--model", help="Another model: its folder or hub id, or the folder of a run.")
    parser.add_argument("--base", action="store_true", help="Evaluate the model that the run started from.")
    parser.add_argument(
        "--best", action="store_true", help="Evaluate the policy with the best evaluation, instead of the last."
    )
    parser.add_argument("--out", metavar="FILE", help="New JSON file for the metrics and the settings.")
    return parser


def evaluate(options: Options) -> None:
    """Run `tokencredit evaluate`."""
    if options.run is None and options.model is None:
        raise ConfigError("evaluate needs RUN, the folder of a run, or --model MODEL")
    if options.run is not None and options.model is not None:
        raise ConfigError("RUN and --model are both given; leave one of them out")
    if options.run is not None:
        run_config_file(Path(options.run))
    settings = build(EvaluateOptions, options.settings)
    source, which = read_source(options.model if options.run is None else options.run), which_of(options)
    source = replace(source, config=settings.configure(source, options.no_code))
    reference = None if settings.reference is None else read_source(settings.reference, options.no_code)
    out = None if options.out is None else check_new_file("--out", options.out, ".json")
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.evaluation import evaluate_source, write_metrics

    disable_progress_bar()
    metrics = evaluate_source(source, which, reference)
    if out is not None:
        write_metrics(out, source, which, reference, metrics)


def which_of(options: Options) -> str:
    """The model of a run that `--base` and `--best` choose."""
    if options.base and options.best:
        raise ConfigError("--base and --best are both given; leave one of them out")
    return "base" if options.base else "best" if options.best else "policy"


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
