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

from jsonargparse import ArgumentError, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import AgentAuditConfig, ControlConfig, EpisodesConfig
from tokencredit.settings.fields import refuse_idle
from tokencredit.settings.parsing import (
    Parser,
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
from tokencredit.settings.run_file import read_config, run_config_file
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.settings.world import CONTROL, world_of
from tokencredit.settings.yaml import read_yaml
from tokencredit.signals import INTERRUPTED, end_on_interrupt, raising_interrupt

FAILED, BAD_ARGUMENTS = 1, 2
"""Exit codes: a run that failed; invalid arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # By default jsonargparse prints the configuration without the help texts.
    arguments = ["--print_config=comments" if a == "--print_config" else a for a in arguments]
    parser, commands = build_parser()
    if arguments[1:] in (["--help", "all"], ["-h", "all"]) and arguments[0] in commands:
        print(commands[arguments[0]].whole_help())
        return 0
    try:
        arguments = with_resumed(arguments)
        with plainly():
            chosen = parser.parse_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return BAD_ARGUMENTS
        options = chosen[chosen.command]
        # From the arguments themselves: a configuration file could set these too.
        options.no_code, options.resume = "--no-code" in arguments, resumed_run(arguments)
        set_up_torch()
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


def set_up_torch() -> None:
    """Set what PyTorch reads from the environment when it is loaded, unless the user has set it."""
    # With huge pages, new memory costs a quarter of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # OpenMP's threads wait for each other by spinning. Beside another busy process they spin through its turns too, and
    # an iteration takes 4 times as long; with short waits it takes 1.5 times as long (benchmarks/RESULTS.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def train(options: Namespace) -> None:
    """Run `tokencredit train`."""
    resume = options.resume is not None
    config = to_config(options, PPOConfig, options.no_code, begun=begun(options))
    refuse_idle(config, rows=())
    first = os.environ.get("RANK", "0") == "0"  # only the main process writes
    if first and not resume:
        RunFolder(config.run.dir).refuse_if_used()  # before the slow imports below
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.processes import Processes
    from tokencredit.text.trainer import PPOTrainer

    disable_progress_bar()  # the screen has its own progress bar
    processes = Processes()
    try:
        trainer = PPOTrainer(args=config)
        with raising_interrupt():
            trainer.train(resume_from_checkpoint=resume)
    finally:
        processes.close()


def begun(options: Namespace) -> Path | None:
    """The config.yaml of the run that `--resume` continues, if any."""
    return None if options.resume is None else Path(options.resume) / "config.yaml"


def control(options: Namespace) -> None:
    """Run `tokencredit control`."""
    resume = options.resume is not None
    config = to_config(options, ControlConfig, options.no_code, begun=begun(options))
    if not resume:
        RunFolder(config.run.dir).refuse_if_used()
    require_gymnasium()
    from tokencredit.control.trainer import ControlTrainer

    with raising_interrupt():  # from the start, so that the environments' processes are ended too
        ControlTrainer(config).train(resume_from_checkpoint=resume)


def play_parser() -> Parser:
    """The parser of `tokencredit play`."""
    parser = new_command("Play episodes with a trained agent.")
    parser.add_argument("run", help="Folder of a run.")
    parser.add_argument("-n", "--episodes", type=PositiveInt, default=10, help="Number of episodes.")
    parser.add_argument(
        "--sample", action="store_true", help="Sample actions as in training, instead of the most likely ones."
    )
    parser.add_argument("--videos", type=NonNegativeInt, default=0, help="Extra episodes, recorded on video.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="Seed of all randomness.")
    return parser


def play(options: Namespace) -> None:
    """Run `tokencredit play`."""
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
        raise ConfigError("agents need Gymnasium, which is not installed: pip install tokencredit[control]") from error


def generate_parser() -> Parser:
    """The parser of `tokencredit generate`."""
    parser = new_command("Sample completions from a trained policy.")
    parser.add_argument("run", help="Folder of a run.")
    parser.add_argument("--prompt", help="Prompt to complete; by default the run's prompts in turn.")
    parser.add_argument(
        "--chat", action="store_true", help="Format the prompt as a user message with the chat template."
    )
    parser.add_argument("-n", "--samples", type=PositiveInt, default=5, help="Number of completions.")
    parser.add_argument("--base", action="store_true", help="Sample from the model that the run started from.")
    parser.add_argument(
        "--max_new_tokens", type=PositiveInt | None, help="Longest completion, in tokens; by default the run's."
    )
    parser.add_argument("--temperature", type=PositiveFloat | None, help="Sampling temperature; by default the run's.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="Seed of all randomness.")
    return parser


def generate(options: Namespace) -> None:
    """Run `tokencredit generate`."""
    if options.chat and not options.prompt:
        raise ConfigError("--chat needs --prompt, the user message")
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.policy import Policy

    disable_progress_bar()
    policy = Policy(Path(options.run), config, "base" if options.base else "policy", critic=False)
    longest = options.max_new_tokens or config.rollout.max_new_tokens
    prompts = policy.prompts(options.prompt, options.samples, longest, options.chat)
    for text in prompts.continued(policy.complete(prompts, longest, options.temperature, options.seed)):
        print(visible(text))


def evaluate_parser() -> Parser:
    """The parser of `tokencredit evaluate`."""
    parser = new_command("Evaluate a trained policy.")
    parser.add_argument("run", help="Folder of a run.")
    parser.add_argument("--base", action="store_true", help="Evaluate the model that the run started from.")
    parser.add_argument(
        "--best", action="store_true", help="Evaluate the policy with the best evaluation, instead of the last."
    )
    return parser


def evaluate(options: Namespace) -> None:
    """Run `tokencredit evaluate`."""
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.evaluation import evaluate_run

    disable_progress_bar()
    evaluate_run(Path(options.run), config, "base" if options.base else "best" if options.best else "policy")


def audit_parser() -> Parser:
    """The parser of `tokencredit audit`."""
    parser = new_command("Measure a run's credit against true values, and add the result to its page.")
    parser.add_argument("run", help="Folder of a run, finished or still training.")
    parser.add_argument(
        "--checkpoint", type=PositiveInt | None, help="Iteration of the checkpoint; by default the newest."
    )
    parser.add_argument("--completions", type=PositiveInt, default=16, help="Completions or episodes to audit.")
    parser.add_argument("--continuations", type=PositiveInt, default=32, help="Continuations per state.")
    parser.add_argument(
        "--states",
        help="States per completion or episode, evenly spread: all, or a number; by default all, and 4 per episode.",
    )
    parser.add_argument("--seconds", type=PositiveFloat | None, help="Time limit in seconds; by default none.")
    return parser


def audit(options: Namespace) -> None:
    """Run `tokencredit audit`."""
    count = options.states
    if count not in (None, "all") and not (count.isdecimal() and int(count)):
        raise ConfigError(f"--states is {count}; it must be all, or a whole number, at least 1")
    states = {} if count is None else {"states": None if count == "all" else int(count)}
    for name in ("completions", "continuations"):
        if (size := getattr(options, name)) < 2:
            raise ConfigError(f"--{name} is {size}; it must be at least 2")
    run, shared = Path(options.run), {"every": 1, "continuations": options.continuations, "seconds": options.seconds}
    result = audits_of(run, options, shared | states)

    from tokencredit.report.page import write_report
    from tokencredit.runs.console import Screen
    from tokencredit.runs.folder import write_audit

    write_audit(RunFolder(options.run), result)
    Screen(0).audit(result)
    print(write_report(run))


def audits_of(run: Path, options: Namespace, shared: dict[str, Any]) -> dict[str, Any]:
    """An audit of a run of either kind; `shared` are the settings that both have."""
    settings = read_yaml(run_config_file(run))
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


def report_parser() -> Parser:
    """The parser of `tokencredit report`."""
    parser = new_command("Write a run's report, an HTML page that needs no network.", runs_code=False)
    parser.add_argument("run", help="Folder of a run, finished or still training.")
    parser.add_argument("--open", action="store_true", help="Open the page in the browser.")
    return parser


def report(options: Namespace) -> None:
    """Run `tokencredit report`."""
    from tokencredit.report.page import write_report

    page = write_report(Path(options.run))
    print(page)
    if options.open:
        webbrowser.open(page.resolve().as_uri())


def compare_parser() -> Parser:
    """The parser of `tokencredit compare`."""
    parser = new_command("Compare runs on a page and in figures.", runs_code=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folders of runs, finished or still training.")
    parser.add_argument("--metric", help="Metric to compare; by default the reward, or an agent's return.")
    parser.add_argument("--group-by", metavar="KEY", help="Key whose value groups runs into one curve.")
    parser.add_argument("--smooth", type=PositiveInt, default=1, help="Window of each run's running mean.")
    parser.add_argument("--out", default="comparison", help="Output folder.")
    return parser


def compare(options: Namespace) -> None:
    """Run `tokencredit compare`."""
    from tokencredit.report.comparison_page import write_comparison

    settings = {"metric": options.metric, "group_by": options.group_by, "smooth": options.smooth}
    print(write_comparison([Path(run) for run in options.runs], **settings, out=Path(options.out)))


def sweep_parser() -> Parser:
    """The parser of `tokencredit sweep`."""
    parser = new_command("Train all runs of a sweep file, and compare them.")
    parser.add_argument("file", help="YAML sweep file; docs/sweeps.md describes it.")
    parser.add_argument(
        "--seeds", type=PositiveInt | None, help="Number of the file's seeds to use, the first ones; by default all."
    )
    parser.add_argument("--jobs", type=PositiveInt, default=1, help="Number of runs in parallel.")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="Show the runs and their state; train nothing."
    )
    parser.add_argument(
        "--export", metavar="FOLDER", help="Write one configuration file per run into this folder; train nothing."
    )
    return parser


def sweep(options: Namespace) -> None:
    """Run `tokencredit sweep`."""
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


def doctor_parser() -> Parser:
    """The parser of `tokencredit doctor`."""
    parser = new_command("Diagnose a run: what is wrong, and what to change.", runs_code=False)
    parser.add_argument("run", help="Folder of a run, finished or still training.")
    return parser


def doctor(options: Namespace) -> None:
    """Run `tokencredit doctor`."""
    from tokencredit.report.reading import read_run
    from tokencredit.runs.console import Screen
    from tokencredit.runs.diagnosis import diagnose

    run = read_run(Path(options.run), samples=False)
    screen, findings = Screen(len(run.metrics)), diagnose(run.metrics, run.config, ended=bool(run.summary))
    screen.findings(findings)
    if not findings:
        screen.say("the checks find nothing wrong with this run")


COMMANDS: dict[str, tuple[Callable[[], Parser], Callable[[Namespace], None]]] = {
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
"""Subcommands: parser and function."""


@cache
def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command, and those of the subcommands by name."""
    parser = new_parser("PPO for language models and agents.")
    chosen = parser.add_subcommands(dest="command", required=False)
    commands = {name: arguments() for name, (arguments, _) in COMMANDS.items()}
    for name, command in commands.items():
        chosen.add_subcommand(name, command, help=command.description)
    return parser, commands


def describe(error: OSError) -> str:
    """The operating system's error, with the file."""
    where = f" ({error.filename})" if error.filename else ""
    advice = "; free some space; files written before are intact" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{where}{advice}"


def fail(error: Exception, message: str, code: int, arguments: Sequence[str]) -> int:
    """Report an error, with its traceback if `--debug` was given."""
    if "--debug" in arguments:
        raise error
    return complain(message, code)


def complain(message: str, code: int) -> int:
    """Print an error message, which may hold untrusted text, and return the exit code."""
    lines = [visible(line) for line in message.split("\n")]
    print("tokencredit:", "\n".join(lines), file=sys.stderr)
    return code


if __name__ == "__main__":
    end_on_interrupt()
    sys.exit(main())
