"""The subcommands of `tokencredit`: the arguments of each, and what it does. Nothing heavy is imported at the top."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type

from tokencredit.errors import ConfigError
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import AgentAuditConfig, ControlConfig, EpisodesConfig
from tokencredit.settings.fields import refuse_idle
from tokencredit.settings.parsing import Parser, config_parser, configure, new_command, to_config
from tokencredit.settings.run_file import read_config, run_config_file
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import MOST_SEED, AuditConfig
from tokencredit.settings.world import CONTROL, world_of
from tokencredit.settings.yaml import read_yaml
from tokencredit.signals import raising_interrupt

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<=", MOST_SEED)])


def train(options: Namespace) -> None:
    """Run `tokencredit train`."""
    resume = options.resume is not None
    config = to_config(options, PPOConfig, options.no_code, begun=begun(options))
    refuse_other_folder(config, options)
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


def refuse_other_folder(config: PPOConfig | ControlConfig, options: Namespace) -> None:
    """Raise `ConfigError` if `--resume` is given, and the run's folder is another."""
    if options.resume is not None and Path(str(config.run.dir)) != Path(options.resume):
        raise ConfigError(
            f"run.dir is {config.run.dir!r}, and --resume continues {options.resume!r} in its own folder; leave out "
            "run.dir"
        )


def control(options: Namespace) -> None:
    """Run `tokencredit control`."""
    resume = options.resume is not None
    config = to_config(options, ControlConfig, options.no_code, begun=begun(options))
    refuse_other_folder(config, options)
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
    parser.add_argument("--seed", type=Seed, default=1, help="Seed of all randomness.")
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
    parser.add_argument("--seed", type=Seed, default=1, help="Seed of all randomness.")
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
    RunFolder(options.run).require_writable()  # before the measurement, which takes long
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
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found; open the page yourself")


def refuse_empty(options: Namespace, name: str) -> None:
    """Raise `ConfigError` if an option for a folder is an empty text."""
    if options[name] == "":
        raise ConfigError(f"--{name} is empty; give a folder")


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
    refuse_empty(options, "out")
    from tokencredit.report.comparison_page import write_comparison

    settings = {"metric": options.metric, "group_by": options.group_by, "smooth": options.smooth}
    comparison = write_comparison([Path(run) for run in options.runs], **settings, out=Path(options.out))
    for sentence in comparison.verdict:
        print(visible(sentence))
    print(comparison.page)


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
    refuse_empty(options, "export")
    if options.export and options.dry_run:
        raise ConfigError("--export and --dry_run are both given; leave one of them out")
    from tokencredit.sweep import runner
    from tokencredit.sweep.plan import first_seeds, read_sweep

    runs = read_sweep(Path(options.file), partial(configure, no_code=options.no_code))
    count, most = options.seeds, len({run.seed for run in runs})
    if count is not None and count > most:
        raise ConfigError(f"--seeds is {count}; it must be at most {most}, the number of seeds in {options.file}")
    runs = first_seeds(runs, count)
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
    from tokencredit.runs.diagnosis import diagnose, no_finding

    run = read_run(Path(options.run), samples=False)
    screen, findings = Screen(len(run.metrics)), diagnose(run.metrics, run.config, ended=bool(run.summary))
    screen.findings(findings)
    if not findings:
        screen.say(no_finding(len(run.metrics)))


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
