"""Argument checks: each error names the argument, its value, and the accepted values."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from tokencredit.errors import pages_by_title

P = ParamSpec("P")
R = TypeVar("R")
FOREIGN = {
    **dict.fromkeys(
        ("dones", "done", "next_done"),
        "terminated=, true at the step after which the next state is worth 0, and truncated= with bootstrap=, where an "
        "episode was cut off; CleanRL's dones[t] belongs to step t - 1 (docs/names.md)",
    ),
    **dict.fromkeys(
        ("last_value", "last_values", "next_value", "next_values"),
        "truncated=, true at the step that an episode was cut off after, and bootstrap=, the value after that step",
    ),
}
"""Arguments that other libraries have instead of `core.episodes.EpisodeBounds`, and what to give."""


def require_tensors(**arguments: object) -> None:
    """Raise `TypeError` for the first argument that is neither a tensor nor None."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} is of type {type(value).__name__}; give a tensor, torch.tensor({name})")


def require_rows(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless `tensor` is [batch, time]."""
    require_tensors(**{name: tensor})
    if tensor.dim() != 2:
        advice = f"; for a single row give {name}.unsqueeze(0)" if tensor.dim() == 1 else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [batch, time]{advice}")


def require_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise `ValueError` unless `tensor` has exactly this `shape`."""
    require_tensors(**{name: tensor})
    if tuple(tensor.shape) != tuple(shape):
        advice = f"; give {name}.unsqueeze(0)" if (1, *tensor.shape) == tuple(shape) else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(shape)}{advice}")


def require_flags(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise `ValueError` unless `tensor` is a bool tensor of this `shape`.

    Integers are rejected because `~` is bitwise on them: `~1` is −2, which is true.
    """
    require_shape(name, tensor, shape)
    if tensor.dtype != torch.bool:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be torch.bool")


def refuse_time_first(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise `ValueError` where the size of `tensor` shows that rewards of this `shape` are [time, env].

    `bootstrap` has one number per column then, and the others one row more than there are steps.
    """
    require_tensors(**{name: tensor})
    rows, columns = shape
    last = ((columns,), (1, columns)) if rows not in (1, columns) else ()
    if tuple(tensor.shape) in (last if name == "bootstrap" else ((rows + 1, columns),)):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and rewards {(rows, columns)}, which looks like [time, env]; all "
            "must be [batch, time]: give rewards.T, and the others as "
            f"{pages_by_title('docs/names.md')} shows for CleanRL's buffers"
        )


def require_fraction(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` is one number in [0, 1]. NaN is not."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} is a tensor of shape {list(value.shape)}; it must be one number in [0, 1]")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def require_positive(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` is above 0 and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be above 0 and finite")


def require_not_negative(name: str, value: float) -> None:
    """Raise `ValueError` unless `value` is at least 0 and finite."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be at least 0 and finite")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    allowed = list(choices)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it may be {', '.join(allowed)}")


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if `tensor` holds NaN or an infinity."""
    # NaN and infinities propagate into the sum, so one cheap pass clears nearly every tensor. A sum of large finite
    # numbers may overflow too, hence the second check.
    if not math.isfinite(tensor.sum().item()) and not bool(torch.isfinite(tensor).all()):
        where = tuple((~torch.isfinite(tensor)).nonzero()[0].tolist())
        raise ValueError(f"{name} is {tensor[where].item()} at {where}; it must be finite wherever the policy acted")


def require_acted(mask: Tensor) -> None:
    """Raise `ValueError` if a row of `mask` [batch, time] has no acted step."""
    empty = empty_rows(mask)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"mask has no acted step in row {row}; every row must have at least one")


def empty_rows(mask: Tensor) -> Tensor:
    """True for the rows of `mask` [batch, time] that have no acted step."""
    require_tensors(mask=mask)
    return mask.view(torch.uint8).amax(dim=-1) == 0


def refuse_foreign(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with `FOREIGN` arguments answered by name."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in FOREIGN:
                raise TypeError(f"{name} is not an argument of the estimators; give {pages_by_title(FOREIGN[name])}")
        return function(*args, **kwargs)

    return checked
