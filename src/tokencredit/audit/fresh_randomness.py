"""Fresh randomness for an environment in the middle of an episode."""

from __future__ import annotations

import gc
import random
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from tokencredit.errors import RunStopped

GENERATOR_TYPES = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
SHARED_TYPES = (type, ModuleType, CodeType, FrameType)
"""Referenced by the environment, but not its own; the search for its RNGs stops there."""


class NotReplayed(RunStopped):
    """An environment diverged in a replay: after a reset with the same seed, and with the same actions or turns."""


def redraw(env: Any, seed: int) -> None:
    """Reseed all RNGs that an environment, its wrappers and spaces reference at any depth.

    Covers NumPy, Python and PyTorch generators, but not global ones or those inside compiled simulators.
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
    """The RNGs that an object references, at any depth."""
    result, visited, stack = [], set(), [root]
    while stack:
        item = stack.pop()
        kind = type(item)
        if id(item) in visited or issubclass(kind, SHARED_TYPES):
            continue
        visited.add(id(item))
        if issubclass(kind, GENERATOR_TYPES):
            result.append(item)
        elif issubclass(kind, FunctionType):  # skips its globals, which belong to a module
            stack += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            stack += gc.get_referents(item)
    return result
