"""The random generators of an environment, wherever it holds them."""

from __future__ import annotations

import gc
import random
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
OUTSIDE = (type, ModuleType, CodeType, FrameType)
"""Not the environment's own, though it refers to them."""


def redraw(env: Any, seed: int) -> None:
    """Seed all generators that an environment, its wrappers and spaces refer to at any depth.

    NumPy's, Python's and PyTorch's are found; those inside compiled simulators are not, nor are global ones.
    """
    for number, generator in enumerate(generators(env)):
        seeds = np.random.SeedSequence([seed, number])
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(seeds).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seeds.generate_state(4))
        elif isinstance(generator, random.Random):
            generator.seed(int(seeds.generate_state(1, np.uint64)[0]))
        else:
            generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))


def generators(root: Any) -> list[Any]:
    """The generators that an object refers to, at any depth."""
    found, seen, waiting = [], set(), [root]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if id(item) in seen or issubclass(kind, OUTSIDE):
            continue
        seen.add(id(item))
        if issubclass(kind, KINDS):
            found.append(item)
        elif issubclass(kind, FunctionType):  # not its globals, which are a module's
            waiting += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            waiting += gc.get_referents(item)
    return found
