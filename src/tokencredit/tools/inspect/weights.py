"""How far training moved each matrix of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.tools.inspect.parts import Parts


class Change(NamedTuple):
    """The change of a parameter matrix."""

    name: str
    relative_norm: float
    """Frobenius norm of the change over that of the base's matrix; 1 if that is 0 and changed."""
    effective_rank: float | None
    """Of the change; None if nothing changed."""
    parameters: int


def effective_rank(matrix: Tensor) -> float | None:
    """exp of the entropy of a matrix's normalised singular values (Roy & Vetterli 2007); None for a zero matrix.

    The singular values are roots of the eigenvalues of the smaller Gram matrix, in float64: singular values below
    1e-8 of the largest count as 0.
    """
    wide = matrix.double()
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    values = torch.linalg.eigvalsh(wide @ wide.T).clamp(min=0).sqrt()
    values = values[values > 1e-8 * values.max()]
    if not len(values):
        return None
    share = values / values.sum()
    return float((-(share * share.log()).sum()).exp())


@torch.no_grad()
def changes(base: Parts, tuned: Parts) -> list[Change]:
    """The change of each parameter with two dimensions, from the embedding up; tied matrices count once."""
    before = dict(base.lm.named_parameters())
    result = []
    for name, after in tuned.lm.named_parameters():
        if after.dim() != 2:
            continue
        difference = after.float() - before[name].float()
        norm, size = float(difference.norm()), float(before[name].float().norm())
        relative = norm / (size or norm or 1.0)
        rank = effective_rank(difference) if norm else None
        result.append(Change(_title(tuned, name), relative, rank, after.numel()))
    return result


def unchanged(base: Parts, tuned: Parts) -> bool:
    """True if the two models have the same weights."""
    before = dict(base.lm.named_parameters())
    return all(torch.equal(x, before[name]) for name, x in tuned.lm.named_parameters())


def _title(parts: Parts, parameter: str) -> str:
    """A parameter's name with its layer in words, such as `layer 2 mlp.c_fc`."""
    module = parameter.removesuffix(".weight")
    for name, x in parts.lm.named_modules():
        number = next((n for n, layer in enumerate(parts.layers, start=1) if layer.block is x), None)
        if number is not None and module.startswith(f"{name}."):
            return f"layer {number} {module.removeprefix(f'{name}.')}"
    return module.rpartition(".")[2]
