"""The `tokencredit` command. Arguments are read and checked before anything heavy is imported."""

from __future__ import annotations

import errno
import os
import sys
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from tokencredit.parsing import (
    build_parser,
    configure,
    explain,
    plainly,
    read_config,
    resumed_run,
    to_config,
    with_resumed,
)
from tokencredit.runs.config import PPOConfig
from tokencredit.runs.console import visible
from tokencredit.runs.control_config import ControlConfig, EpisodesConfig
from tokencredit.runs.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder

FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130
"""Exit codes: a run that had to stop; something to correct first; Ctrl-C, as shells count it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # jsonargparse leaves the comments out unless asked; a configuration without them explains nothing.
    arguments = ["--print_config=comments" if a == "--print_config" else a for a in with_resumed(arguments)]
    parser, commands = build_parser()
    try:
        with plainly():
            chosen = parser.parse_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return BAD_ARGUMENTS
        options = chosen[chosen.command]
        # The flags themselves, since a configuration file could say otherwise.
        options.no_code, options.resume = "--no-code" in arguments, resumed_run(arguments)
        COMMANDS[chosen.command](commands[chosen.command], options)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except ArgumentError as error:
        return complain(explain(str(error), arguments, commands), BAD_ARGUMENTS)
    except ConfigError as error:
        return fail(error, str(error), BAD_ARGUMENTS, arguments)
    except RunStopped as error:
        return fail(error, str(error), FAILED, arguments)
    except OSError as error:
        return fail(error, describe(error), FAILED, arguments)
    return 0


def train(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit train`."""
    config = to_config(parser, options, PPOConfig, options.no_code)
    resume = options.resume is not None
    first = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher starts, only this one writes
    if first and not resume:
        RunFolder(config.run.dir).refuse_if_used()  # before the seconds that the imports below take
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.trainer import PPOTrainer

    disable_progress_bar()  # one bar on the screen: ours

    PPOTrainer(args=config).train(resume_from_checkpoint=resume)


def control(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit control`."""
    config = to_config(parser, options, ControlConfig, options.no_code)
    resume = options.resume is not None
    if not resume:
        RunFolder(config.run.dir).refuse_if_used()
    require_gymnasium()
    from tokencredit.control.trainer import ControlTrainer

    ControlTrainer(config).train(resume_from_checkpoint=resume)


def play(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit play`."""
    config = read_config(Path(options.run) / "config.yaml", ControlConfig, options.no_code)
    require_gymnasium()
    from tokencredit.control.playing import play_run

    settings = EpisodesConfig(episodes=options.episodes, greedy=not options.sample, videos=options.videos)
    play_run(Path(options.run), config, settings, options.seed)


def require_gymnasium() -> None:
    """Raise `ConfigError` if the Gymnasium world is not installed."""
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ConfigError("agents need Gymnasium: pip install tokencredit[control]") from error


def generate(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit generate`."""
    if options.chat and not options.prompt:
        raise ConfigError("--chat needs --prompt, the message")
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.generate import generate

    disable_progress_bar()
    generate(
        Path(options.run),
        config,
        prompt=options.prompt,
        chat=options.chat,
        samples=options.samples,
        base=options.base,
        max_new_tokens=options.max_new_tokens or config.rollout.max_new_tokens,
        temperature=options.temperature or config.rollout.temperature,
        seed=options.seed,
    )


def evaluate(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit evaluate`."""
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.evaluation import evaluate_run

    disable_progress_bar()
    evaluate_run(Path(options.run), config, "base" if options.base else "best" if options.best else "policy")


def report(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit report`."""
    from tokencredit.report.page import write_report

    page = write_report(Path(options.run))
    print(page)
    if options.open:
        webbrowser.open(page.resolve().as_uri())


def compare(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit compare`."""
    from tokencredit.report.comparison import write_comparison

    settings = {"metric": options.metric, "group_by": options.group_by, "smooth": options.smooth}
    print(write_comparison([Path(run) for run in options.runs], **settings, out=Path(options.out)))


def sweep(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit sweep`."""
    if options.export and options.dry_run:
        raise ConfigError("--export and --dry_run are both given; leave one of them out")
    from tokencredit import sweeping
    from tokencredit.runs.sweep import first_seeds, read_sweep

    runs = first_seeds(read_sweep(Path(options.file), partial(configure, no_code=options.no_code)), options.seeds)
    if options.dry_run:
        sweeping.show(runs, options.jobs)
    elif options.export:
        sweeping.export(runs, Path(options.export), options.file)
    else:
        sweeping.sweep(runs, options.jobs, options.file)


def doctor(parser: ArgumentParser, options: Namespace) -> None:
    """`tokencredit doctor`."""
    from tokencredit.report.reading import read_run
    from tokencredit.runs.console import Screen
    from tokencredit.runs.diagnosis import diagnose

    run = read_run(Path(options.run), samples=False)
    screen, findings = Screen(len(run.metrics)), diagnose(run.metrics, run.config, ended=bool(run.summary))
    screen.findings(findings)
    if not findings:
        screen.say("nothing that the checks know of is wrong with this run")


COMMANDS = {
    "train": train,
    "control": control,
    "generate": generate,
    "evaluate": evaluate,
    "play": play,
    "report": report,
    "compare": compare,
    "sweep": sweep,
    "doctor": doctor,
}


def describe(error: OSError) -> str:
    """What the operating system refused, and where."""
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space; what had been written is intact" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{advice}"


def fail(error: Exception, message: str, code: int, arguments: Sequence[str]) -> int:
    """Complain of an error, with its traceback if `--debug` was given."""
    if "--debug" in arguments:
        raise error
    return complain(message, code)


def complain(message: str, code: int) -> int:
    """Say what is wrong, in words that may hold the texts of others, and return the exit code."""
    lines = [visible(line) for line in message.split("\n")]
    print("tokencredit:", "\n".join(lines), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
