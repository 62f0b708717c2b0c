"""Load language models sharded, so that no process ever holds a whole one, and shard models that are whole already.

Transformers before `fsdp_plan` loads a model whole in each process, which then keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, PreTrainedModel

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import allow_within, is_sharded, join_tied, shard, whole
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import safetensors_errors
from tokencredit.settings.model import ModelConfig, ShardingConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.architecture import layer_lists, trunk_of

GATHERED_ALONE = "free_full_weight"
"""Transformers' name for a module whose weights are gathered for its own pass and freed after it."""


class ShardingPlan(dict[str, str]):
    """A sharding plan that replaces a model's own, where Transformers would merge the two."""

    def __ror__(self, other: dict[str, str]) -> dict[str, str]:  # type: ignore[override]
        return dict(self)


@dataclass(frozen=True)
class Sharding:
    """How the models of a run are sharded over the processes of its job; frozen ones may be offloaded."""

    settings: ShardingConfig
    processes: Processes
    frozen: bool = False

    @classmethod
    def of(cls, args: PPOConfig, processes: Processes) -> Sharding | None:
        """The sharding of a run; None if `run.shard` is none, or if there is one process, which holds everything.

        Raises:
            ConfigError: a setting does not work with `run.shard`.
        """
        if args.run.shard == "none":
            return None
        if args.sharding.offload == "frozen" and processes.device.type == "cpu":
            raise ConfigError("sharding.offload is frozen, and this run is on a CPU already; leave it out")
        if processes.count == 1:
            return None
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type != processes.device.type:
            raise ConfigError(
                f"run.shard is full, and this job is on the {processes.device.type} (ACCELERATE_USE_CPU) of a machine "
                f"with {accelerator.type}, where Transformers would shard; hide that too (CUDA_VISIBLE_DEVICES=)"
            )
        return cls(args.sharding, processes)

    def of_frozen(self) -> Sharding:
        """The same for models that are not trained."""
        return replace(self, frozen=True)

    def options(self, kind: Any, folder: str, args: ModelConfig, *, trunk: bool = False) -> dict[str, Any]:
        """Arguments of `kind.from_pretrained(folder)` that load a model sharded; none where it is loaded whole.

        `kind` is an Auto class, or the model's own. With `trunk` the rest of the model is dropped, and not sharded.
        """
        if (with_plan := distributed_config()) is None:
            return {}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                skeleton = kind(config)
            else:
                skeleton = kind.from_config(config, trust_remote_code=args.trust_remote_code)
        names = self.names(skeleton)
        if trunk:
            names = [*names, _name_of(skeleton, trunk_of(skeleton))]
        plan = ShardingPlan(dict.fromkeys(names, GATHERED_ALONE))
        offload = {"fsdp_cpu_offload": True} if self.offloads else {}
        return {"distributed_config": with_plan(fsdp_size=self.processes.count, fsdp_plan=plan, **offload)}

    @property
    def offloads(self) -> bool:
        """True if the models are kept on the CPU between their passes."""
        return self.frozen and self.settings.offload == "frozen"

    def names(self, model: PreTrainedModel) -> list[str]:
        """Names of the modules that are gathered one at a time, with * for a number."""
        names = self.layers_of(model) if self.settings.layers is None else named(model, self.settings.layers)
        check_untied(model, names)
        return names

    def layers_of(self, model: PreTrainedModel) -> list[str]:
        """The name of the model's own layers, with * for their number."""
        trunk = model if model.get_output_embeddings() is None else trunk_of(model)
        lists = layer_lists(trunk)
        if len(lists) != 1:
            raise ConfigError(
                f"run.shard is full, and {type(model).__name__} has no single list of its layers; name the modules "
                "to gather one at a time in sharding.layers, such as [model.layers.*]"
            )
        return [".".join(filter(None, [_name_of(model, trunk), lists[0][0], "*"]))]

    def prepare(self, model: PreTrainedModel) -> None:
        """Prepare a model, or a trunk, that was loaded with `options`: one that was loaded whole is sharded now."""
        if is_sharded(model):
            join_tied(model)
            # Loaded weights are views of a mapping of the whole file, whose pages would stay in memory.
            model._apply(torch.clone)
            allow_within(model, self.settings.reshard_after_forward)
        else:
            self.apply(model)

    def apply(self, model: PreTrainedModel) -> None:
        """Shard a model that is whole in every process, in place, unless it is sharded; adapters stay whole."""
        if is_sharded(model):
            return
        names, own = self.names(model), set(getattr(model, "peft_config", ()))
        parts = [module for name, module in model.named_modules() if {name, wildcard(name)} & set(names)]
        adapters = {p for name, p in model.named_parameters() if own & set(name.split("."))}
        offload = {"offload_policy": CPUOffloadPolicy()} if self.offloads else {}
        reshard = self.settings.reshard_after_forward
        shard(model, parts, reshard_after_forward=reshard, ignored_params=adapters, **offload)
        if (with_plan := distributed_config()) is not None:  # with which `save_pretrained` gathers weights
            plan = ShardingPlan(dict.fromkeys(names, GATHERED_ALONE))
            model.config.distributed_config = with_plan(fsdp_size=self.processes.count, fsdp_plan=plan)


