"""Commands that train or plan it: `train`, `control`, `sft`, `reward-model`, `dpo`, `plan`, `schema` and `sweep`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tokencredit.commands.command_line import (
    NON_NEGATIVE_INT,
    POSITIVE_INT,
    Options,
    checked,
    command,
    option,
    positional,
    to_config,
)
from tokencredit.commands.jobs import training
from tokencredit.commands.settings_help import json_schema
from tokencredit.distributed.signals import raising_interrupt
from tokencredit.errors import ConfigError, RunStopped, pages_by_title
from tokencredit.runs.folder import check_new_file, read_parts, write_file
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import refuse_unused, settings_of
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.reader import grouped
from tokencredit.settings.run_kind import CONTROL, RUN_KINDS, refuse_by_command, refuse_python
from tokencredit.settings.text import PPOConfig

if TYPE_CHECKING:
    from tokencredit.tools.sweep.launch import Launcher, Resources
    from tokencredit.tools.sweep.sweep_file import SweepRun

Config = TypeVar("Config", PPOConfig, ControlConfig, OfflineSettings)
TrainingCommand = Literal["train", "control", "sft", "reward-model", "dpo"]
CHECK = option(
    "--check", action="store_true", help="Check all that can be known before the first rollout, and train nothing."
)


def check_run(options: Options) -> None:
    """Run `tokencredit train --check`; `RunStopped` if something must be changed."""
    if options.resume is not None:
        raise ConfigError("--check and --resume are both given; leave one of them out")
    refused, omitted = list[str](), set[str]()
    # A setting that is refused is listed and left out, so that the others are checked too.
    while True:
        try:
            config = to_config(options, PPOConfig)
            refuse_objects(config, options)
            break
        except ConfigError as error:
            refused.append(str(error))
            given = dict(leaves(options.settings))
            named = [key for key in given if re.search(rf"(?<![\w.]){re.escape(key)}\b", str(error))]
            if not named:
                for text in refused[:-1]:
                    print(f"{'error':<8} {'settings':<9} {visible(text)}")
                raise
            omitted |= {"settings", *(key.partition(".")[0] for key in named)}
            options.settings = grouped(PPOConfig, [x for x in given.items() if x[0] not in named])

    from tokencredit.tools.check_run import Finding, check

    findings = [*(Finding("error", "settings", text) for text in refused), *check(config, by_command=True)]
    for state, part, text in findings:
        if state != "ok" or part not in omitted:
            print(f"{state:<8} {part:<9} {visible(text)}")
    if failed := sum(state == "error" for state, *_ in findings):
        raise RunStopped(f"{failed} of these must be changed before this run can start")


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by groups as pairs of whole keys and values."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and is_dataclass(settings_of(PPOConfig)[key].hint):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def train(options: Options) -> None:
    """Run `tokencredit train`."""
    if options.check:
        check_run(options)
    else:
        train_run(PPOConfig, options)


def train_run(kind: type[Config], options: Options) -> None:
    """Run a command that trains: `train`, `control`, `sft`, `reward-model` or `dpo`."""
    config, resume = to_config(options, kind), options.resume is not None
    if resume and Path(str(config.run.dir)) != Path(options.resume):
        raise ConfigError(
            f"run.dir is {config.run.dir!r}, and --resume continues {options.resume!r} in its own folder; leave out "
            "run.dir"
        )
    refuse_objects(config, options)
    refuse_by_command(config)
    with training(config, resume=resume) as (config, resume):
        if isinstance(config, ControlConfig):
            from tokencredit.control.control_trainer import ControlTrainer

            with raising_interrupt():  # from the start, so that the environments' processes are ended too
                ControlTrainer(config).train(resume_from_checkpoint=resume)
            return
        if isinstance(config, OfflineSettings):
            from tokencredit.text.offline.offline_trainer import OfflineTrainer

            trainer: Any = OfflineTrainer(config)
        else:
            from tokencredit.distributed.processes import return_freed_memory
            from tokencredit.text.ppo_trainer import PPOTrainer

            if config.run.shard != "none":
                return_freed_memory()
            trainer = PPOTrainer(args=config)
        with raising_interrupt():
            trainer.train(resume_from_checkpoint=resume)


def refuse_objects(config: PPOConfig | ControlConfig | OfflineSettings, options: Options) -> None:
    """Raise `ConfigError` if a configuration names parts from Python, with the flags that give them from files."""
    files, resume = [text for key, text in options.given if key == "config"], getattr(options, "resume", None)
    file = f"{resume}/config.yaml" if resume is not None else files[-1] if files else "FILE"
    parts = read_parts(Path(file).parent) if config.python else None
    refuse_python(config, file, parts=parts, resume=resume is not None)


def size(text: str) -> float:
    """The bytes in a size such as 24GB, as the type of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"is {text}; it must be a size such as 24GB")
    return float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ")


