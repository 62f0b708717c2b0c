"""Global RNG state of Python, NumPy and PyTorch, `torch.Generator` states as hex, and PyTorch's modes and defaults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch, from which libraries and user code may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """State of the global generators of Python, NumPy and PyTorch, as plain values; CUDA's once initialised."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (the global generator, which user code may draw from)
    key = {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}
    state = {"python": random.getstate(), "numpy": numpy | {"state": key}, "torch": to_hex(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        state["cuda"] = to_hex(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`, directly or after a JSON round trip."""
    python_version, numbers, gauss = state["python"]
    random.setstate((python_version, tuple(numbers), gauss))
    numpy = dict(state["numpy"])
    numpy["state"] = numpy["state"] | {"key": np.array(numpy["state"]["key"], dtype=np.uint32)}
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(from_hex(state["cuda"]))


def to_hex(state: Tensor) -> str:
    """Encode the state of a PyTorch generator as hex."""
    return bytes(state.tolist()).hex()


def from_hex(text: str) -> Tensor:
    """Decode the result of `to_hex`."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global RNG state of Python, NumPy and PyTorch at the end."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def isolated() -> Iterator[None]:
    """`preserved`, and PyTorch's modes and defaults as in a new process, which the caller may have changed.

    Gradients are on, inference mode and autocast off; tensors are float32 and on the CPU unless they say otherwise.
    """
    dtype = torch.get_default_dtype()
    with preserved(), ExitStack() as modes:
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            modes.callback(torch.set_default_dtype, dtype)
        yield
