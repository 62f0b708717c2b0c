"""The critic: a value head on the policy's trunk or on a trunk of its own, and saved critics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from tokencredit.core.losses import histogram_values
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError, naming
from tokencredit.learn.objective import CriticOutputs
from tokencredit.learn.state import trainable
from tokencredit.learn.value_heads import HistogramHead, ScaledHead
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.adapters import CRITIC, AdapterSwitch
from tokencredit.text.models.architecture import cut_layers, layer_limit, trunk_of, width
from tokencredit.text.models.foreign_weights import find_head, head_layer
from tokencredit.text.models.model_loading import (
    as_config_error,
    check_same_ids,
    check_vocabulary,
    load_model,
    load_tokenizer,
    local_folder,
    resolve,
)
from tokencredit.text.models.peft_models import ADAPTER_CONFIG, attached, merge, saved_config
from tokencredit.text.models.precision import dequantise, quantised_layers
from tokencredit.text.models.sharded_loading import Sharding, save_model

HEAD_FILE = "value_head.safetensors"
"""File of a saved critic's head in its folder, which is also the model folder of a trunk of its own."""
BINS = 51
"""Bins of a head with `critic.loss: histogram`."""
LAYERS, FITTED, ACTIVATION = "layers", "fitted", "activation"
"""Metadata keys of a value head's file: the layer of the policy's trunk that it reads, if not the last; that its
outputs are what a fit to scores of prefixes leaves of the values; and the activation of an mlp, if not GELU."""


