"""Table of advantage estimators and their inputs. Imports no torch, so that settings are checked quickly.

An estimator is a function that names what it reads, and returns advantages and returns. `Estimator.of` reads its
signature, for one of ours as for one's own; a row of the table says the same without importing the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

EstimatorFunction = Callable[..., Any]
"""A function that returns advantages and returns, tensors `[batch, time]`."""
SETTINGS = ("gamma", "lam", "lam_returns", "alpha", "n", "scale")
"""Settings under `advantage` that an estimator may name."""
BOUNDS = ("mask", "terminated", "truncated", "bootstrap")
"""The arguments of `core.episodes.EpisodeBounds`; `**where` in a signature takes those that it does not name."""
INPUTS = ("logprobs", "entropy", "ref_logprobs", "token_ids", "prefix_scores")
"""Tensors `[batch, time]` that an estimator may name besides rewards, values and bounds (docs/your-own.md)."""


class Estimator(NamedTuple):
    """Inputs of an advantage estimator besides rewards and bounds."""

    critic: Literal["required", "baseline", "unused"]
    """Values are required, subtracted if present, or not read."""
    settings: tuple[str, ...] = ()
    """Settings that it reads, of `SETTINGS`."""
    group: bool = False
    """Compares completions of one prompt; needs `group_size` and one score per row."""
    baseline: bool = False
    """Subtracts the running mean of earlier scores; needs `baseline` and one score per row."""
    inputs: tuple[str, ...] = ()
    """Further tensors that it reads, of `INPUTS`."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Estimator:
        """The inputs that a function's signature names."""
        named = parameters_of(function)
        values = named.get("values")
        critic: Any = "unused" if values is None else "required" if values.default is values.empty else "baseline"
        settings, inputs = (tuple(key for key in keys if key in named) for keys in (SETTINGS, INPUTS))
        return cls(critic, settings, "group_size" in named, "baseline" in named, inputs)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters by name, without those that a `partial` fixes."""
    parameters = inspect.signature(function).parameters
    fixed = getattr(inspect.unwrap(function), "keywords", {})
    return {name: parameter for name, parameter in parameters.items() if name not in fixed}


def named(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What a function's signature names of what is known."""
    return {name: known[name] for name in parameters_of(function) if name in known}


def inputs_named(function: Callable[..., Any]) -> list[str]:
    """Parameters that a run gives an estimator; the others are its own."""
    given = ("rewards", "values", *BOUNDS, *SETTINGS, *INPUTS, "group_size", "baseline")
    return [name for name in parameters_of(function) if name in given]


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator("required", ("gamma", "lam")),
    "td": Estimator("required", ("gamma",)),
    "monte_carlo": Estimator("required", ("gamma",)),
    "n_step": Estimator("required", ("gamma", "n")),
    "decoupled_gae": Estimator("required", ("gamma", "lam", "lam_returns")),
    "length_adaptive_gae": Estimator("required", ("gamma", "lam_returns", "alpha")),
    "total_return": Estimator("baseline", ("gamma",)),
    "reward_to_go": Estimator("baseline", ("gamma",)),
    "uniform": Estimator("unused", baseline=True),
    "group_relative": Estimator("unused", ("scale",), group=True),
    "leave_one_out": Estimator("unused", group=True),
}
"""Estimators by name; the function of that name is in `core.advantages`."""

AGENT_ESTIMATORS = tuple(
    name for name, row in ESTIMATORS.items() if not (row.group or row.baseline or "alpha" in row.settings)
)
"""Those of agents need no score of a whole text, nor its length: an agent's row has `steps` steps of many episodes."""

if TYPE_CHECKING:
    EstimatorName: TypeAlias = str
    AgentEstimatorName: TypeAlias = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
    AgentEstimatorName = Literal[AGENT_ESTIMATORS]
"""Names of the estimators."""
