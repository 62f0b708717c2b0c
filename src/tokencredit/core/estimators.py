"""Call an advantage estimator, of ours by name or one's own as a function, with the inputs that it names; by turn too.

A turn is one uninterrupted contribution of the policy to an episode; an environment answers between two turns. Credit
by token treats each token as an action. Credit by turn treats the whole turn as one: its reward is the sum of its
tokens' rewards, its value that of the state before its first token, and all its tokens share its advantage. γ and λ
then count turns (Zhou et al. 2024, "ArCHer", arXiv 2402.19446, section 3; Li et al. 2025, "Turn-PPO", arXiv
2512.17008).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from tokencredit.core import advantages as functions
from tokencredit.core.argument_checks import require_choice, require_flags, require_rows, require_shape, require_tensors
from tokencredit.core.episodes import EpisodeBounds
from tokencredit.core.estimator_table import ESTIMATORS, INPUTS, SETTINGS, Estimator, EstimatorFunction, parameters_of
from tokencredit.core.masked import at_least_float32
from tokencredit.errors import RunStopped

FUNCTIONS: dict[str, EstimatorFunction] = {name: getattr(functions, name) for name in ESTIMATORS}
"""The functions behind `core.estimator_table.ESTIMATORS`."""
ALL_OPTIONS = (*SETTINGS, "baseline", "group_size")
SUMMED = ("logprobs", "entropy", "ref_logprobs")
"""Inputs of estimators that a turn has, as the sum over its tokens."""


@dataclass(frozen=True)
class Turns:
    """The turns of a batch of episodes."""

    index: Tensor
    """`[batch, time]`, int64: number of the turn at acted tokens, from 0; elsewhere the number of columns of `mask`."""
    first: Tensor
    """Bool `[batch, time]`, true at the first token of each turn."""
    mask: Tensor
    """Bool `[batch, turns]`, true at the turns that a row has."""

    @classmethod
    def of(cls, mask: Tensor, ends: Tensor) -> Turns:
        """The turns of rows, from the mask and the last token of each turn, both bool `[batch, time]`.

        A row's last acted token ends a turn anyway.
        """
        require_rows("mask", mask)
        require_flags("mask", mask, mask.shape)
        require_flags("ends", ends, mask.shape)
        acted_ends = (ends & mask).long()
        index = acted_ends.cumsum(1) - acted_ends
        count = torch.where(mask, index + 1, 0).amax(1)
        most = int(count.max())
        before = torch.nn.functional.pad(torch.where(mask, index, -1).cummax(1).values, (1, -1), value=-1)
        first = mask & (index != before)
        present = torch.arange(most, device=mask.device) < count.unsqueeze(1)
        return cls(torch.where(mask, index, most), first, present)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x`, `[batch, time]`, over each turn's tokens, `[batch, turns]`; 0 for a turn that a row lacks."""
        require_shape("x", x, self.index.shape)
        x = at_least_float32(x)
        # Observations and padding go to an extra column, NaN included.
        sums = x.new_zeros(len(x), self.mask.shape[1] + 1).scatter_add(1, self.index, x)
        return sums[:, :-1]

    def at_first(self, x: Tensor) -> Tensor:
        """`x` at each turn's first token, `[batch, turns]`; 0 for a turn that a row lacks."""
        return self.sum(x.masked_fill(~self.first, 0))

    def spread(self, x: Tensor) -> Tensor:
        """`x`, `[batch, turns]`, at every token of its turn, `[batch, time]`; 0 elsewhere."""
        require_shape("x", x, self.mask.shape)
        return torch.nn.functional.pad(x, (0, 1)).gather(1, self.index)