class Critic(nn.Module):
    """A value head on the hidden states of the policy's trunk or of a trunk of its own."""

    def __init__(
        self,
        head: ScaledHead | HistogramHead,
        trunk: PreTrainedModel | None = None,
        *,
        adapter: AdapterSwitch | None = None,
        detach: bool = False,
        tap: int | None = None,
        fitted: bool = False,
    ):
        """Combine a head and a trunk.

        Args:
            head: maps hidden states `[..., width]` to `[..., 1]`.
            trunk: a model without its output projection; None shares the policy's.
            adapter: the adapters of the policy, one of which makes a trunk of its own of the policy's; None for none.
            detach: keep the gradient of the value loss out of the trunk, which freezes a trunk of its own.
            tap: number of the layer of a shared trunk that is read; None for the last states, after the final norm.
            fitted: its outputs are what a fit to scores of prefixes leaves of the values.
        """
        super().__init__()
        self.about = ({} if tap is None else {LAYERS: str(tap)}) | ({FITTED: "true"} if fitted else {})
        if any(isinstance(layer, nn.ReLU) for layer in head.modules()):
            self.about[ACTIVATION] = "relu"
        self.trunk, self.head, self.detach, self.tap, self.adapter = trunk, head, detach, tap, adapter
        if trunk is not None and detach:
            trunk.requires_grad_(False)

    @property
    def shared(self) -> bool:
        """True if it reads the states of the policy's own pass."""
        return self.trunk is None and self.adapter is None

    def own_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Trainable parameters of its own trunk or adapter, and of its head."""
        below = [] if self.adapter is None else self.adapter.critic_parameters()
        return [*below, *(trainable(self.trunk) if self.trunk is not None else [])], trainable(self.head)

    @property
    def scale(self) -> Tensor | float:
        """The scale of its values in the value loss."""
        return self.head.scale() if isinstance(self.head, ScaledHead) else 1.0

    @property
    def reads_last(self) -> bool:
        """True if it reads the last hidden states of the policy's trunk, which sampling computes."""
        return self.shared and self.tap is None

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[...]` of hidden states `[..., width]`, in float32.

        States of an inner layer are first layer-normalised: the trunk's final norm does not apply to them, and their
        scale grows with depth and training.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(self._read(hidden)).squeeze(-1)
            return values

    def outputs(self, hidden: Tensor) -> CriticOutputs:
        """Values `[tokens]` of states `[tokens, width]`, and their histograms if the head predicts histograms."""
        if not isinstance(self.head, HistogramHead):
            return CriticOutputs(self(hidden), scale=self.scale)
        with torch.autocast(hidden.device.type, enabled=False):
            histogram = self.head.histogram(self._read(hidden))
            return CriticOutputs(histogram_values(*histogram), histogram)

    def _read(self, hidden: Tensor) -> Tensor:
        """The head's input: the states in float32, layer-normalised if they are those of an inner layer."""
        hidden = (hidden.detach() if self.detach else hidden).float()
        return hidden if self.tap is None else nn.functional.layer_norm(hidden, hidden.shape[-1:])

    def save_trunk(self, folder: Path, writes: bool) -> None:
        """Write the trunk, if it has its own, into a critic's folder; see `save_model`."""
        if self.trunk is not None:
            save_model(folder, self.trunk, writes)
        elif self.adapter is not None and writes:
            self.adapter.save_named(folder, CRITIC)

    def save_head(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the head into a critic's folder, and beside a trunk the tokenizer that it reads tokens of."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.trunk is not None:
            tokenizer.save_pretrained(folder)
        weights = {key: value.contiguous() for key, value in self.head.state_dict().items()}
        save_file(weights, folder / HEAD_FILE, self.about or None)


def build_value_head(
    kind: str, size: int, init: str = "zeros", bins: int | None = None, activation: str = "gelu"
) -> ScaledHead | HistogramHead:
    """A value head: one layer (`linear`), or two with a hidden width of four times `size` (`mlp`) and an activation.

    With `bins` it predicts a histogram of returns. With `zeros` an untrained critic predicts 0 rather than noise. With
    `orthogonal` the last layer starts with a row of norm 1, and a layer before it with orthogonal columns of norm √2
    (Huang et al. 2022, "The 37 implementation details of PPO", detail 2).
    `default` keeps the initialization of `nn.Linear`.
    """
    last = nn.Linear(size if kind == "linear" else 4 * size, bins or 1)
    between = nn.ReLU() if activation == "relu" else nn.GELU()
    layers: list[nn.Module] = [last] if kind == "linear" else [nn.Linear(size, 4 * size), between, last]
    for layer in layers[::2]:
        assert isinstance(layer, nn.Linear)
        if init == "orthogonal":
            nn.init.orthogonal_(layer.weight, 1.0 if layer is last else math.sqrt(2))
        elif init == "zeros" and layer is last:
            nn.init.zeros_(layer.weight)
        if init == "orthogonal" or (init == "zeros" and layer is last):
            nn.init.zeros_(layer.bias)
    return ScaledHead(*layers) if bins is None else HistogramHead(last if kind == "linear" else nn.Sequential(*layers))


class SavedCritic(NamedTuple):
    """A critic that a run saved, or the value or score head of another library's model."""

    folder: Path
    trunk: Path | None
    """Its folder if it has a trunk of its own; another library's head reads the trunk that its folder stands for."""
    head: Path
    """The file of its head."""
    layer: str | None
    """The name of another library's head there."""

    @property
    def adapted(self) -> bool:
        """True if it reads the states of an adapter: its own or, with another library's head, its policy's."""
        return (self.folder / ADAPTER_CONFIG).is_file()


def critic_folder(policy: str) -> str:
    """Name of the folder beside a policy's folder that holds its critic: `critic`, or for `best` `best-critic`."""
    return "critic" if policy == "policy" else f"{policy}-critic"


def folder_names(policy: str, critic: Critic | None) -> list[str]:
    """Names of a policy's folder and, if there is a critic, of the critic's."""
    return [policy] if critic is None else [policy, critic_folder(policy)]


def saved_critic(name: str) -> SavedCritic | None:
    """The critic saved in a run's folder, in a critic's or beside a policy's, or a model's own head; None for none.

    Raises:
        ConfigError: a model's head is in a pickle.
    """
    if (path := local_folder(name)) is None:
        return None
    places = (path, path / critic_folder("policy"), path.parent / critic_folder(path.name))
    folder = next((place for place in places if (place / HEAD_FILE).is_file()), None)
    if folder is None:
        found = find_head(path)
        return None if found is None else SavedCritic(path, None, *found)
    layer = head_layer(folder / HEAD_FILE)
    trunk = folder if layer is None and (folder / "config.json").is_file() else None
    return SavedCritic(folder, trunk, folder / HEAD_FILE, layer)


def saved_start(args: CriticConfig, model: ModelConfig) -> SavedCritic | None:
    """The saved critic that a run's critic starts from; None if there is none."""
    if not args.ours or (args.name is None and args.init != "saved"):
        return None
    return saved_critic(args.name or model.name)


def build_critic(
    args: CriticConfig,
    model: ModelConfig,
    lm: PreTrainedModel,
    trunk: PreTrainedModel | None,
    adapter: AdapterSwitch | None = None,
) -> tuple[Critic | None, list[str]]:
    """The configured critic, if any, and notes on its origin.

    It has a trunk of its own, or the policy's with its own `adapter`, or reads the policy's.

    Raises:
        ConfigError: a saved head cannot be read, or `critic.layers` is more than the model has.
    """
    if not args.ours:
        return None, []
    tap = layer_limit(args.layers, lm) if trunk is None else None
    init = "zeros" if args.init == "saved" else args.init
    bins = BINS if args.loss == "histogram" else None
    size = width(trunk or lm) if tap is None else lm.config.get_text_config().hidden_size
    head = build_value_head(args.head, size, init, bins, args.activation)
    fitted = args.prefix_every not in (0, "auto")
    critic = Critic(head, trunk, adapter=adapter, detach=args.detach, tap=tap, fitted=fitted)
    saved = saved_start(args, model)
    if saved is None or args.init != "saved":
        return critic, []
    weights, about = load_head(saved)
    if saved.layer is not None:
        return critic, [begin_with(critic, args, saved, weights)]
    kind_changed = (saved.trunk is not None and trunk is None) or saved.adapted != (adapter is not None)
    newly_cut = saved.trunk is None and trunk is not None and args.layers is not None
    shapes, own = ({key: x.shape for key, x in state.items()} for state in (weights, head.state_dict()))
    if kind_changed or newly_cut or about != critic.about or shapes != own:
        parts = "critic.kind, critic.layers, critic.head, critic.activation, critic.loss and critic.prefix_every"
        return critic, [f"the critic saved in {saved.folder} does not match {parts}: starting a new one"]
    head.load_state_dict(weights)
    return critic, [f"the critic continues from the one saved in {saved.folder}"]


def begin_with(critic: Critic, args: CriticConfig, saved: SavedCritic, weights: Mapping[str, Tensor]) -> str:
    """Start a critic with the values of another library's head, of one linear layer; returns a note.

    An mlp computes the same values with two of its units: f(x) − f(−x) = x for GELU and ReLU.
    """
    weight, head = weights[f"{saved.layer}.weight"].float(), critic.head
    what = f"{saved.layer}.weight {list(weight.shape)} of {saved.head}"
    size = next(layer for layer in head.modules() if isinstance(layer, nn.Linear)).in_features
    fitted = FITTED in critic.about
    obstacles = {
        "it has several outputs, and a value is one": weight.shape[0] != 1,
        f"the states here are of width {size}": weight.shape[-1] != size,
        "critic.loss is histogram": not isinstance(head, ScaledHead),
        f"critic.layers is {args.layers}, and it reads all": args.layers is not None,
        "the critic learns what the reward's prefix scores leave; set critic.prefix_every: 0 to take it": fitted,
    }
    if reasons := [reason for reason, holds in obstacles.items() if holds]:
        return f"{what} is not taken as value head: {'; '.join(reasons)}; starting a new one"
    assert isinstance(head, ScaledHead)
    first, last = head[0], head[-1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        if first is last:
            first.weight.copy_(weight)
        else:
            first.weight[:2], first.bias[:2] = torch.cat([weight, -weight]), 0.0
            last.weight.zero_()[0, :2] = torch.tensor([1.0, -1.0])
        last.bias.copy_(weights.get(f"{saved.layer}.bias", torch.zeros(1)))
    head.keep_values()
    return f"the critic begins with the values of {what}"


def load_head(saved: SavedCritic) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights of a saved critic's head, and its `about`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(saved.head, framework="pt") as file:
            of_head = f"{saved.layer}." if saved.layer else ""
            weights = {key: file.get_tensor(key) for key in file.keys() if key.startswith(of_head)}  # noqa: SIM118
            about = file.metadata() or {}
            return weights, {name: about[name] for name in (LAYERS, FITTED, ACTIVATION) if name in about}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{saved.head}: {error}; set critic.init: zeros to start a new critic") from error


def build_trunk(
    args: CriticConfig,
    model: ModelConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sharding: Sharding | None = None,
) -> PreTrainedModel | None:
    """The trunk of a separate critic: a saved one, the one of `critic.name`, or the policy's copied; else None.

    Raises:
        ConfigError: it cannot be loaded, has another vocabulary (by its tokenizer or, without one, by its size), has
            other layers than `critic.layers`.
    """
    if args.kind != "separate" or args.lora.rank:
        return None
    name, saved = args.name or model.name, saved_start(args, model)
    own, key = None if saved is None else saved.trunk, "model.name" if args.name is None else "critic.name"
    if saved is not None and saved.adapted and saved.layer is None:
        raise ConfigError(
            f"the critic saved in {saved.folder} is an adapter; set critic.lora.rank or, for a new critic, "
            f"{args.start_anew}"
        )
    if own is None and args.name is None:
        trunk = copied_trunk(lm, model, sharding)
    else:
        with naming(key):
            loaded = None if own is None else load_saved_trunk(own, lm, model, sharding)
            trunk = loaded or load_trunk(name, saved, model, sharding)
            check_vocabulary(str(own or name), trunk, tokenizer, "give a model with the policy's vocabulary")
            check_tokenizer(f"{key} is {name!r}", str(own or name), model, tokenizer)
    count = trunk.config.get_text_config().num_hidden_layers
    if own is not None and args.layers not in (None, count):
        raise ConfigError(
            f"critic.layers is {args.layers}, and the critic saved in {str(own)!r} has {count} layers; leave it out"
        )
    if (layers := layer_limit(args.layers, trunk)) is not None:
        cut_layers(trunk, layers)
    return trunk


def check_tokenizer(what: str, place: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` unless the tokenizer in a critic's folder, if it has one, is the policy's."""
    # A critic's folder may lack a tokenizer, from which some classes would make an empty one.
    files = ("tokenizer.json", "tokenizer_config.json")
    if any(cached_file(resolve(place), file, _raise_exceptions_for_missing_entries=False) for file in files):
        check_same_ids(what, load_tokenizer(replace(model, name=place)), tokenizer)


def copied_trunk(lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None) -> PreTrainedModel:
    """A copy of the policy's trunk, with its adapter merged if it has one; a sharded one is loaded again."""
    adapted = attached(lm) is not None
    if sharding is None or not is_sharded(lm):
        if adapted or not quantised_layers(lm):
            return trunk_of(merge(deepcopy(lm))) if adapted else deepcopy(trunk_of(lm))
        dense = deepcopy(lm)
        dequantise(dense)
        return trunk_of(dense)
    if adapted:
        raise ConfigError(
            f"run.shard is full, and a separate critic would begin as {model.name!r} with its adapter merged; with "
            "sharded weights give a full model as critic.name, or set run.shard: none"
        )
    return load_model(AutoModelForCausalLM, model.name, resolve(model.name), model, sharding, trunk=True)


