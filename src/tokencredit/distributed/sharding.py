"""Sharded modules: weights, gradients and moments split over the processes of a job by PyTorch's `fully_shard` (FSDP2).

A pass through a sharded module is a collective operation: every process must make the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

Result = TypeVar("Result")
WITHIN = "run_within_forward"
"""Method of a sharded module that runs a function between its hooks of a forward pass."""
RESHARDS = "frees_weights_after_forward"
"""Attribute of a sharded module: its gathered weights are freed after each forward pass."""
HOLDS = "holds_gathered_weights"
"""Attribute of a sharded module, true in `gathered`."""
INSIDE = "runs_within_forward"
"""Attribute of a sharded module, true during a call of `within`."""


def is_sharded(module: nn.Module) -> bool:
    """True if `shard` was applied to this module."""
    return isinstance(module, FSDPModule)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without what sharding adds to it."""
    return cast(type[nn.Module], type(module).__bases__[1]) if is_sharded(module) else type(module)


def sharded_in(module: nn.Module) -> list[nn.Module]:
    """The outermost sharded modules of a module, which may be itself."""
    if is_sharded(module):
        return [module]
    return [part for child in module.children() for part in sharded_in(child)]


def shard(module: nn.Module, parts: Iterable[nn.Module], *, reshard_after_forward: bool = True, **options: Any) -> None:
    """Shard a module in place: each of its `parts` is gathered for its own pass, the rest with the module.

    Parts are modules such as layers; none is inside another. With `reshard_after_forward`, gathered weights are freed
    after a forward pass and gathered again in the backward pass. The options are those of `fully_shard`.
    """
    for part in parts:
        if not is_sharded(part):
            fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
    if not is_sharded(module):
        fully_shard(module, reshard_after_forward=reshard_after_forward, **options)
    allow_within(module, reshard_after_forward)


def shard_alike(module: nn.Module, other: nn.Module) -> None:
    """Shard a module in place as another of the same structure, unless that one is whole."""
    if not is_sharded(other):
        return
    parts = [name for name, part in other.named_modules() if is_sharded(part) and part is not other]
    mesh = next(p.device_mesh for p in other.parameters() if isinstance(p, DTensor))
    reshard = bool(getattr(other, RESHARDS))
    shard(module, map(module.get_submodule, parts), reshard_after_forward=reshard, mesh=mesh)


def join_tied(module: nn.Module) -> None:
    """Have each parameter that several modules share gathered, and its gradient reduced, once.

    Transformers ties the parameters of a model that it loads after it has sharded them. FSDP then has such a parameter
    several times, and processes whose part of the rows is smaller would gather old ones after a step.
    """
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state = cast(Any, part)._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            first: dict[nn.Parameter, Any] = {}
            for own in group.fsdp_params:
                info = own._module_info
                kept = first.setdefault(getattr(info.module, info.param_name), own)._module_info
                if kept is not info:
                    kept.shared_modules.append(info.module)
                    kept.shared_param_names.append(info.param_name)
                    own._post_load_hook_handle.remove()  # else it would follow `load_state_dict` alone
            group.fsdp_params = list(first.values())


def allow_within(module: nn.Module, reshard_after_forward: bool = True) -> None:
    """Prepare a module that a library has sharded for `within`."""
    sharded = cast(FSDPModule, module)
    sharded.set_reshard_after_forward(reshard_after_forward)  # by default not of the outermost module
    setattr(module, RESHARDS, reshard_after_forward)
    setattr(module, HOLDS, False)
    setattr(module, INSIDE, False)
    setattr(module, WITHIN, MethodType(_run, module))
    register_fsdp_forward_method(module, WITHIN)


def within(module: nn.Module, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function that reads a module's weights, or passes through parts of it, outside the module's own forward.

    If the module is sharded, its weights outside the parts are gathered during the call, and their gradients reduced
    in the backward pass. Tensors that carry gradients must be in the returned tree. Calls may be nested.
    """
    if not is_sharded(module) or getattr(module, INSIDE) or (getattr(module, HOLDS) and not torch.is_grad_enabled()):
        return function(*args, **kwargs)
    sharded, keeps = cast(FSDPModule, module), not getattr(module, RESHARDS) and not torch.is_grad_enabled()
    if keeps:  # no backward pass follows, which would free the weights
        sharded.set_reshard_after_forward(True)
    try:
        return cast(Result, getattr(module, WITHIN)(function, *args, **kwargs))
    finally:
        if keeps:
            sharded.set_reshard_after_forward(False)


def _run(module: nn.Module, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    setattr(module, INSIDE, True)
    try:
        return cast(Result, _without_views(function(*args, **kwargs)))
    finally:
        setattr(module, INSIDE, False)


def _without_views(result: Any) -> Any:
    """The result of a function with copies of views that carry gradients, on which FSDP's hooks are not safe."""
    if isinstance(result, Tensor):
        return result.clone() if result.requires_grad and result._is_view() else result
    if isinstance(result, list | tuple):
        parts = [_without_views(part) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


@contextmanager
def gathered(*modules: nn.Module | None) -> Iterator[None]:
    """A context in which sharded modules hold all their weights, so that passes without gradients are local.

    Only entering it is collective; passes inside are local. Modules that are None, not sharded or held already stay as
    they are; sharded modules inside a module are held too.
    """
    sharded = [part for module in modules if module is not None for part in sharded_in(module)]
    with ExitStack() as stack:
        for module in sharded:
            if not getattr(module, HOLDS):
                stack.enter_context(_held(module))
        yield


@contextmanager
def _held(module: nn.Module) -> Iterator[None]:
    """A context in which one sharded module holds all its weights."""
    sharded = cast(FSDPModule, module)
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    try:
        with torch.no_grad():
            within(module, lambda: None)  # FSDP's set-up, which must begin at the outermost module
        sharded.set_reshard_after_forward(False)
        for part in parts:
            part.unshard()
        setattr(module, HOLDS, True)
        yield
    finally:
        setattr(module, HOLDS, False)
        sharded.set_reshard_after_forward(getattr(module, RESHARDS))
        for part in parts:
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process; a collective operation if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
