"""Modules that an update puts into training mode: those with dropout, and those that compute activations twice.

Training mode on the whole model would switch on more: router jitter, layer drop, rescaled weights. The ratio of an
update would then not begin at 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

DROPOUT = ("dropout", "pdrop", "drop_prob")
"""Parts of the names of dropout rates."""
JITTER = ("jitter", "layerdrop", "layer_drop", "drop_path")
"""Parts of the names of rates of other noise: a router's, and whole layers left out."""


def training_modules(model: nn.Module) -> list[nn.Module]:
    """Modules of a model whose own mode must be training in updates; the others stay in evaluation mode."""
    noisy = (x for x in model.modules() if any(True for y in _family(x) for _ in _rates(y, DROPOUT)))
    return list(dict.fromkeys([*checkpointing_modules(model), *noisy]))


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Layers that compute their activations twice, for which they must be in training mode."""
    # A model around such layers carries the same mark.
    marked = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)]
    return [x for x in marked if not any(y in marked for y in x.modules() if y is not x)]


@contextmanager
def training(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Training mode for these modules, not for what is in them; at the end each has the mode that it had."""
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.training = True
        yield
    finally:
        for module, mode in before:
            module.training = mode


def disable_noise(model: nn.Module, *, dropout: bool) -> None:
    """Set the rates of a model's noise to 0: router jitter and layer drop, and `dropout` too if that is true."""
    for module in model.modules():
        for rates, name in list(_rates(module, DROPOUT + JITTER if dropout else JITTER)):
            rates[name] = 0.0


def _family(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its direct children, whose rates its own functions may read; lists and dicts are looked through."""
    yield module
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield child


def _rates(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module keeps rates above 0: a dict, and the key in it."""
    own = vars(module)
    for name, value in own.items():
        full = type(module).__name__.lower() + ".p" if name == "p" else name  # as in nn.Dropout
        is_rate = any(part in full for part in names)
        if is_rate and isinstance(value, float) and value > 0:
            yield own, name
        elif is_rate and isinstance(value, dict):  # PEFT's, by adapter
            yield from ((value, key) for key, rate in value.items() if isinstance(rate, float) and rate > 0)
