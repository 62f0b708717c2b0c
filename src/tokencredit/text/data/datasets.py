"""Data sets as rows: JSONL, JSON, CSV and Parquet files, folders of the Datasets library, and the hub.

Files are read here rather than by the Datasets library: a mistake in one is then named by its line, nothing is copied
into a cache, and JSON stays what it is, where a table would give each row the keys of all rows. No pickle is read and
no code of a data set is run; the Datasets library, from 4.0 on, cannot do so either.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokencredit.errors import ConfigError, NotInstalled

if TYPE_CHECKING:  # imported where it is used: lists, JSONL, JSON and CSV do without
    from datasets import Dataset

    Rows: TypeAlias = list[dict[str, Any]] | Dataset

HUB_TIMEOUT = 10
"""Seconds for the hub's first answer. Without that question a download would be tried six times over."""
CHUNK = 1000
"""Rows read at once."""


def read_dataset(name: str, *, split: str = "train", config_name: str | None = None) -> Rows:
    """The rows of a data set: a list of dicts, or a `datasets.Dataset`, which reads them from disk when asked for.

    Args:
        name: a .jsonl, .json, .csv or .parquet file, a folder that `save_to_disk` wrote, or a hub id.
        split: its split; a file has only train.
        config_name: the subset, on the hub.

    Raises:
        ConfigError: it is not there, has no such split or subset, holds no row, or cannot be read; the message names
            the file with its line, the folder or the hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        rows = read_folder(path, split)
    elif path.is_file() or path.suffix in READERS or path.is_absolute() or name.startswith((".", "~")):
        rows = read_file(path, split)
    else:
        return read_hub(name, split, config_name)
    if config_name is not None:
        raise ConfigError(f"prompts.config_name is {config_name!r}, but {name!r} is local; only the hub has subsets")
    return rows


def from_python(dataset: Any, name: str) -> Rows:
    """A data set that a program hands over as the argument `name`, if it is of a kind that can be read row by row."""
    if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
        return dataset
    if is_dataset(dataset):
        return plain(dataset)
    raise ConfigError(
        f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset (one split of a "
        "DatasetDict, no iterable one) or a list of dicts"
    )


def is_dataset(value: Any) -> bool:
    """True for a `datasets.Dataset`."""
    try:
        from datasets import Dataset
    except ImportError:
        return False
    return isinstance(value, Dataset)


def plain(dataset: Dataset) -> Dataset:
    """Rows as Python values, whatever format was set; a transform of the user's own stays."""
    return dataset if dataset.format["type"] == "custom" else dataset.with_format(None)


def column_names(rows: Rows) -> list[str]:
    """Every column that some row has."""
    return list(dict.fromkeys(key for row in rows for key in row)) if isinstance(rows, list) else rows.column_names


def column_values(rows: Rows, column: str) -> Iterator[list[Any]]:
    """A column from its first row to its last, some rows at a time; None where a row lacks it."""
    if not isinstance(rows, list) and rows.format["type"] != "custom":
        rows = rows.select_columns([column])  # a transform may need the others
    for start in range(0, len(rows), CHUNK):
        some = rows[start : start + CHUNK]
        yield [row.get(column) for row in some] if isinstance(some, list) else list(some[column])


def read_file(path: Path, split: str) -> Rows:
    """The rows of a file, by its ending."""
    if path.suffix not in READERS:
        raise ConfigError(f"prompts.dataset is {str(path)!r}; it must end in one of {', '.join(READERS)}")
    if not path.is_file():
        raise ConfigError(f"prompts.dataset is {str(path)!r}, but there is no such file")
    if split != "train":
        raise ConfigError(f"prompts.split is {split!r}, but {str(path)!r} is one file, whose only split is train")
    return READERS[path.suffix](path)


def read_text(path: Path) -> str:
    """A file's text, which must be UTF-8; a byte order mark at its start is left out."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text ({error.reason})") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One object a line; blank lines are passed over."""
    return _parse_lines(path, read_text(path))


