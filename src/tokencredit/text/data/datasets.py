"""Read data sets as rows: JSONL, JSON, CSV and Parquet files, folders of the Datasets library, and the hub.

Files are read here rather than by the Datasets library, so that errors name the line, nothing is copied into a cache,
and rows of JSON keep their own keys instead of a table's columns. No pickle is read and no code of a data set is run;
the Datasets library does neither from version 4.0 on.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokencredit.errors import ConfigError, importing

if TYPE_CHECKING:  # optional: lists, JSONL, JSON and CSV do not need it
    from datasets import Dataset

Rows: TypeAlias = "list[dict[str, Any]] | Dataset"
HUB_TIMEOUT = 10
"""Timeout of the request that tests whether the hub answers, in seconds; a download would retry six times."""
CHUNK = 1000
"""Rows that are read at once."""


def read_dataset(name: str, *, split: str = "train", config_name: str | None = None, group: str = "prompts") -> Rows:
    """Read the rows of a data set: a list of dicts, or a `datasets.Dataset`, which reads from disk on access.

    Args:
        name: a .jsonl, .json, .csv or .parquet file, a folder written by `save_to_disk`, or a hub id.
        split: a file has only train.
        config_name: the subset of a hub data set.
        group: configuration group of these settings in messages.
    """
    if "://" in name:
        raise ConfigError(f"{group}.dataset is {name!r}; addresses are not read: give a local file or a hub id")
    path = Path(name).expanduser()
    if path.is_dir():
        rows = read_folder(path, split, group)
    elif path.is_file() or path.suffix in READERS or path.is_absolute() or name.startswith((".", "~")):
        rows = read_file(path, split, group)
    else:
        return read_hub(name, split, config_name, group)
    if config_name is not None:
        raise ConfigError(f"{group}.config_name is {config_name!r}, but {name!r} is local; only the hub has subsets")
    return rows


def rows_of(source: Any, given: Any, argument: str, group: str) -> tuple[Rows, str] | None:
    """Rows with their name in messages: those given from Python as an argument, else a configuration's data set."""
    if given is not None:
        return from_python(given, argument), argument
    if source.dataset is None:
        return None
    rows = read_dataset(source.dataset, split=source.split, config_name=source.config_name, group=group)
    return rows, repr(source.dataset)


def from_python(dataset: Any, name: str) -> Rows:
    """Check and return a data set passed from Python as the argument `name`."""
    if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
        return dataset
    with suppress(ImportError):
        from datasets import Dataset

        if isinstance(dataset, Dataset):
            return plain(dataset)
    raise ConfigError(
        f"{name} is of type {type(dataset).__name__}; it must be a datasets.Dataset (one split of a "
        "DatasetDict, not an IterableDataset) or a list of dicts"
    )


def plain(dataset: Dataset) -> Dataset:
    """The data set with rows as Python values, whatever its format; a user's own transform is kept."""
    return dataset if dataset.format["type"] == "custom" else dataset.with_format(None)


def column_values(rows: Rows, column: str) -> Iterator[list[Any]]:
    """Values of a column, in chunks; None where a row lacks it."""
    if not isinstance(rows, list) and rows.format["type"] != "custom":
        rows = rows.select_columns([column])  # not with a transform, which may need the others
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        yield [row.get(column) for row in chunk] if isinstance(chunk, list) else list(chunk[column])


def read_file(path: Path, split: str, group: str) -> Rows:
    """Read the rows of a file by its suffix."""
    if path.suffix not in READERS:
        raise ConfigError(f"{group}.dataset is {str(path)!r}; it must end in one of {', '.join(READERS)}")
    if not path.is_file():
        raise ConfigError(f"{group}.dataset is {str(path)!r}, which does not exist")
    if split != "train":
        raise ConfigError(f"{group}.split is {split!r}, but {str(path)!r} is one file, whose only split is train")
    return READERS[path.suffix](path)


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text ({error.reason})") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one object per line, skipping blank lines."""
    lines = enumerate(read_text(path).split("\n"), start=1)  # splitlines also splits at U+2028, inside a string
    hint = f"; each line must be a JSON object{' (an array belongs in a .json file)' * (path.suffix == '.jsonl')}"
    return [_object(_parse(path, line, number, hint), path, f"line {number}") for number, line in lines if line.strip()]