LENGTH: dict[str, Any] = {"type": POSITIVE_INT, "metavar": "N"}
"""The form of options for lengths and counts."""


@command(
    "Plan a run of `tokencredit train`: memory, time and tokens; nothing is loaded.",
    option("--processes", default=1, help="Number of processes of the job; by default 1.", **LENGTH),
    option("--tokens", help="Mean length of completions, in tokens; by default the longest.", **LENGTH),
    option(
        "--prompt_tokens", help="Length of prompts, in tokens; by default they are tokenized and counted.", **LENGTH
    ),
    option(
        "--device", type=checked(Literal["cpu", "cuda"]), metavar="cpu|cuda", help="Device; by default this machine's."
    ),
    option("--memory", type=size, metavar="SIZE", help="Memory of that device, such as 24GB."),
    option("--no-time", action="store_true", help="Skip the calibration of time on this machine."),
    option("--out", metavar="FILE", help="New JSON file for the plan."),
    kind=PPOConfig,
)
def plan(options: Options) -> None:
    """Run `tokencredit plan`."""
    config = to_config(options, PPOConfig)
    refuse_objects(config, options)
    refuse_unused(config, rows=())
    out = None if options.out is None else check_new_file("--out", options.out, ".json")

    from tokencredit.tools.plan.plan import make_plan
    from tokencredit.tools.plan.show import show

    chosen = {name: getattr(options, name) for name in ("processes", "tokens", "prompt_tokens", "device", "memory")}
    made = make_plan(config, time=not options.no_time, **chosen)
    show(made)
    if out is not None:
        write_file(out, json.dumps(made.as_json(), indent=2, allow_nan=False) + "\n")


@command(
    "Print the JSON schema of a command's YAML files, for editors.",
    option(
        "of",
        nargs="?",
        metavar="COMMAND",
        type=checked(TrainingCommand),
        default="train",
        help=f"Command: {', '.join(run_kind.command for run_kind in RUN_KINDS.values())}.",
    ),
    runs_code=False,
)
def schema(options: Options) -> None:
    """Run `tokencredit schema`."""
    kind = next(run_kind.config for run_kind in RUN_KINDS.values() if run_kind.command == options.of)
    print(json.dumps(json_schema(kind), indent=2, ensure_ascii=False))


