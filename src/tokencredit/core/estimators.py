"""Call an advantage estimator, of ours by name or one's own as a function, with the inputs that it names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Unpack

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_choice
from tokencredit.core.episodes import EpisodeBounds
from tokencredit.core.estimator_table import ESTIMATORS, INPUTS, SETTINGS, Estimator, EstimatorFunction, parameters_of
from tokencredit.core.masked import at_least_float32
from tokencredit.errors import RunStopped

FUNCTIONS: dict[str, EstimatorFunction] = {
    name: getattr(import_module(f"tokencredit.core.{spec.module}"), name) for name, spec in ESTIMATORS.items()
}
"""The functions behind `core.estimator_table.ESTIMATORS`."""
ALL_OPTIONS = (*SETTINGS, "baseline", "group_size")


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
    for option in options:
        require_choice("option", option, ALL_OPTIONS)
    function = FUNCTIONS[estimator] if isinstance(estimator, str) else estimator
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


def _checked(result: Any, rewards: Tensor, mask: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The results of an own function: without gradients, in float32 at least, 0 outside the mask."""
    parts = result if isinstance(result, tuple | list) else [result]
    if [getattr(x, "shape", None) for x in parts] != [rewards.shape] * 2:
        found = [f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts]
        raise RunStopped(
            f"the estimator {name} returned {' and '.join(found):.80}; it must return advantages and returns, "
            f"tensors of shape {tuple(rewards.shape)}, [batch, time], each"
        )
    acted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    advantages, returns = (at_least_float32(x.detach()).masked_fill(~acted, 0.0) for x in result)
    if not torch.stack([advantages, returns]).isfinite().all():
        raise RunStopped(f"the estimator {name} returned a number that is not finite where the policy acted")
    return advantages, returns


def _name(estimator: str | EstimatorFunction) -> str:
    return estimator if isinstance(estimator, str) else getattr(estimator, "__name__", type(estimator).__name__)
