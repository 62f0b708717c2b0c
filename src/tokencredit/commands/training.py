"""Commands that train: `train`, `control`, `sft`, `reward-model`, `dpo` and `sweep`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from tokencredit.commands.options import refuse_empty, require_gymnasium
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import RunFolder, read_python
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import refuse_idle
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.parsing import Parser, configure, new_command, to_config
from tokencredit.settings.text import PPOConfig
from tokencredit.signals import raising_interrupt


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
    if resume and {"environment_factory", "tools"} & set(given := read_python(Path(options.resume)) or []):
        raise ConfigError(
            f"{options.resume!r} was begun in Python with {', '.join(given)}, which its folder does not hold; pass the "
            "same from Python, and call train(resume_from_checkpoint=True)"
        )
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


def refuse_other_folder(config: PPOConfig | ControlConfig | OfflineSettings, options: Namespace) -> None:
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


def offline(kind: type[OfflineSettings], options: Namespace) -> None:
    """Run `tokencredit sft`, `reward-model` or `dpo`."""
    resume = options.resume is not None
    config = to_config(options, kind, options.no_code, begun=begun(options))
    refuse_other_folder(config, options)
    refuse_idle(config, rows=())
    if os.environ.get("RANK", "0") == "0" and not resume:
        RunFolder(config.run.dir).refuse_if_used()
    if config.data.dataset is None:
        raise ConfigError("data.dataset is missing; give a .jsonl, .json, .csv or .parquet file, a folder or a hub id")
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.processes import Processes
    from tokencredit.text.offline.trainer import OfflineTrainer

    disable_progress_bar()
    processes = Processes()
    try:
        trainer = OfflineTrainer(config)
        with raising_interrupt():
            trainer.train(resume_from_checkpoint=resume)
    finally:
        processes.close()


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
