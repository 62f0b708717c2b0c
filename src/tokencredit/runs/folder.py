"""A run's folder of plain files: atomic writes, a lock, and the small files beside config.yaml."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import Part
from tokencredit.runs.jsonl import COUNT, EVENTS, NUMBER, SAMPLE, TEXT, TRUTH, Form, Leaf, read_object, require
from tokencredit.settings.fields import check_value

AUDIT = "audit.json"
EPISODE = "episode.json"
LOCK = ".lock"
"""Empty file that a process holds locked while it trains the run."""
JOB = ".job"
"""File with the name of the torchrun job that began the run, whose restarts go on with it."""
PARTS = "parts.json"
"""File with the descriptions (`provenance.parts.Part`) of a run's functions, classes, objects, data and local models,
by argument or key."""
COMPLETIONS = "samples"
"""Folder of every completion, with a Parquet file per iteration (`run.samples: all`)."""
SHOWN = 8
"""Completions per iteration in samples.jsonl of such a run."""
CHOICES = "choices.json"
"""File of a run's choices for settings that are `auto`; config.yaml keeps `auto`."""
AUTO_SETTINGS: dict[str, Any] = {"model.dtype": Literal["float32", "bfloat16"], "critic.prefix_every": int}
"""Settings that may be `auto`, and the types of the values that a run may choose for them."""