def estimate(
    estimator: str | EstimatorFunction,
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    options: Mapping[str, Any],
    inputs: Mapping[str, Tensor | None] | None = None,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """Call an estimator with what it names of all that is known.

    A config may therefore hold the options of all estimators at once: `gae` reads `lam`, `td` ignores it.

    Args:
        estimator: a key of `ESTIMATORS`, or a function whose parameters name what it reads: `rewards`, `values`, keys
            of `where`, `options` and `inputs`. `**where` takes the bounds that it does not name.
        rewards: [batch, time].
        values: [batch, time]; None if there is no critic.
        options: `gamma`, `lam`, `n`, `lam_returns`, `alpha`, `baseline`, `group_size`, `scale`.
        inputs: further tensors of `INPUTS`, [batch, time]; None for one that is not known.
        where: as in `gae`.

    Returns:
        Advantages and returns of that estimator, 0 where the mask is false.

    Raises:
        ValueError: unknown estimator or option; a required option, input or critic is missing; and as the estimator
            itself.
        RunStopped: the results of an own function are not two finite tensors [batch, time].
    """
    if isinstance(estimator, str):
        require_choice("estimator", estimator, ESTIMATORS)
    function = FUNCTIONS[estimator] if isinstance(estimator, str) else estimator
    for option in options:
        if option not in ALL_OPTIONS and option in parameters_of(function):
            raise ValueError(f"option {option!r} is the estimator's own argument; give it with functools.partial")
        require_choice("option", option, ALL_OPTIONS)
    if values is None and Estimator.of(function).critic == "required":
        raise ValueError(f"values is None; the estimator {_name(estimator)} needs a critic")
    known: dict[str, Any] = {"rewards": rewards, "values": values, **where, **options, **(inputs or {})}
    arguments: dict[str, Any] = {}
    for name, parameter in parameters_of(function).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {key: x for key, x in where.items() if key not in arguments}
        elif known.get(name) is not None or (name in known and name not in INPUTS):
            arguments[name] = known[name]
        elif parameter.default is parameter.empty:
            raise ValueError(f"{name} is missing; the estimator {_name(estimator)} needs it")
    result: tuple[Tensor, Tensor] = function(**arguments)
    return result if isinstance(estimator, str) else _checked(result, rewards, where.get("mask"), _name(estimator))


def estimate_by_turn(
    estimator: str | EstimatorFunction,
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    turns: Turns,
    options: Mapping[str, Any],
    inputs: Mapping[str, Tensor | None] | None = None,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """`estimate` with turns as its steps.

    A turn's reward is the sum over its tokens, as are its log-probs and entropy; its value is that of its first token.
    A flag anywhere in a turn counts, and `bootstrap` is read there; the mask is the turns' own. γ and λ apply per turn.
    The rest is as in `estimate`.

    Returns:
        Advantages and returns, [batch, time], the same for all tokens of a turn. A critic that learns one value per
        turn learns the returns at `turns.first` only.
    """
    require_tensors(rewards=rewards, values=values, **where)
    require_rows("rewards", rewards)
    by_turn: EpisodeBounds = {"mask": turns.mask}
    for key in ("terminated", "truncated"):
        flags = where.get(key)
        if isinstance(flags, Tensor):
            by_turn[key] = turns.sum(flags.float()) > 0
    bootstrap, truncated = where.get("bootstrap"), where.get("truncated")
    if bootstrap is not None and truncated is not None:
        by_turn["bootstrap"] = turns.sum(bootstrap.masked_fill(~truncated, 0))
    step_values = None if values is None else turns.at_first(values)
    known = {key: turns.sum(x) for key, x in (inputs or {}).items() if x is not None and key in SUMMED}
    advantages, returns = estimate(estimator, turns.sum(rewards), step_values, options=options, inputs=known, **by_turn)
    return turns.spread(advantages), turns.spread(returns)


def _checked(result: Any, rewards: Tensor, mask: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The results of an own function: without gradients, in float32 at least, 0 outside the mask."""
    parts = result if isinstance(result, tuple | list) else [result]
    tensors = [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    if len(parts) != 2 or [x.shape for x in tensors] != [rewards.shape] * 2:
        found = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        raise RunStopped(
            f"the estimator {name} returned {' and '.join(found):.80}; it must return advantages and returns, "
            f"floating-point tensors of shape {list(rewards.shape)}, [batch, time], each"
        )
    acted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    advantages, returns = (at_least_float32(x.detach()).masked_fill(~acted, 0.0) for x in result)
    if not torch.stack([advantages, returns]).isfinite().all():
        raise RunStopped(f"the estimator {name} returned a number that is not finite where the policy acted")
    return advantages, returns


def _name(estimator: str | EstimatorFunction) -> str:
    if isinstance(estimator, str):
        return estimator
    function = inspect.unwrap(estimator)
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__name__", type(function).__name__)
