"""Commands on finished runs: `audit`, `limit`, `inspect`, `play`, `report`, `picture`, `compare` and `doctor`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from tokencredit.commands.command_line import (
    NON_NEGATIVE_INT,
    POSITIVE_FLOAT,
    POSITIVE_INT,
    SEED,
    Options,
    checked,
    command,
    option,
    positional,
    to_config,
)
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import AUDIT, RunFolder, saved
from tokencredit.runs.jsonl import read_samples
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import AgentAuditConfig, ControlConfig, EpisodesConfig
from tokencredit.settings.fields import at_home, refuse_unused
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.run_kind import CONTROL, read_config, read_source, run_config_file, run_kind_of
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig

RUN = positional("run", "RUN, the folder of a run", help="Folder of a run, finished or still training.")
SEVERAL = checked(int, at_least=2)
OPEN = option("--open", action="store_true", help="Open the page in the browser.")


@command(
    "Measure a run's credit against true values, and add the result to its page.",
    RUN,
    option("--checkpoint", type=POSITIVE_INT, help="Iteration of the checkpoint; by default the newest."),
    option("--completions", type=SEVERAL, default=16, help="Completions or episodes to audit."),
    option("--continuations", type=SEVERAL, default=32, help="Continuations per state."),
    option(
        "--states",
        help="States per completion or episode, evenly spread: all, or a number; by default all, and 4 per episode.",
    ),
    option("--seconds", type=POSITIVE_FLOAT, help="Time limit in seconds; by default none."),
    option("--reward", nargs="+", default=[], metavar="FILE.py:NAME", help="Rewards of a run that got them in Python."),
    option("--prompts.dataset", dest="dataset", metavar="FILE", help="Rows of such a run: FILE.py:NAME or a data set."),
    option("--estimator", metavar="FILE.py:NAME", help="Estimator of your own to be compared as well."),
    option("--calls", type=POSITIVE_INT, help="Most texts that each reward scores; by default no limit."),
    option("--tokens", type=POSITIVE_INT, help="Most tokens to sample; by default no limit."),
)
def audit(options: Options) -> None:
    """Run `tokencredit audit`."""
    count = options.states
    if count not in (None, "all") and not (count.isdecimal() and int(count)):
        raise ConfigError(f"--states is {count}; it must be all, or a whole number, at least 1")
    states = {} if count is None else {"states": None if count == "all" else int(count)}
    RunFolder(options.run).require_writable()  # before the measurement, which takes long
    run, shared = Path(options.run), {"every": 1, "continuations": options.continuations, "seconds": options.seconds}
    result = audits_of(run, options, shared | states)

    from tokencredit.audit.verdict import remedy
    from tokencredit.report.page import write_report
    from tokencredit.runs.console import Screen
    from tokencredit.runs.jsonl import read_metrics

    RunFolder(options.run).write_json(AUDIT, result)
    # What this audit was given is in the command of the next one too.
    given = {"checkpoint": options.checkpoint, "reward": options.reward}
    given |= {"prompts.dataset": options.dataset, "estimator": options.estimator}
    flags = [[f"--{name}", *(x if isinstance(x, list) else [str(x)])] for name, x in given.items() if x]
    command = shlex.join(["tokencredit", "audit", options.run, *chain(*flags)])
    rows = list(read_metrics(run / "metrics.jsonl"))
    Screen(0).audit(result, remedy(result, command, rows, saved(run)))
    print(write_report(run))


def audits_of(run: Path, options: Options, shared: dict[str, Any]) -> dict[str, Any]:
    """An audit of a run of either kind; `shared` are the settings that both have."""
    from tokencredit.tools.audit_run import audit_agent, audit_completions, given_parts

    if run_kind_of(read_yaml(run_config_file(run))) is CONTROL:
        agent = read_config(run / "config.yaml", ControlConfig, options.no_code)
        if options.calls or options.tokens or options.reward or options.dataset or options.estimator:
            raise ConfigError("--calls, --tokens, --reward, --prompts.dataset and --estimator are for texts")
        return audit_agent(run, agent, AgentAuditConfig(episodes=options.completions, **shared), options.checkpoint)
    config = read_config(run / "config.yaml", PPOConfig, options.no_code)

    limits = {"calls": options.calls, "tokens": options.tokens}
    settings = AuditConfig(completions=options.completions, **{"states": None, **shared, **limits})
    if options.no_code and (options.estimator or any(".py:" in x for x in [*options.reward, options.dataset or ""])):
        raise ConfigError("--no-code, but --reward, --prompts.dataset or --estimator executes user code")
    given = given_parts(config, options.reward, options.dataset)
    return audit_completions(run, config, settings, options.checkpoint, given, options.estimator)


@command(
    "Estimate the best that any policy can reach at the run's KL price.",
    option("of", nargs="?", metavar="RUN", help="Folder of a run; or give --config FILE and keys."),
    option("--samples", type=POSITIVE_INT, metavar="N", default=1024, help="Least reference samples; by default 1024."),
    kind=PPOConfig,
)
def limit(options: Options) -> None:
    """Run `tokencredit limit`."""
    run = None if options.of is None else Path(at_home(options.of))
    if run is not None and options.given:
        file = shlex.quote(str(run / "config.yaml"))
        raise ConfigError(f"RUN and settings are both given; leave RUN out, and give --config {file}")
    if run is None:
        config = to_config(options, PPOConfig)
        refuse_unused(config, rows=())
    else:
        config = read_config(run / "config.yaml", PPOConfig, options.no_code)
        config = replace(config, run=replace(config.run, dir=str(run)))

    from tokencredit.tools import limit_run

    limit_run.limit_of_settings(config, options.samples, run)


@command(
    "Play episodes with a trained agent.",
    positional("run", "RUN, the folder of a run", help="Folder of a run."),
    option("-n", "--episodes", type=POSITIVE_INT, default=10, help="Number of episodes."),
    option("--sample", action="store_true", help="Sample actions as in training, instead of the most likely ones."),
    option("--videos", type=NON_NEGATIVE_INT, default=0, help="Extra episodes, recorded on video."),
    option("--seed", type=SEED, default=1, help="Seed of all randomness."),
)
def play(options: Options) -> None:
    """Run `tokencredit play`."""
    config = read_config(Path(options.run) / "config.yaml", ControlConfig, options.no_code)
    from tokencredit.control.agent_evaluation import play_run

    settings = EpisodesConfig(episodes=options.episodes, greedy=not options.sample, videos=options.videos)
    play_run(Path(options.run), config, settings, options.seed)


@command(
    "Find which parts of the model training changed, and write a page about them.",
    positional("run", "RUN, the folder of a run", help="Folder of a finished run of a language model."),
    option("--prompt", help="Prompt of the inspected completion; by default the run's first."),
    option(
        "--against", metavar="base|OTHER", default="base", help="Model to compare with: base, a run or a model folder."
    ),
    option("--up", nargs="+", metavar="WORD", default=[], help="Words whose log-odds are explained."),
    option("--down", nargs="+", metavar="WORD", default=[], help="Words against which."),
    option("--seed", type=SEED, default=1, help="Seed of all randomness."),
    OPEN,
)
def inspect(options: Options) -> None:
    """Run `tokencredit inspect`."""
    options.refuse_empty("against")
    run = Path(options.run)
    run_config_file(run)
    source = read_source(options.run, options.no_code)
    RunFolder(options.run).require_writable()  # before the comparison, which takes long

    from tokencredit.report.inspect_page import render
    from tokencredit.tools.inspect.inspection import inspect_run

    arguments = {name: options[name] for name in ("prompt", "against", "up", "down", "seed", "no_code")}
    result = inspect_run(source, **arguments)
    RunFolder(options.run).write_json("inspect.json", result)
    RunFolder(options.run).write("inspect.html", render(result))
    print(visible(result["answer"]["sentence"]))
    show_page(run / "inspect.html", options)


@command("Write a run's report, an HTML page that needs no network.", RUN, OPEN, runs_code=False)
def report(options: Options) -> None:
    """Run `tokencredit report`."""
    from tokencredit.report.page import write_report

    show_page(write_report(Path(options.run)), options)


@command(
    "Draw one completion with its credit for a paper or a post.",
    RUN,
    option(
        "--row", type=POSITIVE_INT, help="Completion, in the page's order; by default the one whose credit varies most."
    ),
    option("--iteration", type=POSITIVE_INT, help="Iteration of the completion; by default the last with completions."),
    option("--width", type=checked(float, at_least=2, at_most=50), default=6.5, help="Inches; by default 6.5."),
    option("--out", metavar="FILE", help="File that ends in .svg or .png; by default one of each in the run's folder."),
    runs_code=False,
)
def picture(options: Options) -> None:
    """Run `tokencredit picture`."""
    options.refuse_empty("out")
    from statistics import pstdev

    from tokencredit.report.notebook import Sample, read_run
    from tokencredit.runs.transcript import acted

    run = Path(options.run)
    if options.out is None:
        RunFolder(options.run).require_writable()
    shown = read_run(run)
    iterations = list(dict.fromkeys(sample["iteration"] for sample in shown.samples))
    if not iterations:
        raise ConfigError(f"{options.run!r} keeps no completions; runs of tokencredit train keep some (run.samples)")
    number = options.iteration or iterations[-1]
    found = read_samples(run / "samples.jsonl", {number})
    if not found:
        known = map(str, iterations if len(iterations) < 20 else [*iterations[:5], "…", *iterations[-5:]])
        raise ConfigError(f"--iteration is {number}; the run keeps completions of {', '.join(known)}")
    spread = [pstdev(acted(sample)["advantages"] or [0.0]) for sample in found]
    row = options.row or spread.index(max(spread)) + 1
    if row > len(found):
        raise ConfigError(f"--row is {row}; the run keeps {len(found)} completions of iteration {number}")
    files = [run / "picture.svg", run / "picture.png"] if options.out is None else [Path(options.out)]
    try:
        missing = Sample(replace(shown, samples=found), found[row - 1]).picture(*files, inches=options.width)
    except OSError as error:
        raise ConfigError(f"cannot write {str(files[0])!r}: {error.strerror}; give another --out") from error
    print(*files, sep="\n")
    if options.row is None:
        print(f"completion {row} of {len(found)} of iteration {number}: its credit varies most; --row takes another")
    if missing:
        print(f"no installed font has {missing}, drawn as boxes; install one that has, such as fonts-noto-cjk")


@command(
    "Write what a paper's appendix says about runs, with BibTeX.",
    positional("runs", "RUN, the folder of each run", nargs="*", help="Folders of runs of one kind."),
    runs_code=False,
)
def cite(options: Options) -> None:
    """Run `tokencredit cite`."""
    from tokencredit.report.paper.cite import citation
    from tokencredit.report.reading import read_run

    for line in citation([read_run(run, samples=False) for run in folders(options.runs)]).splitlines():
        print(visible(line))


def folders(runs: Sequence[str]) -> list[Path]:
    """Paths without what a sweep puts beside its runs and a pattern of the shell meets: a line on stderr counts it."""
    paths = [Path(run) for run in runs]
    found = [path for path in paths if not (path.is_file() or path.suffix == ".job")]
    if found and (others := len(paths) - len(found)):
        print(f"{others} file{'s' * (others > 1)} left out, beside the runs' folders", file=sys.stderr)
    return found or paths


def show_page(page: Path, options: Options) -> None:
    """Print a page's path, and with `--open` open it in the browser."""
    print(page)
    if not options.open:
        return
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found; open the page yourself")