class RunFolder:
    """Writes a run's files; it never overwrites another run."""

    def __init__(self, folder: str | None, job: str | None = None):
        """Choose the folder, by path, or `runs/DATE-TIME` for None; `create` makes it.

        `job` names a job that torchrun restarts; a folder that the same job began may be used again.
        """
        if folder == "":
            raise ConfigError("run.dir is empty; give a folder, or leave it out for runs/DATE-TIME")
        self.reserve, self.job = 0, job
        self._lock: int | None = None
        name = datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        of_this_second = (Path("runs") / f"{name}{f'-{number}' * (number > 1)}" for number in count(1))
        self.path = Path(folder).expanduser() if folder else next(x for x in of_this_second if not x.exists())

    def refuse_if_used(self, by_command: bool = False) -> None:
        """Raise `ConfigError` if the folder is not empty; call it in the main process only.

        The message has the flags of a command, or else the call in Python.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"run.dir {str(self.path)!r} is a file; give a new folder, or an empty one")
        unfinished = {LOCK, PARTS, CHOICES} | ({JOB} if self.begun() else set())
        unfinished |= {beside(self.path / name, "part").name for name in (JOB, PARTS, CHOICES, "config.yaml")}
        if any(path.name not in unfinished for path in self.path.iterdir()):
            how = f"--resume {shlex.quote(str(self.path))}" if by_command else "train(resume_from_checkpoint=True)"
            resume = f", or resume the run with {how}" if (self.path / "config.yaml").is_file() else ""
            raise ConfigError(
                f"run.dir {str(self.path)!r} holds a run or other files already; give another "
                f"{'--' * by_command}run.dir, or move it away{resume}"
            )

    def begun(self) -> bool:
        """True if an earlier start of this job began the run in this folder."""
        file = self.path / JOB
        return self.job is not None and file.is_file() and file.read_bytes() == self.job.encode()

    def create(self, reserve: int, more: int = 0) -> None:
        """Make the folder, on a disk that holds `reserve` bytes for the run's final files and `more` before them.

        `append` and `make_room` raise rather than use the reserve.

        Raises:
            ConfigError: it cannot be made, or the disk is too full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise ConfigError(f"cannot make run.dir {str(self.path)!r}: {error.strerror}") from error
        self.reserve = reserve
        if free < reserve + more:
            raise ConfigError(
                f"the disk of run.dir {str(self.path)!r} has {free / 1e6:.0f} MB free, and the run writes at least "
                f"{(reserve + more) / 1e6:.0f} MB; free some space or give another run.dir"
            )

    def reopen(self, reserve: int) -> None:
        """Lock a run's folder, and finish or undo replacements in it whose process was killed.

        Raises:
            ConfigError: it cannot be written, its disk is too full, or another process is training the run.
        """
        self.create(reserve)
        self.require_writable()
        self.lock()
        recover(self.path)
        recover(self.path / "checkpoints")

    def rewind(self, iteration: int, sizes: Mapping[str, int]) -> None:
        """Truncate files to their sizes at this iteration; remove later completions, later checkpoints, which are
        damaged, an end's summary, and a later or unreadable audit or episode."""
        for file in [*(self.path / COMPLETIONS).glob("*.parquet"), *(self.path / "checkpoints").glob("*")]:
            if file.stem.isdecimal() and int(file.stem) > iteration:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        for name, size in sizes.items():
            if (self.path / name).exists():
                os.truncate(self.path / name, size)
        events = self.path / EVENTS
        if events.is_file():  # whose last line may be incomplete, after a power failure
            os.truncate(events, events.read_bytes().rfind(b"\n") + 1)
        (self.path / "summary.json").unlink(missing_ok=True)
        for file in (self.path / AUDIT, self.path / EPISODE):
            try:
                number = read_object(file, file.read_bytes()).get("iteration") if file.is_file() else iteration
            except ConfigError:
                number = None
            if not isinstance(number, int) or number > iteration:
                file.unlink()

    def require_writable(self) -> None:
        """Raise `ConfigError` if the folder exists, and no file can be written into it."""
        if self.path.is_dir() and not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot write into the run's folder {str(self.path)!r}; make it writable, or copy the run elsewhere"
            )

    def lock(self) -> None:
        """Keep other processes from training this run until `unlock`, or until this process ends in any way.

        Raises:
            ConfigError: another process is training it.
        """
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            import fcntl  # Windows has none; runs there are not locked

            # A lock of the process, not of the open file: processes forked by this one do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(file)
            raise ConfigError(f"{str(self.path)!r} is being trained by another process") from error
        except (ImportError, OSError):  # a file system without locks
            pass
        self._lock = file

    def unlock(self) -> None:
        """Let other processes train this run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        write_file(self.path / name, text)

    def write_json(self, name: str, value: Mapping[str, Any], indent: int | None = None) -> None:
        """Write a JSON file atomically."""
        self.write(name, json.dumps(value, indent=indent, allow_nan=False) + "\n")

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append a line of JSON per record, all or none; raises `OSError` if the disk is full, the reserve included."""
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        self.make_room(name, len(lines))
        append(self.path / name, lines)

    def write_completions(self, iteration: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write an iteration's completions, if there are any, as a Parquet file: a column per field and reward term.

        Fields that these completions lack are columns of nulls, so that the files of all iterations fit together.

        Raises:
            OSError: the disk is too full, the reserve included.
        """
        if not records:
            return
        import pyarrow as pa
        from pyarrow import parquet

        # Parquet holds valid Unicode only, and an observation may have unpaired surrogates.
        text = json.dumps([flat_terms(record) for record in records], ensure_ascii=False, allow_nan=False)
        rows = json.loads(text.encode(errors="replace"))
        forms = {name.removesuffix("?"): form for name, form in SAMPLE.items()}
        forms |= {name: NUMBER for row in rows for name in row if name not in forms}  # reward terms
        columns = {
            name: pa.array([row.get(name) for row in rows], _column_type(form))
            for name, form in forms.items()
            if name not in TRUTH
        }
        parquet.write_table(pa.table(columns), data := pa.BufferOutputStream())
        name = f"{COMPLETIONS}/{iteration:06d}.parquet"
        self.make_room(name, data.tell())
        (self.path / COMPLETIONS).mkdir(exist_ok=True)
        write_file(self.path / name, data.getvalue().to_pybytes())

    def make_room(self, name: str, size: int) -> None:
        """Raise the `OSError` of a full disk if it cannot hold this many bytes beside the reserve."""
        if shutil.disk_usage(self.path).free < self.reserve + size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Sizes of files after flushing them to the disk; 0 for a missing one."""
        for name in names:
            if (self.path / name).exists():
                flush(self.path / name)
        return {name: size(self.path / name) for name in names}


def size(file: Path) -> int:
    """A file's size; 0 if there is none."""
    return file.stat().st_size if file.exists() else 0


def append(file: Path, lines: bytes) -> None:
    """Append all the lines to a file, or none."""
    with file.open("ab", buffering=0) as end:
        before = end.tell()
        try:
            while lines:
                lines = lines[end.write(lines) :]
        except BaseException:
            end.truncate(before)
            raise


def _column_type(form: Form) -> Any:
    """The Parquet type of values of a form."""
    import pyarrow as pa

    if isinstance(form, Leaf):
        return pa.type_for_alias(form.column)
    if isinstance(form, Mapping):
        return pa.struct([(key.removesuffix("?"), _column_type(part)) for key, part in form.items()])
    return pa.list_(_column_type(form[0]))


def flat_terms(record: Mapping[str, Any]) -> dict[str, Any]:
    """A completion's record with its reward terms as `reward/NAME`, the names of their means in metrics.jsonl."""
    terms = {f"reward/{name}": value for name, value in record.get("terms", {}).items()}
    return {name: value for name, value in record.items() if name != "terms"} | terms


def write_file(target: Path, data: str | bytes) -> None:
    """Write a file atomically; text as UTF-8."""
    temporary = beside(target, "part")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        flush(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_new_file(option: str, file: str, ending: str) -> Path:
    """The path of a file that a command will write, checked before its work begins.

    Raises:
        ConfigError: it has another ending, exists already, or its folder does not or cannot be written to.
    """
    path = Path(file)
    if path.suffix != ending:
        raise ConfigError(f"{option} is {file!r}; it must be a file that ends in {ending}")
    if path.exists():
        raise ConfigError(f"{option} is {file!r}, which exists already; give another file, or move it away")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} is {file!r}, and its folder does not exist; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} is {file!r}, and its folder cannot be written to; give another file")
    return path


