"""Read a run's folder, also while it is written, or after a crash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import nan
from pathlib import Path
from typing import Any, Literal

from tokencredit.audit.verdict import CRITIC, audited_rows
from tokencredit.errors import ConfigError, importing
from tokencredit.provenance.parts import Part
from tokencredit.report.agent_episode import read_episode
from tokencredit.runs.diagnosis import Finding, diagnose
from tokencredit.runs.folder import (
    AUDIT,
    COMPLETIONS,
    EPISODE,
    apply_choices,
    flat_terms,
    read_choices,
    read_parts,
    setting_of,
)
from tokencredit.runs.jsonl import (
    COUNT,
    EVENTS,
    KNOWN,
    NUMBER,
    PER_TOKEN,
    TEXT,
    TRUTH,
    Form,
    Leaf,
    check_sample,
    comparable,
    evaluated_anew,
    is_count,
    is_number,
    read_changes,
    read_metrics,
    read_object,
    read_samples,
    require,
    scored_anew,
)
from tokencredit.runs.summary import WINDOW, finite
from tokencredit.settings.fields import check_value
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.run_kind import run_config_file

Table = Literal["metrics", "samples", "tokens", "audit"]
"""Tables of `Run.frame`."""
REPORT = "report.html"
"""The report in a run's folder."""
ITERATIONS = 400
"""Number of iterations whose completions are read, besides the first and the last: more would not fit into a page."""