@command(
    "Train all runs of a sweep file, and compare them.",
    positional("file", "FILE, a sweep file", help=pages_by_title("YAML sweep file; docs/sweeps.md describes it.")),
    option("--seeds", type=POSITIVE_INT, help="Number of the file's seeds to use, the first ones; by default all."),
    option(
        "--on",
        type=checked(Literal["local", "ray", "slurm"]),
        metavar="local|ray|slurm",
        default="local",
        help="Place of the runs: processes here, tasks of a Ray cluster, or Slurm jobs.",
    ),
    option(
        "--jobs",
        type=POSITIVE_INT,
        help="Number of runs in parallel; by default one here, and on a cluster all that it has room for.",
    ),
    option("--cores", type=POSITIVE_INT, help="CPU cores per run on a cluster; by default 1, with its threads."),
    option("--gpus", type=NON_NEGATIVE_INT, help="GPUs per run on a cluster, one process for each; by default 0."),
    option(
        "--slurm",
        nargs="+",
        metavar="KEY=VALUE",
        default=[],
        help="Parameters of submitit for --on slurm, such as partition=gpu time=120.",
    ),
    option("--dry_run", "--dry-run", action="store_true", help="Show the runs and their state; train nothing."),
    option("--export", metavar="FOLDER", help="Write one configuration file per run into this folder; train nothing."),
)
def sweep(options: Options) -> None:
    """Run `tokencredit sweep`."""
    options.refuse_empty("export")
    if options.export and options.dry_run:
        raise ConfigError("--export and --dry_run are both given; leave one of them out")
    if options.export and (options.on != "local" or options.jobs):
        raise ConfigError("--export trains nothing, so that --on and --jobs have no effect; leave them out")
    from tokencredit.tools.sweep import runner
    from tokencredit.tools.sweep.sweep_file import first_seeds, read_sweep, refuse_broken, refuse_changed

    every = read_sweep(Path(options.file), options.no_code)
    count, most = options.seeds, len({run.seed for run in every})
    if count is not None and count > most:
        raise ConfigError(f"--seeds is {count}; it must be at most {most}, the number of seeds in {options.file}")
    runs = first_seeds(every, count)
    given = [
        f"--{name}={options[name]}"
        for name in ("seeds", "on", "jobs", "cores", "gpus")
        if options[name] not in (None, "local")
    ]
    given += ["--slurm", *options.slurm] * bool(options.slurm) + ["--no-code"] * bool(options.no_code)
    again = shlex.join(["tokencredit", "sweep", options.file, *given])
    resources = cluster_resources(options, runs)
    if options.export:
        runner.export(runs, Path(options.export), options.file)
        return
    refuse_broken(runs)
    refuse_changed(every)
    runner.check_packages(runs)
    jobs = options.jobs or (1 if options.on == "local" else None)
    if options.dry_run:
        runner.show(runs, jobs, None if options.on == "local" else f"{options.on}: {resources} per run")
        return
    launcher = make_launcher(options, resources)
    try:
        runner.sweep(runs, launcher, jobs, again, every)
    finally:
        launcher.close()


def cluster_resources(options: Options, runs: Sequence[SweepRun]) -> Resources:
    """What each run gets on a cluster.

    Raises:
        ConfigError: a flag has no effect there, or the runs have no use for GPUs.
    """
    from tokencredit.tools.sweep.launch import Resources

    for name, places in (("cores", ("ray", "slurm")), ("gpus", ("ray", "slurm")), ("slurm", ("slurm",))):
        if options[name] not in (None, []) and options.on not in places:
            needed = " or ".join(places)
            raise ConfigError(f"--{name} has an effect only with --on {needed}, and --on is {options.on}; leave it out")
    resources = Resources(options.cores or 1, options.gpus or 0)
    if resources.gpus and runs[0].run_kind is CONTROL:
        raise ConfigError(f"--gpus is {resources.gpus}, and agents are trained on CPUs; leave it out")
    if options.on == "slurm":
        from tokencredit.tools.sweep.on_slurm import parameters

        options.slurm = parameters(options.slurm)
    return resources


def make_launcher(options: Options, resources: Resources) -> Launcher:
    """The launcher of the place that `--on` names."""
    if options.on == "ray":
        from tokencredit.tools.sweep.on_ray import Ray

        return Ray(resources)
    if options.on == "slurm":
        from tokencredit.tools.sweep.on_slurm import Slurm

        return Slurm(resources, options.slurm)
    from tokencredit.tools.sweep.launch import Local, cpu_cores, say

    if (options.jobs or 1) > cpu_cores():
        say(f"--jobs {options.jobs} exceeds this machine's {cpu_cores()} CPU cores; runs will slow each other down")
    return Local(options.jobs or 1)
