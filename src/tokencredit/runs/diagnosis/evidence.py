"""Metrics and settings of a run for the checks, and the findings that they return."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any

from tokencredit.runs.folder import setting_of
from tokencredit.runs.jsonl import is_number
from tokencredit.runs.summary import WINDOW, finite, headline, mean
from tokencredit.runs.transcript import of_iteration
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import flat, settings_of, unused
from tokencredit.settings.run_kind import CONTROL, RunKind, run_kind_of
from tokencredit.settings.text import PPOConfig

SETTLED = 10
"""Iterations before which a run is too short to judge."""
LEARNS = 0.5
"""Rise of the reward, in standard deviations of a single completion, above which a run learns."""
AUDITS = 2
"""Number of last audits that a check looks at; all must agree, so that one interval by chance gives no finding."""


@dataclass(frozen=True)
class Finding:
    """A problem of a run."""

    title: str
    evidence: str
    """Metrics, with iterations."""
    meaning: str
    cures: tuple[str, ...]
    """Changes to try, the likeliest to help first; settings that this kind of run lacks or does not use, and values
    that it has, are left out."""
    name: str = ""
    """That of its check, a function."""
    weight: int = 0
    """Importance; above 80, the run's other numbers cannot be trusted."""
    section: str = ""
    """Section of the documentation that explains it."""

    @property
    def advice(self) -> str:
        """The cures as one phrase."""
        *others, last = self.cures
        return f"{', '.join(others)}{',' * (len(others) > 1)} or {last}" if others else last

    def line(self) -> str:
        """The finding in one line, for a run in progress."""
        return f"{self.title} ({self.evidence}); {self.advice}"


@cache
def _foreign_keys(run_kind: RunKind) -> frozenset[str]:
    """Settings of texts or agents that this kind of run lacks."""
    of_texts, of_agents = frozenset(settings_of(PPOConfig)), frozenset(settings_of(ControlConfig))
    return of_texts - of_agents if run_kind is CONTROL else of_agents - of_texts


class Evidence:
    """Metrics and recorded completions of the iterations so far; `samples` are those of the newest."""

    def __init__(
        self,
        metrics: Sequence[Mapping[str, Any]],
        config: Mapping[str, Any],
        ended: bool,
        samples: Sequence[Mapping[str, Any]] = (),
    ):
        self.metrics, self.config, self.ended = metrics, config, ended
        self.run_kind = run_kind_of(config)
        self.reward, self.deviation = headline(metrics, self.run_kind)
        since = metrics[0]["iteration"] if metrics else 0
        self.recorded = [sample for sample in samples if sample["iteration"] >= since]
        self.samples = of_iteration(samples, -1)

    def possible(self, cures: Sequence[str]) -> tuple[str, ...]:
        """The cures whose settings this kind of run has and uses, and has otherwise."""
        return tuple(short for cure in cures if (short := self._possible(cure)))

    def _possible(self, cure: str) -> str:
        """A cure without settings in brackets that have no effect; empty if it is none of this run."""
        kind: Any = self.run_kind.config
        key, defaults = r"\w+(?:\.\w+)+", {name: setting.default for name, setting in settings_of(kind).items()}
        settings = defaults | flat(self.config)
        values = dict(re.findall(rf"({key}): (\w+)", cure))
        without = unused(kind, settings | values)
        used = re.sub(
            r"(?<=\()[^()]+", lambda x: ", ".join(name for name in x[0].split(", ") if name not in without), cure
        )
        refused = {*_foreign_keys(self.run_kind), *without}.intersection(re.findall(key, used))
        there = any(str(settings.get(name)).lower() == value for name, value in values.items())
        changed = any(settings.get(x) != defaults.get(x) for x in re.findall(rf"set ({key})(?![\w.:])", cure))
        return "" if refused or there or changed or "()" in used else used

    def __len__(self) -> int:
        return len(self.metrics)

    def episodic(self) -> bool:
        """True if completions are episodes of several turns."""
        return self.last("env/turns") > 0

    def setting(self, key: str) -> Any:
        """A setting by its key; None if the run has none."""
        return setting_of(self.config, key)

    def values(self, name: str, part: slice) -> list[float]:
        """A metric's finite numbers in some iterations."""
        return list(finite(row.get(name) for row in self.metrics[part]))

    @cached_property
    def audits(self) -> list[Mapping[str, Any]]:
        """Rows of the last audits of a settled run."""
        rows = (row for row in reversed(self.metrics[SETTLED - 1 :]) if is_number(row.get("audit/noise")))
        return [*islice(rows, AUDITS)][::-1]

    def in_audits(self, name: str, bad: Callable[[float], bool]) -> bool:
        """True if there are audits, and in all of the last ones the metric is bad."""
        numbers: list[Any] = [row.get(name) for row in self.audits]
        return bool(numbers) and all(is_number(x) and bad(x) for x in numbers)

    def audited(self, name: str) -> str:
        """A metric in the last audits, as text."""
        numbers = ", ".join(f"{row[name]:.3g}" for row in self.audits)
        iterations = " and ".join(str(int(row["iteration"])) for row in self.audits)
        where = "the audit of iteration" if len(self.audits) == 1 else "the audits of iterations"
        return f"{name} {numbers} in {where} {iterations}"

    def mean(self, name: str, part: slice) -> float:
        """A metric's mean over some iterations; NaN if it has no number there."""
        value = mean(self.values(name, part))
        return math.nan if value is None else value

    def first(self, name: str) -> float:
        """A metric's mean over the first iterations."""
        return self.mean(name, slice(0, WINDOW))

    def last(self, name: str) -> float:
        """A metric's mean over the last iterations."""
        return self.mean(name, slice(-WINDOW, None))

    def where(self, name: str) -> str:
        """A metric's means over the first and the last iterations, as text; one mean for a short run."""
        first, last = int(self.metrics[0]["iteration"]), int(self.metrics[-1]["iteration"])
        if len(self) <= WINDOW:
            iterations = f"iteration {first}" if first == last else f"iterations {first}–{last}"
            return f"{name} {self.last(name):.3g} in {iterations}"
        then = min(first + WINDOW - 1, last)
        now = max(last - WINDOW + 1, first)
        return f"{name} {self.first(name):.3g} in iterations {first}–{then}, {self.last(name):.3g} in {now}–{last}"

    def gain(self) -> float:
        """Rise of the reward in standard deviations of a single completion, at the start or where that is 0 over the
        run; NaN if unknown."""
        deviation = self.first(self.deviation) or self.mean(self.deviation, slice(None))
        rise = self.last(self.reward) - self.first(self.reward)
        return rise / deviation if deviation > 0 else math.nan

    def learns(self, gain: float = LEARNS) -> bool:
        """True if the reward has risen by so many standard deviations: what is odd does no harm."""
        return self.gain() >= gain


Checks = tuple[tuple[int, Callable[[Evidence], Finding | None], str], ...]
"""Checks, each after the weight of its finding and before the section that explains it."""