def save_model(folder: Path, model: PreTrainedModel, writes: bool) -> None:
    """Write a model's folder; of a sharded model every process calls this, and one of them `writes`.

    That one gathers all weights in the memory of its CPU.
    """
    if not is_sharded(model):
        if writes:
            model.save_pretrained(folder)
        return
    tensors: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for x in state.values():
        if id(x) not in tensors:  # tied ones stay so
            gathered = whole(x.detach())
            tensors[id(x)] = gathered.cpu() if writes else x
    with Processes().agreed(OSError), safetensors_errors(folder):  # others would begin to gather the next model
        if not writes:
            return
        sharded = vars(model.config).pop("distributed_config", None)  # or Transformers would gather them again
        try:
            model.save_pretrained(folder, state_dict={name: tensors[id(x)] for name, x in state.items()})
        finally:
            model.config.distributed_config = sharded


def distributed_config() -> Any:
    """Transformers' `DistributedConfig`; None in versions without `fsdp_plan`, which load models whole."""
    try:
        from transformers import DistributedConfig
    except ImportError:
        return None
    return DistributedConfig if "fsdp_plan" in signature(DistributedConfig).parameters else None


def named(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The names, with * for a number, without a prefix that only the whole model has; `ConfigError` for no module's."""
    known = {name for module, _ in model.named_modules() for name in (module, wildcard(module)) if name}
    matches = []
    for name in names:
        parts = name.split(".")
        match = next((x for start in range(len(parts)) if (x := ".".join(parts[start:])) in known), None)
        if match is None:
            lists = sorted(x for x in known if x.endswith(".*"))
            raise ConfigError(
                f"sharding.layers has {name!r}, which names no module of {type(model).__name__}; there are lists of "
                f"modules such as {', '.join(lists)}"
            )
        matches.append(match)
    return matches


def check_untied(model: nn.Module, names: Iterable[str]) -> None:
    """Check that the modules of these names, with * for a number, share no weights with each other or with the rest.

    Raises:
        ConfigError: one does; its weights cannot be gathered both with it and with the rest.
    """
    wanted, owners = set(names), dict[nn.Parameter, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        parents = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]
        owner = next((parent for parent in parents if {parent, wildcard(parent)} & wanted), "")
        for parameter in module.parameters(recurse=False):
            other = owners.setdefault(parameter, owner)
            if other != owner:
                raise ConfigError(
                    f"run.shard is full, and {wildcard(name)} of {type(model).__name__} shares its weights with "
                    f"another module, so {wildcard(owner or other)} cannot be gathered alone; name modules without it "
                    "in sharding.layers"
                )


def _name_of(model: nn.Module, part: nn.Module) -> str:
    """The name of a module inside a model; empty for the model itself."""
    return next(str(name) for name, module in model.named_modules() if module is part)


def wildcard(name: str) -> str:
    """A module's name with * for each number, as in Transformers' plans."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
