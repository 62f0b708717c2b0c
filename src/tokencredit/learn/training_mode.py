"""Select the modules that an update puts into training mode: dropout and gradient checkpointing.

Training mode on the whole model would also switch on router jitter, layer drop and rescaled weights. The importance
ratio of an update would then not start at 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

DROPOUT = ("dropout", "pdrop", "drop_prob")
"""Substrings of the names of dropout rates."""
JITTER = ("jitter", "layerdrop", "layer_drop", "drop_path")
"""Substrings of the names of other noise rates: router jitter and layer drop."""


def training_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that need training mode in updates; all others stay in evaluation mode."""
    noisy = (x for x in model.modules() if any(True for y in _family(x) for _ in _rates(y, DROPOUT)))
    return list(dict.fromkeys([*checkpointing_modules(model), *noisy]))


def has_dropout(model: nn.Module) -> bool:
    """True if training mode of the whole model drops activations."""
    return any(True for module in model.modules() for _ in _rates(module, DROPOUT))


def checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    """Layers with gradient checkpointing, which is active only in training mode."""
    # A model that contains such layers carries the same attribute; keep the innermost modules.
    marked = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)]
    return [x for x in marked if not any(y in marked for y in x.modules() if y is not x)]


@contextmanager
def training(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put these modules, not their children, into training mode; restores each mode at the end."""
    before = [(module, module.training) for module in modules]
    try:
        for module, _ in before:
            module.training = True
        yield
    finally:
        for module, mode in before:
            module.training = mode


def disable_noise(model: nn.Module, *, dropout: bool) -> None:
    """Set the noise rates of a model to 0: router jitter, layer drop and, if `dropout`, dropout."""
    for module in model.modules():
        for rates, name in list(_rates(module, DROPOUT + JITTER if dropout else JITTER)):
            rates[name] = 0.0


def _family(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its direct children, whose rates its forward pass may read; descends into lists and dicts."""
    yield module
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield child


def _rates(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Rates above 0 of a module, each as the dict that holds it and its key."""
    own = vars(module)
    for name, value in own.items():
        full = type(module).__name__.lower() + ".p" if name == "p" else name  # as in nn.Dropout
        is_rate = any(part in full for part in names)
        if is_rate and isinstance(value, float) and value > 0:
            yield own, name
        elif is_rate and isinstance(value, dict):  # PEFT's, by adapter
            yield from ((value, key) for key, rate in value.items() if isinstance(rate, float) and rate > 0)