def read_json(path: Path) -> list[dict[str, Any]]:
    """An array of objects, or, as many files of that name hold, one object a line."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return _parse_lines(path, text)
    try:
        rows: list[dict[str, Any]] = json.loads(text)  # if they are: seen to below
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists without end
        raise ConfigError(f"{path}: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f'{path}, row {number}: {_short(row)} is no object such as {{"prompt": "..."}}')
    return rows


def _parse_lines(path: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would also cut at U+2028, inside a string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}, column {error.colno}: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f'{path}, line {number}: {_short(row)} is no object such as {{"prompt": "..."}}')
        rows.append(row)
    return rows


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows under a line of column names. CSV has no types, so every value is a text."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    header: list[str] = []
    rows = []
    try:
        for fields in reader:
            if not fields:
                continue
            if not header:
                header = fields
                if len(set(header)) < len(header):
                    raise ConfigError(f"{path}, line {reader.line_num}: a column name stands twice in {header}")
            elif len(fields) != len(header):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields under {len(header)} column names; "
                    "a field with a comma or a line break in it needs quotes"
                )
            else:
                rows.append(dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def read_parquet(path: Path) -> Rows:
    """A Parquet file, read into memory."""
    require_datasets(f"the Parquet file {str(path)!r}")
    from datasets import Dataset
    from pyarrow.parquet import read_table

    try:
        return checked(Dataset(read_table(path)))
    except Exception as error:  # two libraries read it, and what they raise has no common type
        raise ConfigError(f"{path}: not a Parquet file that can be read: {error}") from error


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}


def read_folder(path: Path, split: str) -> Rows:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote: Arrow files, whose rows stay on disk."""
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        raise ConfigError(
            f"prompts.dataset is the folder {str(path)!r}, which Dataset.save_to_disk did not write; "
            f"name one of its files, which must end in one of {', '.join(READERS)}"
        )
    require_datasets(f"the folder {str(path)!r}")
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(path)
        splits = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
        for rows in splits.values():
            checked(rows)
    except Exception as error:  # as above
        raise ConfigError(f"{path}: a saved data set that cannot be read: {error}") from error
    if split in splits:
        return plain(splits[split])
    raise ConfigError(f"prompts.split is {split!r}; the splits of {str(path)!r} are {', '.join(splits)}")


def require_datasets(user: str) -> None:
    """Raise `NotInstalled` if the Datasets library is missing, which `user` needs."""
    try:
        from datasets import Dataset  # noqa: F401
    except ImportError as error:
        raise NotInstalled(user, "datasets") from error


def checked(dataset: Dataset) -> Dataset:
    """The data set, once each of its values is known to lie within its file; to read one that does not can crash.

    Raises:
        pyarrow.ArrowInvalid: one does not, or is no text where the file says so.
    """
    dataset.data.table.validate(full=True)
    return dataset


def read_hub(name: str, split: str, config_name: str | None) -> Rows:
    """A data set of the hub, or its copy in the Hugging Face cache where HF_HUB_OFFLINE is set."""
    require_datasets(f"prompts.dataset {name!r}, which is no file or folder here,")
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    kinds = ", ".join(READERS)
    instead = f"a file ({kinds}) or a folder that Dataset.save_to_disk wrote can stand in prompts.dataset instead"
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
    except OfflineModeIsEnabled:
        pass  # there may be a copy in the cache
    except Exception as error:  # the errors of the HTTP library below, which is not always the same one
        raise ConfigError(
            f"prompts.dataset is {name!r}, which is no file or folder here, and the hub does not give it "
            f"({_first_line(error)}); {instead}, and HF_HUB_OFFLINE=1 takes a copy from the cache"
        ) from error
    try:
        return load_dataset(name, config_name, split=split)
    except Exception as error:  # whatever is wrong with somebody's files: the library's words say it best
        raise ConfigError(
            f"prompts.dataset {name!r} with prompts.split {split!r} and prompts.config_name {config_name!r} cannot be "
            f"loaded: {_first_line(error)}" + (f"; {instead}" if isinstance(error, ConnectionError) else "")
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
