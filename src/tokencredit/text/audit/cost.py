"""The cost of an audit: estimated before it, counted in it, and bounded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tokencredit.errors import ConfigError
from tokencredit.runs.loop import AT_END
from tokencredit.runs.summary import WINDOW, duration, figure, mean
from tokencredit.settings.training import AuditConfig
from tokencredit.text.pipeline import Pipeline

PLANNED = AuditConfig(continuations=8, states=AT_END.states)
"""The audit per completion for which the number of completions of such an audit leaves time."""


class Cost(NamedTuple):
    """Work of an audit."""

    calls: float
    """Reward calls: texts that the busiest reward term scores, prefixes included."""
    tokens: float
    """Sampled tokens."""
    seconds: float | None
    """None if unknown."""

    def __str__(self) -> str:
        """The numbers, as text."""
        seconds = "" if self.seconds is None else f", {duration(self.seconds)}"
        return f"{figure(self.calls)} reward calls, {figure(self.tokens)} tokens{seconds}"


class Pace(NamedTuple):
    """Measures of a run that the cost of its audits follows from."""

    length: float
    """Tokens per completion."""
    passes: float | None
    """Seconds per completion of sampling, and of the reference; None if unknown."""
    reward: float = 0.0
    """Seconds per completion of the reward."""
    prefixes: float = 0.0
    """Seconds per completion of scoring its prefixes."""
    continued: float = 0.5
    """Share of a completion's sampling that a continuation takes."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], batch: int, longest: int) -> Pace:
        """The pace of a run's last iterations, of `batch` completions of at most `longest` tokens."""
        last = rows[-WINDOW:]
        stages = ("rollout", "reference", "reward", "prefixes")
        sampling, reference, reward, prefixes = (
            (mean(row.get(f"seconds/{stage}") for row in last) or 0.0) / batch for stage in stages
        )
        length = mean(row.get("length") for row in last) or longest
        return cls(length, sampling + reference if last else None, reward, prefixes)


def expected(size: AuditConfig, group: int, pace: Pace, prefix_every: int = 0, completions: int | None = None) -> Cost:
    """The work of an audit of this size, within its limits; a continuation is half as long as a completion.

    Args:
        size: its settings; an audited token needs the states before and after it.
        group: completions sampled per audited one.
        pace: the run's.
        prefix_every: tokens between the scored prefixes of the completions; 0 for none.
        completions: their number in place of the setting's.
    """
    completions = completions or size.completions
    states = pace.length if size.states is None else min(2 * size.states, pace.length)
    continued = completions * states * size.continuations
    passes, prefixes = pace.passes or 0.0, pace.length / prefix_every if prefix_every else 0.0
    first = [completions * group * x for x in (1 + prefixes, pace.length, passes + pace.reward + pace.prefixes)]
    more = [continued * x for x in (1.0, pace.length / 2, passes * pace.continued + pace.reward)]
    limits = zip((size.calls, size.tokens, size.seconds), first, more, strict=True)
    share = min([1.0, *(max(limit - x, 0.0) / y for limit, x, y in limits if limit and y)])
    calls, tokens, seconds = (x + share * y for x, y in zip(first, more, strict=True))
    return Cost(calls, tokens, None if pace.passes is None else seconds)


class Meter:
    """Counts the work of one process's audit, and says when its limits are reached."""

    def __init__(self, size: AuditConfig, pipeline: Pipeline, group: int, longest: int):
        """Start at nothing; raises `ConfigError` if the limits exclude the completions that are audited."""
        self.size, self.terms, self.longest = size, pipeline.terms, longest
        self.processes = pipeline.processes.count
        self.before = [term.scored for term in self.terms]
        self.started, self.parts, self.tokens = time.perf_counter(), 0, 0
        self.ended_by: dict[str, float] = {}
        """Limits that left out continuations."""
        first = -(-size.completions // self.processes) * self.processes * group
        for name, needed in {"calls": first, "tokens": first * longest}.items():
            limit = getattr(size, name)
            if limit is not None and limit < needed:
                raise ConfigError(
                    f"audit.{name} is {limit}; it must be at least {needed}, for the {first} completions whose credit "
                    "is compared; or lower audit.completions"
                )

    @property
    def limited(self) -> bool:
        """True if the audit may end before its last continuation."""
        return any(limit is not None for limit in (self.size.seconds, self.size.calls, self.size.tokens))

    @property
    def calls(self) -> int:
        """Texts that the busiest reward term has scored."""
        return max(term.scored - before for term, before in zip(self.terms, self.before, strict=True))

    def allows(self, at: Tensor, count: int) -> bool:
        """True if `count` continuations from each of the states before tokens `at` stay within the limits."""
        self.parts += 1
        cost = {
            "seconds": time.perf_counter() - self.started if self.parts > 2 else 0.0,
            "calls": (self.calls + count * len(at)) * self.processes,
            "tokens": (self.tokens + count * int((self.longest - at).sum())) * self.processes,
        }
        limits = {name: getattr(self.size, name) for name in cost}
        over = {name: limit for name, limit in limits.items() if limit is not None and cost[name] > limit}
        self.ended_by |= over
        return not over
