"""Policy losses of users: a function of ratio, advantages and what else it names, or a subclass of `Objective`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from tokencredit.core.estimator_table import parameters_of
from tokencredit.core.losses import MAX_LOG_RATIO, Clip
from tokencredit.errors import RunStopped
from tokencredit.learn import objective
from tokencredit.learn.experience import Experience
from tokencredit.learn.objective import Objective
from tokencredit.settings.training import LOSSES

LOSS_INPUTS = ("ratio", "logprobs", "old_logprobs", "advantages", "returns", "mask")
"""Tensors that a loss may name: of the acted tokens, `[tokens]`, or with `mask` of whole rows, `[rows, time]`."""
LOSS_SETTINGS = ("clip", "dual_clip")
"""Settings that it may name: `clip` is a pair, how far the ratio may fall and rise."""


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """PPO's objective with the policy loss of a function: one number per token, or these and metrics by name."""

    function: Callable[..., Any] = lambda ratio, advantages: -ratio * advantages

    @cached_property
    def named(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters, without those that are fixed."""
        return parameters_of(self.function)

    @property
    def additive(self) -> bool:  # type: ignore[override]
        """False for a function of whole rows."""
        return "mask" not in self.named

    @property
    def metric_clip(self) -> Clip | None:
        """The range of the metric `clip_fraction`, if the function reads it."""
        return self.clip if "clip" in self.named else None

    def surrogate(self, logprobs: Tensor, rows: Experience, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The function's losses and metrics at acted tokens."""
        whole = not self.additive
        if whole:
            logprobs = logprobs.new_zeros(rows.mask.numel()).index_copy(0, at, logprobs).view(rows.mask.shape)

        def taken(x: Tensor) -> Tensor:
            return x.masked_fill(~rows.mask, 0.0) if whole else x.flatten()[at]

        old = taken(rows.logprobs)
        known: dict[str, Any] = {
            "ratio": (logprobs.float() - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
            "logprobs": logprobs,
            "old_logprobs": old,
            "advantages": taken(rows.advantages),
            "returns": taken(rows.returns),
            "mask": rows.mask,
            **{name: getattr(self, name) for name in LOSS_SETTINGS},
        }
        result = self.function(**{name: known[name] for name in self.named if name in known})
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        losses, metrics = result if pair else (result, {})
        for name, x in {"a loss": losses, **metrics}.items():
            if not isinstance(x, Tensor) or x.shape != logprobs.shape:
                found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
                raise RunStopped(
                    f"ppo.loss returned {name} of {found:.80}; it must return a tensor of losses of shape "
                    f"{tuple(logprobs.shape)}, one per token, and if it likes a dict of metrics of that shape"
                )
        if logprobs.requires_grad and not losses.requires_grad:
            raise RunStopped("ppo.loss returned losses without a gradient; compute them from ratio or logprobs")
        numbers = {name: x.detach().float() for name, x in metrics.items()}
        if not whole:
            return losses, numbers
        return losses.flatten()[at], {name: x.flatten()[at] for name, x in numbers.items()}


def objective_of(
    loss: str | Callable[..., Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], limit: float | None = None
) -> Objective:
    """The objective of a policy loss: a name of `settings.training.LOSSES`, a function, or a subclass of `Objective`.

    `options` are fields of `Objective`, `kwargs` the user's for an own loss, `limit` another `divergence_limit`.
    """
    if isinstance(loss, str):
        row = LOSSES[loss]
        made: Objective = getattr(objective, row.objective)(**options, **row.options)
        return made if limit is None else replace(made, divergence_limit=limit)  # type: ignore[call-arg]
    if isinstance(loss, type):
        own: Objective = loss(**options, **kwargs)
        return own
    return FunctionObjective(**options, function=partial(loss, **kwargs) if kwargs else loss)