@contextmanager
def safetensors_errors(target: Path) -> Iterator[None]:
    """A context that raises Safetensors' own exception for a file that cannot be written as an `OSError`."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(target)) from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary folder that atomically becomes `target` on leaving the context.

    If the machine fails between the two renames, `recover` restores the previous version.

    Raises:
        OSError: it cannot be written, also in place of Safetensors' own exception.
    """
    temporary, old = beside(target, "part"), beside(target, "old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with safetensors_errors(target):
            yield temporary
        mode = temporary.stat().st_mode & 0o666
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_file():
                path.chmod(mode)  # safetensors ignores the user's umask: its files are readable by the owner only
            flush(path)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.replace(old)
        temporary.replace(target)
        flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo a replacement in this folder whose process was killed."""
    for old in folder.glob(".*.old"):
        target = old.with_name(old.name[1 : -len(".old")])
        if target.exists():
            shutil.rmtree(old)
        else:
            old.replace(target)
    for part in folder.glob(".*.part"):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk; Windows cannot flush a folder, nor what is open for reading."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def beside(target: Path, ending: str) -> Path:
    """Hidden path beside a target, for its replacement or its previous version."""
    return target.with_name(f".{target.name}.{ending}")


def read_parts(run: Path) -> dict[str, Part]:
    """The descriptions of a run's parts, by argument or key; raises `ConfigError` if the file is invalid."""
    file = run / PARTS
    parts = read_object(file, file.read_bytes()) if file.is_file() else {}
    code = {"name?": TEXT, "file?": TEXT, "source?": TEXT, "arguments?": {}, "given?": [TEXT]}
    require(file, parts, {"*": {"digest": TEXT, "rows?": COUNT, "columns?": [TEXT], **code}})
    return parts


def read_choices(run: Path) -> dict[str, Any]:
    """A run's choices for settings that may be `auto`, by key; raises `ConfigError` if the file is invalid."""
    file = run / CHOICES
    choices = read_object(file, file.read_bytes()) if file.is_file() else {}
    for key, hint in AUTO_SETTINGS.items():
        if key in choices:
            check_value(f"{file}: {key}", choices[key], hint, {"at_least": 0})
    return {key: choices[key] for key in AUTO_SETTINGS if key in choices}


def saved(run: Path) -> list[int]:
    """Iterations with a checkpoint, in order."""
    return sorted(int(folder.name) for folder in (run / "checkpoints").glob("*") if folder.name.isdecimal())


def setting_of(config: Mapping[str, Any], key: str) -> Any:
    """A setting of a configuration in plain dicts by its key, such as `optim.warmup`; None if it has none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def apply_choices(config: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in plain dicts, with a run's choices in place of `auto`."""
    settings = dict(config)
    for key, value in choices.items():
        group, _, name = key.partition(".")
        if settings.get(group, {}).get(name, "auto") == "auto":
            settings[group] = settings.get(group, {}) | {name: value}
    return settings