def load_trunk(
    name: str, saved: SavedCritic | None, model: ModelConfig, sharding: Sharding | None = None
) -> PreTrainedModel:
    """Load the trunk of a model by name; `saved` is the critic that was found by that name, a head alone."""
    found = local_folder(name)
    if saved is not None and found and not any((found / x).is_file() for x in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(
            f"critic.name is {name!r}, and the critic in {saved.folder} has no trunk of its own, since its critic.kind "
            "was shared; give the policy that it belongs to, RUN/policy"
        )
    folder = resolve(name)
    if saved_config(folder) is not None:
        raise ConfigError(
            f"critic.name is {name!r}, which holds an adapter instead of a critic's trunk; give a full model, "
            "or a run whose critic.kind was separate"
        )
    return load_model(AutoModel, name, folder, model, sharding)


def load_saved_trunk(
    folder: Path, lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None = None
) -> PreTrainedModel:
    """Load the trunk in a critic's folder."""
    # AutoModel would load a wrapper around trunks such as OPT's.
    trunk_class = type(trunk_of(lm))
    with as_config_error(f"a critic from {str(folder)!r}"):
        config, _ = PreTrainedConfig.get_config_dict(folder)
    auto = trunk_class if trunk_class.__name__ in (config.get("architectures") or ()) else AutoModel
    return load_model(auto, str(folder), str(folder), model, sharding)