GROUPS = ("advantage", "critic", "env", "model", "optim", "ppo", "rollout", "run")
"""Groups of settings that the page and the diagnosis read."""
CONFIG: dict[str, Form] = {
    "reward": [{"weight?": NUMBER}],
    "tools": [TEXT],
    "advantage.estimator": TEXT,
    "advantage.gamma": Leaf(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "ppo.clip": Leaf(lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1"),
    "ppo.clip_high": Leaf(lambda value: is_number(value) and value > 0, "a number above 0"),
    "ppo.dual_clip": NUMBER,
    "ppo.epochs": NUMBER,
    "ppo.minibatches": NUMBER,
    "rollout.max_new_tokens": NUMBER,
    "rollout.per_prompt": Leaf(lambda value: is_count(value) and value > 0, "a whole number, at least 1"),
    "optim.warmup": COUNT,
    "optim.max_grad_norm": NUMBER,
}
"""Forms of these settings, unless null or missing."""
OF_TOKENS = (*PER_TOKEN, "mask")
"""Fields of a record with one entry per token, the environment's in `mask` too."""
OF_ESTIMATOR = ("correlation", "sign_agreement", "gain")
"""Figures of each estimator in an audit."""
FIGURE = dict.fromkeys(("value", "low", "high"), KNOWN)
AUDIT_FILE: dict[str, Form] = {
    "iteration": Leaf(lambda value: value is None or is_count(value), "the number of an iteration, or null"),
    "settings": Leaf(
        lambda x: (
            isinstance(x, dict) and is_count(audited_rows(x)) and (x.get("states") is None or is_count(x["states"]))
        ),
        "an object with completions or episodes, a count, and states, a count or null",
    ),
    "continuations": NUMBER,
    "calls?": COUNT,
    "tokens?": COUNT,
    "limits?": {"*": NUMBER},
    "credit": {
        "tokens": COUNT,
        "significant": COUNT,
        "noise": FIGURE,
        "shown": TEXT,
        "estimators": {"*": dict.fromkeys(OF_ESTIMATOR, FIGURE)},
    },
    "critic": Leaf(lambda value: value is None or isinstance(value, dict), "an object or null"),
    "metrics": {"*": NUMBER},
    "samples": [{}],
}
CRITIC_FILE: dict[str, Form] = {
    **dict.fromkeys(CRITIC, FIGURE),
    "states": COUNT,
    "reliability": [dict.fromkeys(("predicted", "true", "low", "high", "states"), KNOWN)],
}
"""The critic in an audit."""


class NoIteration(ConfigError):
    """A run without a finished iteration."""


@dataclass(frozen=True)
class Run:
    """Contents of a run's files; `config`, in plain dicts and lists, has the run's choices in place of `auto`."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    """One dict per iteration, with the metrics of `audit` merged in; None replaces values that are not finite
    numbers."""
    samples: list[dict[str, Any]] = field(repr=False)
    """Completions token by token, as `text.batch` describes them, of at most `ITERATIONS`; empty for an agent."""
    summary: dict[str, Any] = field(repr=False)
    """Empty while the run is training."""
    audit: dict[str, Any] | None = field(default=None, repr=False)
    """The newest audit, as `AUDIT_FILE` describes it; None if there is none."""
    changes: Sequence[tuple[int, str]] = ()
    """Settings and sources that changed when the run was resumed, after the iteration before each."""

    parts: Mapping[str, Part] = field(default_factory=dict, repr=False)
    """Descriptions of its functions, classes, objects, data and local models, by argument or key."""
    episode: dict[str, Any] | None = field(default=None, repr=False)
    """An agent's episode after the newest evaluation, as `agent_episode.EPISODE_FILE` describes it, or None."""

    @property
    def python(self) -> dict[str, Any]:
        """Labels of its parts from Python, by argument or key."""
        python = self.setting("python")
        return python if isinstance(python, dict) else {}

    @property
    def since(self) -> int:
        """Iterations before the last change of what is scored."""
        return scored_anew(self.changes)

    @property
    def scored(self) -> list[dict[str, Any]]:
        """The rows of metrics since that change; empty if its first iteration is not finished."""
        return self.metrics[self.since :]

    @property
    def seconds(self) -> float:
        """Seconds that the run took, by its summary; without one, those of pretraining and iterations so far."""
        so_far = (row.get(name) for row in self.metrics for name in ("pretrain/seconds", "seconds"))
        return float(self.summary.get("seconds", sum(finite(so_far))))

    def findings(self) -> list[Finding]:
        """The diagnosis of the run since that change."""
        evaluated = evaluated_anew(self.changes, self.config)
        rows = comparable(self.metrics, self.since, evaluated)
        return diagnose(rows, self.config, ended=bool(self.summary), samples=self.samples)

    def evaluations(self, name: str) -> list[float]:
        """The finite numbers of a metric since what evaluations measure changed."""
        return list(finite(row.get(name) for row in self.metrics[evaluated_anew(self.changes, self.config) :]))

    def frame(self, table: Table = "metrics") -> Any:
        """A table as a `pandas.DataFrame`, with the names of metrics.jsonl and samples.jsonl as columns.

        Args:
            table: `metrics`, a row per iteration; `samples`, a row per completion that the run's folder keeps, all of
                them also in a long run; `tokens`, a row per token of these; `audit`, a row per token of `audit`.

        Raises:
            NotInstalled: pandas is missing.
            ConfigError: there is no such table, or a file is invalid; the message names it.
        """
        check_value("table", table, Table, {})
        with importing("Run.frame", "pandas", "tokencredit[pandas]"):
            import pandas
        if table == "metrics":
            return pandas.DataFrame(self.metrics)
        iteration = (self.audit or {}).get("iteration")
        audited = [{"iteration": iteration, **sample} for sample in (self.audit or {}).get("samples", ())]
        samples = audited if table == "audit" else read_completions(self.path)
        return pandas.DataFrame(completion_rows(samples) if table == "samples" else token_columns(samples))

    def setting(self, key: str) -> Any:
        """A setting by its key; None if the run has none."""
        return setting_of(self.config, key)

    @property
    def episodic(self) -> bool:
        """True if completions are episodes of several turns."""
        return any("env/turns" in row for row in self.metrics)


def read_run(path: str | Path, *, samples: bool = True) -> Run:
    """Read a run's folder; completions, by far the largest part, are optional.

    Raises:
        ConfigError: it is not a run's folder, has no iteration yet, or a file is invalid; the message says where.
    """
    path = Path(path).expanduser()
    config = read_yaml(run_config_file(path))
    require(path / "config.yaml", config, {f"{group}?": {} for group in GROUPS})
    for key, form in CONFIG.items():
        if (value := setting_of(config, key)) is not None:
            require(path / "config.yaml", {key: value}, {key: form})
    metrics = list(read_metrics(path / "metrics.jsonl"))
    if not metrics:
        raise NoIteration(f"{str(path)!r} has no finished iteration yet")
    summary = path / "summary.json"
    outcome = read_object(summary, summary.read_text(encoding="utf-8", errors="replace")) if summary.is_file() else {}
    require(summary, outcome, {"stopped_by?": TEXT, "seconds?": NUMBER})
    kept = read_samples(path / "samples.jsonl", chosen([row["iteration"] for row in metrics])) if samples else []
    audit = read_audit(path / AUDIT)
    if audit is not None:
        metrics = with_audit(metrics, audit)
    return Run(
        *(path, apply_choices(config, read_choices(path)), metrics, kept, outcome, audit),
        changes=read_changes(path / EVENTS),
        parts=read_parts(path),
        episode=read_episode(path / EPISODE),
    )


def read_completions(run: Path) -> list[dict[str, Any]]:
    """Records of every completion that a run's folder keeps, in Parquet files or in samples.jsonl.

    Raises:
        ConfigError: a file is invalid; the message names it.
    """
    files = sorted((run / COMPLETIONS).glob("*.parquet"))
    in_files = {int(file.stem) for file in files if file.stem.isdigit()}
    # A resumed run may have kept all completions of some iterations, and a few of others.
    records = [x for x in read_samples(run / "samples.jsonl", range(2**53)) if x["iteration"] not in in_files]
    if not files:
        return records
    with importing("reading completions kept as Parquet", "PyArrow", "tokencredit[datasets]"):
        import pyarrow
        from pyarrow import parquet

    for file in files:
        try:
            rows = parquet.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{file} is no Parquet file that can be read: {error}") from error
        for number, row in enumerate(rows):
            records.append(without_nulls(row))
            check_sample(f"{file}, row {number}", records[-1])
    return sorted(records, key=lambda record: record["iteration"])


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a Parquet file without the fields that it lacks, at any depth."""
    found = {name: value for name, value in row.items() if value is not None}
    return found | {"turns": [without_nulls(turn) for turn in found["turns"]]} if "turns" in found else found


def numbered(samples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each record with its place within its iteration, from 0."""
    for _, group in groupby(samples, key=lambda sample: sample["iteration"]):
        yield from enumerate(group)


def completion_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per completion: its fields that are not per token, and `length`, its number of the policy's tokens."""
    return [
        {"iteration": sample["iteration"], "sample": place}
        | {name: value for name, value in flat_terms(sample).items() if name not in OF_TOKENS}
        | {"length": sum(sample.get("mask", [1] * len(sample["tokens"])))}
        for place, sample in numbered(samples)
    ]


def token_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns with an entry per token: its place, and the fields per token, NaN where there is none."""
    parts: list[dict[str, Any]] = []
    for place, sample in numbered(samples):
        size = len(sample["tokens"])
        where = {"iteration": [sample["iteration"]] * size, "sample": [place] * size, "position": range(size)}
        parts.append(where | {name: sample[name] for name in OF_TOKENS if name in sample})
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: [nan if x is None else x for part in parts for x in part.get(name, [None] * len(part["tokens"]))]
        for name in names
    }


def chosen(iterations: Sequence[int]) -> set[int]:
    """Iterations whose completions are read: the first and last ones, and others evenly spread between them."""
    step = -(-len(iterations) // ITERATIONS)
    return {*iterations[:WINDOW], *iterations[::step], *iterations[-WINDOW:]}


def read_audit(file: Path) -> dict[str, Any] | None:
    """The audit in this file, None without one; raises `ConfigError` with the key if it is invalid."""
    if not file.is_file():
        return None
    audit = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    require(file, audit, AUDIT_FILE)
    if audit["critic"] is not None:
        require(file, audit, {"critic": CRITIC_FILE})
    if audit["credit"]["shown"] not in audit["credit"]["estimators"]:
        raise ConfigError(f"{file}: credit.shown is none of credit.estimators")
    if other := next((name for name in audit["metrics"] if not name.startswith("audit/")), None):
        raise ConfigError(f"{file}: metrics has {other!r}; names must begin with audit/")
    for number, sample in enumerate(audit["samples"]):
        where = f"{file}: samples[{number}]"
        require(where, sample, {name: [KNOWN] for name in TRUTH})
        check_sample(where, sample | {"iteration": 0})  # the iteration is the audit's
    return audit


def with_audit(metrics: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of metrics with an audit's in the row of its iteration, or the last row for the final policy.

    An iteration without a row, such as 0 after pretraining, changes none.
    """
    number = metrics[-1]["iteration"] if audit["iteration"] is None else audit["iteration"]
    return [
        {name: x for name, x in row.items() if not name.startswith("audit/")} | audit["metrics"]
        if row["iteration"] == number
        else dict(row)
        for row in metrics
    ]