def read_json(path: Path) -> list[dict[str, Any]]:
    """Read an array of objects or, as in many .json files, one object per line."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return read_jsonl(path)
    return [_object(row, path, f"row {number}") for number, row in enumerate(_parse(path, text), start=1)]


def _parse(path: Path, text: str, line: int = 1, hint: str = "") -> Any:
    """The value of a JSON text that begins at a line of a file; messages of its syntax end with a hint."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line + error.lineno - 1}, column {error.colno}: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise ConfigError(f"{path}, line {line}: {error}") from error


def _object(row: Any, path: Path, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f'{path}, {place}: {row!r:.60} is not an object such as {{"prompt": "..."}}')
    return row


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Read rows below a header line; CSV has no types, so every value is a string."""
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
                    raise ConfigError(f"{path}, line {reader.line_num}: a column name occurs twice in {header}")
            elif len(fields) != len(header):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields under {len(header)} column names; "
                    "quote fields that contain commas or line breaks"
                )
            else:
                rows.append(dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        advice = "; save the data as JSONL" * str(error).startswith("field larger")
        raise ConfigError(f"{path}, line {reader.line_num}: {error}{advice}") from error
    return rows


def read_parquet(path: Path) -> Rows:
    """Read a Parquet file into memory."""
    require_datasets(f"the Parquet file {str(path)!r}")
    from datasets import Dataset
    from pyarrow.parquet import read_table

    try:
        return validated(Dataset(read_table(path)))
    except Exception as error:  # pyarrow's and Datasets' exceptions have no common base class
        raise ConfigError(f"{path}: cannot read this as a Parquet file: {error}") from error


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}


def read_folder(path: Path, split: str, group: str) -> Rows:
    """Open a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`; its rows stay on disk."""
    if not (path / "dataset_dict.json").is_file() and not (path / "state.json").is_file():
        raise ConfigError(
            f"{group}.dataset is the folder {str(path)!r}, which Dataset.save_to_disk did not write; "
            f"name one of its files, which must end in one of {', '.join(READERS)}"
        )
    require_datasets(f"the folder {str(path)!r}")
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(path)
        splits = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
        for rows in splits.values():
            validated(rows)
    except Exception as error:  # as above
        raise ConfigError(f"{path}: cannot read this saved data set: {error}") from error
    if split in splits:
        return plain(splits[split])
    raise ConfigError(f"{group}.split is {split!r}; the splits of {str(path)!r} are {', '.join(splits)}")


def require_datasets(user: str) -> None:
    """Raise `NotInstalled` if `user` needs the Datasets library and it is missing."""
    with importing(user, "datasets"):
        from datasets import Dataset  # noqa: F401


def validated(dataset: Dataset) -> Dataset:
    """The data set, after a check of its Arrow buffers, since reading a corrupt one can crash."""
    dataset.data.table.validate(full=True)
    return dataset


def read_hub(name: str, split: str, config_name: str | None, group: str) -> Rows:
    """Load a data set from the hub, or from the Hugging Face cache if HF_HUB_OFFLINE is set."""
    require_datasets(f"{group}.dataset {name!r}, which is not a local file or folder,")
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    kinds = ", ".join(READERS)
    instead = f"{group}.dataset may also name a file ({kinds}) or a folder written by Dataset.save_to_disk"
    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
    except OfflineModeIsEnabled:
        pass  # load_dataset looks in the cache
    except Exception as error:  # the HTTP library, and so its exceptions, depends on the version of huggingface_hub
        raise ConfigError(
            f"{group}.dataset is {name!r}, which is not a local file or folder, and the hub request failed "
            f"({_first_line(error)}); {instead}, and HF_HUB_OFFLINE=1 loads a copy from the cache"
        ) from error
    try:
        return load_dataset(name, config_name, split=split)
    except Exception as error:  # files of a hub data set may be wrong in any way; pass the library's message on
        raise ConfigError(
            f"{group}.dataset {name!r} with {group}.split {split!r} and config_name {config_name!r} cannot be "
            f"loaded: {_first_line(error)}" + (f"; {instead}" if isinstance(error, ConnectionError) else "")
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
