"""The `tokencredit` command. Arguments are read and checked before anything heavy is imported."""

from __future__ import annotations

import errno
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import AgentAuditConfig, ControlConfig, EpisodesConfig
from tokencredit.settings.fields import refuse_idle
from tokencredit.settings.parsing import (
    config_parser,
    configure,
    explain,
    new_command,
    new_parser,
    plainly,
    resumed_run,
    to_config,
    with_resumed,
)
from tokencredit.settings.run_file import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.settings.world import CONTROL, world_of
from tokencredit.settings.yaml import read_yaml

FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130
"""Exit codes: a run that had to stop; something to correct first; Ctrl-C, as shells count it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # jsonargparse leaves the comments out unless asked; a configuration without them explains nothing.
    arguments = ["--print_config=comments" if a == "--print_config" else a for a in arguments]
    parser, commands = build_parser()
    try:
        arguments = with_resumed(arguments)
        with plainly():
            chosen = parser.parse_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return BAD_ARGUMENTS
        options = chosen[chosen.command]
        # The flags themselves, since a configuration file could say otherwise.
        options.no_code, options.resume = "--no-code" in arguments, resumed_run(arguments)
        COMMANDS[chosen.command][1](options)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except ArgumentError as error:
        return complain(explain(str(error), arguments, commands.get(arguments[0])), BAD_ARGUMENTS)
    except ConfigError as error:
        return fail(error, str(error), BAD_ARGUMENTS, arguments)
    except RunStopped as error:
        return fail(error, str(error), FAILED, arguments)
    except OSError as error:
        return fail(error, describe(error), FAILED, arguments)
    return 0


def train(options: Namespace) -> None:
    """`tokencredit train`."""
    resume = options.resume is not None
    config = to_config(options, PPOConfig, options.no_code, begun=begun(options))
    refuse_idle(config, rows=())
    first = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher starts, only this one writes
    if first and not resume:
        RunFolder(config.run.dir).refuse_if_used()  # before the seconds that the imports below take
    # Before the first large tensor: PyTorch then asks Linux for large pages, in which new memory costs a quarter.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.processes import Processes
    from tokencredit.text.trainer import PPOTrainer

    disable_progress_bar()  # one bar on the screen: ours
    processes = Processes()
    try:
        PPOTrainer(args=config).train(resume_from_checkpoint=resume)
    finally:
        processes.close()


def begun(options: Namespace) -> Path | None:
    """The configuration of the run that `--resume` goes on with, if any."""
    return None if options.resume is None else Path(options.resume) / "config.yaml"


def control(options: Namespace) -> None:
    """`tokencredit control`."""
    resume = options.resume is not None
    config = to_config(options, ControlConfig, options.no_code, begun=begun(options))
    if not resume:
        RunFolder(config.run.dir).refuse_if_used()
    require_gymnasium()
    from tokencredit.control.trainer import ControlTrainer

    ControlTrainer(config).train(resume_from_checkpoint=resume)


def play_parser() -> ArgumentParser:
    """The arguments of `tokencredit play`."""
    parser = new_command("Play with the agent that a run trained.")
    parser.add_argument("run", help="The folder of a run.")
    parser.add_argument("-n", "--episodes", type=PositiveInt, default=10, help="How many episodes.")
    parser.add_argument(
        "--sample", action="store_true", help="Draw actions as in training; else the likeliest is taken."
    )
    parser.add_argument("--videos", type=NonNegativeInt, default=0, help="Further episodes that are filmed.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="The one seed behind all randomness.")
    return parser


def play(options: Namespace) -> None:
    """`tokencredit play`."""
    config = read_config(Path(options.run) / "config.yaml", ControlConfig, options.no_code)
    require_gymnasium()
    from tokencredit.control.evaluation import play_run

    settings = EpisodesConfig(episodes=options.episodes, greedy=not options.sample, videos=options.videos)
    play_run(Path(options.run), config, settings, options.seed)


def require_gymnasium() -> None:
    """Raise `ConfigError` if the Gymnasium world is not installed."""
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ConfigError("agents need Gymnasium: pip install tokencredit[control]") from error


def generate_parser() -> ArgumentParser:
    """The arguments of `tokencredit generate`."""
    parser = new_command("Write from the policy that a run trained.")
    parser.add_argument("run", help="The folder of a run.")
    parser.add_argument("--prompt", help="What to continue; by default the run's own prompts in turn.")
    parser.add_argument(
        "--chat", action="store_true", help="The prompt is a user's message, read through the chat template."
    )
    parser.add_argument("-n", "--samples", type=PositiveInt, default=5, help="How many completions.")
    parser.add_argument("--base", action="store_true", help="Write from the model that the run started from.")
    parser.add_argument("--max_new_tokens", type=PositiveInt | None, help="By default the run's.")
    parser.add_argument("--temperature", type=PositiveFloat | None, help="By default the run's.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="The one seed behind all randomness.")
    return parser


def generate(options: Namespace) -> None:
    """`tokencredit generate`."""
    if options.chat and not options.prompt:
        raise ConfigError("--chat needs --prompt, the message")
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.policy import Policy

    disable_progress_bar()
    policy = Policy(Path(options.run), config, "base" if options.base else "policy", critic=False)
    longest = options.max_new_tokens or config.rollout.max_new_tokens
    prompts = policy.prompts(options.prompt, options.samples, longest, options.chat)
    for text in prompts.continued(policy.complete(prompts, longest, options.temperature, options.seed)):
        print(visible(text))


def evaluate_parser() -> ArgumentParser:
    """The arguments of `tokencredit evaluate`."""
    parser = new_command("Measure the policy that a run trained.")
    parser.add_argument("run", help="The folder of a run.")
    parser.add_argument("--base", action="store_true", help="Measure the model that the run started from.")
    parser.add_argument("--best", action="store_true", help="Measure the best policy by evaluation, not the last.")
    return parser


def evaluate(options: Namespace) -> None:
    """`tokencredit evaluate`."""
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.evaluation import evaluate_run

    disable_progress_bar()
    evaluate_run(Path(options.run), config, "base" if options.base else "best" if options.best else "policy")


def audit_parser() -> ArgumentParser:
    """The arguments of `tokencredit audit`."""
    parser = new_command("Measure a run's credit against the truth, and show it in the run's page.")
    parser.add_argument("run", help="The folder of a run; it may still be going on.")
    parser.add_argument("--checkpoint", type=PositiveInt | None, help="Its iteration; by default the newest one.")
    parser.add_argument("--completions", type=PositiveInt, default=16, help="Fresh completions, or episodes, to audit.")
    parser.add_argument("--continuations", type=PositiveInt, default=32, help="Continuations per state.")
    parser.add_argument(
        "--states",
        help="States of each, spread over it: all, or a number; by default all of a completion, and 4 of an episode.",
    )
    parser.add_argument("--seconds", type=PositiveFloat | None, help="Longest time; by default none.")
    return parser


def audit(options: Namespace) -> None:
    """`tokencredit audit`."""
    asked = options.states
    if asked not in (None, "all") and not (asked.isdecimal() and int(asked)):
        raise ConfigError(f"--states is {asked}; it must be all, or a whole number of at least 1")
    states = {} if asked is None else {"states": None if asked == "all" else int(asked)}
    for name in ("completions", "continuations"):
        if (size := getattr(options, name)) < 2:
            raise ConfigError(f"--{name} is {size}; it must be at least 2")
    run, shared = Path(options.run), {"every": 1, "continuations": options.continuations, "seconds": options.seconds}
    found = audits_of(run, options, shared | states)

    from tokencredit.report.page import write_report
    from tokencredit.runs.console import Screen
    from tokencredit.runs.folder import write_audit

    write_audit(RunFolder(options.run), found)
    Screen(0).audit(found)
    print(write_report(run))


def audits_of(run: Path, options: Namespace, shared: dict[str, Any]) -> dict[str, Any]:
    """An audit of a run of either kind; `shared` are settings that both have."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{options.run!r} is not a run's folder: it has no config.yaml")
    settings = read_yaml(run / "config.yaml")
    if isinstance(settings, dict) and world_of(settings) is CONTROL:
        agent = read_config(run / "config.yaml", ControlConfig, options.no_code)
        require_gymnasium()
        from tokencredit.control.audit.running import audit_run as audit_agent

        return audit_agent(run, agent, AgentAuditConfig(episodes=options.completions, **shared), options.checkpoint)
    config = read_config(run / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.audit.running import audit_run

    disable_progress_bar()
    settings = AuditConfig(completions=options.completions, **{"states": None, **shared})
    return audit_run(run, config, settings, options.checkpoint)


def report_parser() -> ArgumentParser:
    """The arguments of `tokencredit report`."""
    parser = new_command("Write a run's page, which opens in any browser.", runs_code=False)
    parser.add_argument("run", help="The folder of a run; it may still be going on.")
    parser.add_argument("--open", action="store_true", help="Open the page.")
    return parser


def report(options: Namespace) -> None:
    """`tokencredit report`."""
    from tokencredit.report.page import write_report

    page = write_report(Path(options.run))
    print(page)
    if options.open:
        webbrowser.open(page.resolve().as_uri())


def compare_parser() -> ArgumentParser:
    """The arguments of `tokencredit compare`."""
    parser = new_command("Write a page and pictures that show runs beside each other.", runs_code=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folders of runs; they may still be going on.")
    parser.add_argument("--metric", help="What to compare; by default the reward of texts, or an agent's return.")
    parser.add_argument("--group-by", metavar="KEY", help="Runs with the same value of this key are one curve.")
    parser.add_argument("--smooth", type=PositiveInt, default=1, help="Numbers in the running mean of each run.")
    parser.add_argument("--out", default="comparison", help="The folder to write into.")
    return parser


def compare(options: Namespace) -> None:
    """`tokencredit compare`."""
    from tokencredit.report.comparison_page import write_comparison

    settings = {"metric": options.metric, "group_by": options.group_by, "smooth": options.smooth}
    print(write_comparison([Path(run) for run in options.runs], **settings, out=Path(options.out)))


def sweep_parser() -> ArgumentParser:
    """The arguments of `tokencredit sweep`."""
    parser = new_command("Do all runs that a file asks for, and compare them.")
    parser.add_argument("file", help="A YAML file: docs/sweeps.md says what it holds.")
    parser.add_argument("--seeds", type=PositiveInt | None, help="Only so many of the file's seeds, the first ones.")
    parser.add_argument("--jobs", type=PositiveInt, default=1, help="Runs at a time.")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="Only say what would be run.")
    parser.add_argument("--export", metavar="FOLDER", help="Run nothing; write a configuration file for each run.")
    return parser


def sweep(options: Namespace) -> None:
    """`tokencredit sweep`."""
    if options.export and options.dry_run:
        raise ConfigError("--export and --dry_run are both given; leave one of them out")
    from tokencredit.sweep import runner
    from tokencredit.sweep.plan import first_seeds, read_sweep

    runs = first_seeds(read_sweep(Path(options.file), partial(configure, no_code=options.no_code)), options.seeds)
    if options.dry_run:
        runner.show(runs, options.jobs)
    elif options.export:
        runner.export(runs, Path(options.export), options.file)
    else:
        runner.sweep(runs, options.jobs, options.file)


def doctor_parser() -> ArgumentParser:
    """The arguments of `tokencredit doctor`."""
    parser = new_command("Say what is wrong with a run.", runs_code=False)
    parser.add_argument("run", help="The folder of a run; it may still be going on.")
    return parser


def doctor(options: Namespace) -> None:
    """`tokencredit doctor`."""
    from tokencredit.report.reading import read_run
    from tokencredit.runs.console import Screen
    from tokencredit.runs.diagnosis import diagnose

    run = read_run(Path(options.run), samples=False)
    screen, findings = Screen(len(run.metrics)), diagnose(run.metrics, run.config, ended=bool(run.summary))
    screen.findings(findings)
    if not findings:
        screen.say("nothing that the checks know of is wrong with this run")


COMMANDS: dict[str, tuple[Callable[[], ArgumentParser], Callable[[Namespace], None]]] = {
    "train": (partial(config_parser, PPOConfig), train),
    "control": (partial(config_parser, ControlConfig), control),
    "generate": (generate_parser, generate),
    "evaluate": (evaluate_parser, evaluate),
    "audit": (audit_parser, audit),
    "play": (play_parser, play),
    "report": (report_parser, report),
    "compare": (compare_parser, compare),
    "sweep": (sweep_parser, sweep),
    "doctor": (doctor_parser, doctor),
}
"""Of each subcommand, what reads its arguments and what does it."""


@cache
def build_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The command's parser, and that of each subcommand by name."""
    parser = new_parser("PPO for language models and agents.")
    chosen = parser.add_subcommands(dest="command", required=False)
    commands = {name: arguments() for name, (arguments, _) in COMMANDS.items()}
    for name, command in commands.items():
        chosen.add_subcommand(name, command, help=command.description)
    return parser, commands


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
