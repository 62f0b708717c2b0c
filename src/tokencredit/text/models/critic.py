"""The critic: a value head on the policy's trunk or on a trunk of its own, and the critics that runs have saved."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.loading import check_vocabulary, load_model, load_tokenizer, resolve
from tokencredit.text.models.parts import width
from tokencredit.text.models.peft_models import plain_decoder, saved_config

HEAD_FILE, TRUNK_FOLDER = "value_head.safetensors", "critic"
"""A saved critic, beside the policy's own files."""


class Critic(nn.Module):
    """Values of states, from their last normalised hidden states in the policy's trunk or in a trunk of its own."""

    def __init__(self, head: nn.Module, trunk: PreTrainedModel | None = None, *, detach: bool = False):
        """Put the parts together.

        Args:
            head: from hidden states `[..., width]` to `[..., 1]`.
            trunk: a model without its output projection; None shares the policy's.
            detach: keep the value loss out of the trunk; one of its own then stays as it is.
        """
        super().__init__()
        self.trunk, self.head, self.detach = trunk, head, detach
        if trunk is not None and detach:
            trunk.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[...]`, in float32, of the states with these hidden states `[..., width]`."""
        if self.detach:
            hidden = hidden.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float()).squeeze(-1)
            return values

    def save(self, folder: Path) -> None:
        """Write head and trunk beside a policy."""
        if self.trunk is not None:
            self.trunk.save_pretrained(folder / TRUNK_FOLDER)
        save_file({key: value.contiguous() for key, value in self.head.state_dict().items()}, folder / HEAD_FILE)


def build_value_head(
    kind: str, size: int, init: str = "zeros", gain: float = 1.0, hidden_gain: float = math.sqrt(2)
) -> nn.Module:
    """A value head: one layer (`linear`), or two with a hidden width of four times `size` (`mlp`).

    With `zeros` an untrained critic predicts 0 rather than noise. With `orthogonal` the last layer starts with a row of
    norm `gain`, and a layer before it with orthogonal columns of norm `hidden_gain`; √2 and 1 are the usual choice
    (Huang et al. 2022, "The 37 implementation details of PPO", detail 2). `default` leaves each layer as `nn.Linear`
    makes it.
    """
    last = nn.Linear(size if kind == "linear" else 4 * size, 1)
    layers: list[nn.Module] = [last] if kind == "linear" else [nn.Linear(size, 4 * size), nn.GELU(), last]
    for layer in layers[::2]:
        assert isinstance(layer, nn.Linear)
        if init == "orthogonal":
            nn.init.orthogonal_(layer.weight, gain if layer is last else hidden_gain)
        elif init == "zeros" and layer is last:
            nn.init.zeros_(layer.weight)
        if init == "orthogonal" or (init == "zeros" and layer is last):
            nn.init.zeros_(layer.bias)
    return last if kind == "linear" else nn.Sequential(*layers)


class SavedCritic(NamedTuple):
    """Where a run saved a critic, beside its policy."""

    name: str
    head: Path
    trunk: Path | None
    """Folder of a separate critic's trunk."""


def saved_critic(name: str) -> SavedCritic | None:
    """The critic that a run saved in this local folder; None if there is none."""
    folder = Path(name).expanduser()
    if not name or not (folder / HEAD_FILE).is_file():
        return None
    trunk = folder / TRUNK_FOLDER
    return SavedCritic(name, folder / HEAD_FILE, trunk if (trunk / "config.json").is_file() else None)


def build_trunk(
    args: CriticConfig, model: ModelConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The trunk of a separate critic: a saved critic's, that of `critic.name`, or a copy of the policy's.

    Raises:
        ConfigError: it cannot be loaded, or has another vocabulary: by its tokenizer, or by its size if there is none.
    """
    if args.kind != "separate":
        return None
    saved = saved_critic(args.name or model.name) if args.name is not None or args.init == "saved" else None
    if saved is not None and saved.trunk is not None:
        name, folder = saved.name, str(saved.trunk)
    elif args.name is not None:
        name, folder = args.name, resolve(args.name, "policy")
        if saved_config(folder) is not None:
            raise ConfigError(
                f"critic.name is {args.name!r}, which holds an adapter and no trunk of a critic; give a whole model, "
                "or the policy/ of a run whose critic.kind was separate"
            )
    else:
        return plain_decoder(lm)
    trunk = load_model(AutoModel, name, folder, model)
    check_vocabulary(name, trunk, tokenizer)
    check_same_tokens(name, tokenizer, model)
    return trunk


def check_same_tokens(name: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Make sure that a critic's tokenizer, if its folder has one, has the policy's tokens under the same ids.

    Raises:
        ConfigError: it does not.
    """
    folder = resolve(name, "policy")
    # Of a folder without its files some classes would make an empty tokenizer.
    files = ("tokenizer.json", "tokenizer_config.json")
    if not any(cached_file(folder, file, _raise_exceptions_for_missing_entries=False) for file in files):
        return
    ids = load_tokenizer(replace(model, name=name)).get_vocab()
    others = {token: i for token, i in tokenizer.get_vocab().items() if ids.get(token) != i}
    if others:
        token, i = min(others.items(), key=lambda item: item[1])
        raise ConfigError(
            f"critic.name is {name!r}, whose tokenizer has other ids for {len(others)} of the policy's "
            f"{len(tokenizer)} tokens, such as {ids.get(token)} for {token!r}, which is {i} in the policy; take a "
            "critic with the policy's vocabulary"
        )


def build_critic(
    args: CriticConfig, model: ModelConfig, lm: PreTrainedModel, trunk: PreTrainedModel | None
) -> tuple[Critic | None, list[str]]:
    """The critic that the configuration asks for, if any, and what there is to say of where it comes from.

    Raises:
        ConfigError: a saved head that cannot be read.
    """
    if args.kind == "none":
        return None, []
    init = "zeros" if args.init == "saved" else args.init
    head = build_value_head(args.head, width(trunk or lm), init, args.gain, args.hidden_gain)
    critic, saved = Critic(head, trunk, detach=args.detach), saved_critic(args.name or model.name)
    if saved is None or args.init != "saved":
        return critic, []
    if saved.trunk is not None and trunk is None:
        return critic, [f"the critic saved in {saved.name} is separate, and critic.kind is shared: a new critic begins"]
    try:
        weights = load_file(saved.head)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{saved.head}: {error}; critic.init: zeros begins with a new critic") from error
    if {key: x.shape for key, x in weights.items()} != {key: x.shape for key, x in head.state_dict().items()}:
        return critic, [f"the value head saved in {saved.name} has another form than critic.head: a new one begins"]
    head.load_state_dict(weights)
    return critic, [f"the critic goes on from the one saved in {saved.name}"]