@command(
    "Compare runs: a page, figures and tables.",
    positional("runs", "RUN, the folder of each run", nargs="*", help="Folders of runs, finished or still training."),
    option("--metric", help="Metric to compare; by default the reward, or an agent's return."),
    option("--group-by", metavar="KEY", help="Key whose value groups runs into one curve."),
    option("--smooth", type=POSITIVE_INT, default=1, help="Window of each run's running mean."),
    option("--format", help="Formats, separated by commas: html, png, pdf, svg, csv, json, tex; by default html,png."),
    option("--out", default="comparison", help="Output folder, or one file with the ending of a format."),
    runs_code=False,
)
def compare(options: Options) -> None:
    """Run `tokencredit compare`."""
    options.refuse_empty("out")
    from tokencredit.report.comparison.compare import compare as compare_runs
    from tokencredit.report.comparison.files import check_formats, write_comparison

    formats = None if options.format is None else options.format.split(",")
    check_formats(Path(options.out), formats)
    comparison = compare_runs(
        folders(options.runs), metric=options.metric, group_by=options.group_by, smooth=options.smooth
    )
    written = write_comparison(comparison, Path(options.out), formats)
    for sentence in comparison.verdict:
        print(visible(sentence))
    print(written)


@command("Diagnose a run: what is wrong, and what to change.", RUN, runs_code=False)
def doctor(options: Options) -> None:
    """Run `tokencredit doctor`."""
    from tokencredit.report.reading import read_run
    from tokencredit.runs.console import Screen
    from tokencredit.runs.diagnosis import no_finding

    run = read_run(Path(options.run))
    screen = Screen(len(run.metrics))
    if findings := run.findings():
        screen.findings(findings)
    else:
        screen.say(no_finding(run.config, len(run.scored)))
