"""Optimisers, learning-rate schedules and gradient clipping."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tokencredit.core.argument_checks import require_choice, require_fraction, require_positive

ParamGroup = dict[str, Any]
"""`params` and what differs from the defaults, such as `lr` and `weight_decay`."""


def build_optimizer(
    groups: Sequence[ParamGroup], name: str = "adamw", *, hidden: Iterable[Tensor] = (), eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Build AdamW, or Muon for the hidden matrices with AdamW for everything else.

    AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101), in PyTorch's fused form. Muon: Jordan et al. 2024
    (https://kellerjordan.github.io/posts/muon/), as `torch.optim.Muon`, its step scaled to the size of AdamW's (Liu et
    al. 2025, arXiv 2502.16982, eq. 4), so that one learning rate serves both.

    Args:
        groups: dicts of `params` (tensors), `lr` and, if it is not 0, `weight_decay`.
        name: "adamw" or "muon".
        hidden: the matrices for Muon, see `hidden_matrices`; each keeps the `lr` and `weight_decay` of its group.
        eps: AdamW's epsilon.

    Raises:
        ValueError: unknown name; "muon" without a hidden matrix.
    """
    require_choice("optimizer", name, ("adamw", "muon"))
    groups = [
        {"weight_decay": 0.0, "initial_lr": group["lr"], **group, "params": list(group["params"])} for group in groups
    ]
    groups = [part for group in groups for part in _apart(group)]
    if name == "adamw":
        return torch.optim.AdamW(groups, eps=eps, fused=_can_fuse(groups))
    chosen = {id(parameter) for parameter in hidden}
    matrices = _only(groups, lambda parameter: id(parameter) in chosen)
    others = _only(groups, lambda parameter: id(parameter) not in chosen)
    if not matrices:
        raise ValueError("hidden has no matrix that is in a group; muon needs one, such as hidden_matrices(model)")
    return MuonAdamW(matrices, others, eps=eps)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer.

    Both work on the parameter groups and the state of this object, so that schedules and checkpoints see one
    `Optimizer` with one state dict of the usual form. Muon's groups come first.

    Muon orthogonalises whole matrices. A sharded one is gathered for its step, one matrix at a time, and every process
    computes the same step, so that it is exactly that of an unsharded matrix.
    """

    def __init__(self, matrices: Sequence[ParamGroup], others: Sequence[ParamGroup], *, eps: float = 1e-8) -> None:
        self._parts: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")]
        if others:
            self._parts.append(torch.optim.AdamW(others, eps=eps, fused=_can_fuse(others)))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, *others = self._parts
        for group in muon.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_whole(group, parameter)
        # The matrices that are not sharded: Muon leaves those without a gradient.
        sharded = [p for group in muon.param_groups for p in group["params"] if isinstance(p, DTensor)]
        gradients = [parameter.grad for parameter in sharded]
        for parameter in sharded:
            parameter.grad = None
        muon.step()
        for parameter, gradient in zip(sharded, gradients, strict=True):
            parameter.grad = gradient
        for part in others:
            part.step()
        return loss

    @torch.no_grad()
    def _step_whole(self, group: ParamGroup, parameter: DTensor) -> None:
        """Take Muon's step with a sharded matrix; gathering it is collective."""
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        whole = nn.Parameter(parameter.full_tensor())
        whole.grad = gradient.full_tensor()
        muon = torch.optim.Muon([{**group, "params": [whole]}], adjust_lr_fn="match_rms_adamw")
        if parameter in self.state:
            muon.state[whole] = {name: x.full_tensor() for name, x in self.state[parameter].items()}
        muon.step()
        parameter.copy_(_like(whole.detach(), parameter))
        self.state[parameter] = {name: _like(x, parameter) for name, x in muon.state[whole].items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict()`."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Scale each group's initial learning rate by a factor; returns the rates by the groups' `metric`, default `lr`.

    PyTorch's LambdaLR does the same, but adds state that a run does not need, since it knows its iteration.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return {group.get("metric", "lr"): group["lr"] for group in optimizer.param_groups}


def hidden_matrices(model: nn.Module, exclude: Iterable[Tensor] = ()) -> list[nn.Parameter]:
    """The parameters that Muon is meant for: matrices inside the network.

    All two-dimensional parameters with a gradient, except embeddings, single rows or columns (a value head's last
    layer), and those in `exclude`: pass the output projection there if it is not tied to the embedding.
    """
    excluded = {id(parameter) for parameter in exclude}
    excluded |= {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and min(p.shape) > 1]
    return [parameter for parameter in matrices if id(parameter) not in excluded]


def schedule(name: str, *, warmup: int = 0, total: int = 0, final_scale: float = 0.0) -> Callable[[int], float]:
    """Learning-rate factor as a function of the step, counted from 0, for `set_rates` or PyTorch's LambdaLR.

    Steps 0 … warmup − 1 ramp up: (step + 1) / (warmup + 1), so that no step is wasted on a rate of 0. Then, with
    progress q from 0 at the end of the warm-up to 1 at `total`, where it stays:

    - "constant": 1
    - "linear": 1 − (1 − final_scale) q
    - "cosine": final_scale + (1 − final_scale) (1 + cos πq) / 2, Loshchilov and Hutter 2017 (arXiv 1608.03983), eq. 5

    Raises:
        ValueError: unknown name, a negative warm-up, a total that is not above the warm-up, a scale outside [0, 1].
    """
    require_choice("schedule", name, ("constant", "linear", "cosine"))
    require_fraction("final_scale", final_scale)
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}; it must be at least 0")
    if name != "constant" and total <= warmup:
        raise ValueError(f"total is {total}; it must be above warmup, which is {warmup}")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if name == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        remaining = 1 - progress if name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return final_scale + (1 - final_scale) * remaining

    return factor


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None, kind: str = "l2") -> Tensor:
    """Clip the global gradient norm, `l2` or `max` (L∞), to `max_norm`, above 0; None only measures.

    Returns the norm before clipping, a scalar on the parameters' device; NaN or infinite if a gradient is.
    """
    parameters = list(parameters)
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    norm = _norm(parameters, math.inf if kind == "max" else 2.0)
    if max_norm is not None:
        require_positive("max_norm", max_norm)
        nn.utils.clip_grads_with_norm_(plain, max_norm, norm)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().mul_(factor)
    # Without gradients PyTorch returns a 0 on the CPU, whatever the parameters' device.
    return norm.to(parameters[0].device) if parameters else norm


def _norm(parameters: Iterable[Tensor], order: float) -> Tensor:
    """The global gradient norm of this order; of sharded gradients over all processes, which is collective."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [x for x in gradients if isinstance(x, DTensor)]
    # Parts without elements, such as those of a small parameter in some processes, have no largest one.
    norm = nn.utils.get_total_norm([x for x in gradients if not isinstance(x, DTensor) and x.numel()], order)
    if not sharded:
        return norm
    mesh = sharded[0].device_mesh
    local = [x.to_local() for x in sharded]
    own = nn.utils.get_total_norm([x for x in local if x.numel()], order).to(local[0])
    everywhere = DTensor.from_local(own.view(1), mesh, [Shard(0)]).full_tensor()
    total: Tensor = torch.linalg.vector_norm(torch.cat([everywhere, norm.to(own.device).view(1)]), order)
    return total


def _like(whole: Tensor, parameter: DTensor) -> DTensor:
    """This process's part of a tensor that all processes hold, sharded like a parameter."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _apart(group: ParamGroup) -> list[ParamGroup]:
    """A group, or two if it has sharded and other parameters, which no operation of PyTorch takes together."""
    kinds = [[p for p in group["params"] if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    return [{**group, "params": kind} for kind in kinds if kind] or [group]


def _only(groups: Iterable[ParamGroup], keep: Callable[[Tensor], bool]) -> list[ParamGroup]:
    """The groups reduced to the parameters that `keep` accepts; empty groups are dropped."""
    kept = [{**group, "params": [p for p in group["params"] if keep(p)]} for group in groups]
    return [group for group in kept if group["params"]]


def _can_fuse(groups: Iterable[ParamGroup]) -> bool:
    """True if PyTorch's fused AdamW accepts every parameter."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps", "xpu") for p in parameters)
