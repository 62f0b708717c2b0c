"""The critic: a value head on the policy's trunk or on a trunk of its own, and the critics that runs have saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.core.losses import histogram_values
from tokencredit.errors import ConfigError
from tokencredit.learn.histogram import HistogramHead
from tokencredit.learn.objective import CriticOutputs
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.parts import fewer_layers, width

HEAD_FILE, TRUNK_FOLDER = "value_head.safetensors", "critic"
"""A saved critic, beside the policy's own files; further ones have a number in the name, from 2."""
LAYERS = "layers"
"""Metadata of a value head's file: the layers of the policy's trunk beneath the states that it reads, if not all."""


class Critic(nn.Module):
    """Values of states, from their hidden states in the policy's trunk or in a trunk of its own."""

    def __init__(
        self, head: nn.Module, trunk: PreTrainedModel | None = None, *, detach: bool = False, tap: int | None = None
    ):
        """Put the parts together.

        Args:
            head: from hidden states `[..., width]` to `[..., 1]`.
            trunk: a model without its output projection; None shares the policy's.
            detach: keep the value loss out of the trunk; one of its own then stays as it is.
            tap: read the states after so many layers of a shared trunk; None for the last ones, normalised.
        """
        super().__init__()
        self.trunk, self.head, self.detach, self.tap = trunk, head, detach, tap
        if trunk is not None and detach:
            trunk.requires_grad_(False)

    @property
    def shared(self) -> bool:
        """True if it reads the policy's trunk."""
        return self.trunk is None

    @property
    def reads_last(self) -> bool:
        """True if it reads the last hidden states of the policy's trunk, which sampling computes."""
        return self.shared and self.tap is None

    @property
    def members(self) -> Sequence[Critic]:
        """Itself, as the one member of an ensemble."""
        return [self]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[...]`, in float32, of the states with these hidden states `[..., width]`.

        The states of a tap are brought to mean 0 and variance 1 over their width: no norm of the trunk's belongs to
        them, and their scale grows with depth and training.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(self._read(hidden)).squeeze(-1)
            return values

    def outputs(self, hidden: Tensor) -> CriticOutputs:
        """The values `[tokens]` of states `[tokens, width]`, and the histograms that they are the means of, if any."""
        if not isinstance(self.head, HistogramHead):
            return CriticOutputs(self(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            histogram = self.head.histogram(self._read(hidden))
            return CriticOutputs(histogram_values(*histogram), histogram)

    def _read(self, hidden: Tensor) -> Tensor:
        """The states as the head reads them, in float32."""
        hidden = (hidden.detach() if self.detach else hidden).float()
        return hidden if self.tap is None else nn.functional.layer_norm(hidden, hidden.shape[-1:])

    def save(self, folder: Path, number: int = 1) -> None:
        """Write head and trunk beside a policy."""
        head, trunk = file_names(number)
        if self.trunk is not None:
            self.trunk.save_pretrained(folder / trunk)
        weights = {key: value.contiguous() for key, value in self.head.state_dict().items()}
        save_file(weights, folder / head, None if self.tap is None else {LAYERS: str(self.tap)})


class Ensemble(nn.Module):
    """Separate critics whose values are averaged; each learns from rows of its own."""

    members: Sequence[Critic]
    shared, tap = False, None

    def __init__(self, members: Sequence[Critic]):
        super().__init__()
        self.members = cast(Any, nn.ModuleList(members))

    def save(self, folder: Path) -> None:
        """Write heads and trunks beside a policy."""
        for number, critic in enumerate(self.members, start=1):
            critic.save(folder, number)


def build_value_head(
    kind: str,
    size: int,
    init: str = "zeros",
    gain: float = 1.0,
    hidden_gain: float = math.sqrt(2),
    bins: int | None = None,
) -> nn.Module:
    """A value head: one layer (`linear`), or two with a hidden width of four times `size` (`mlp`).

    With `bins` it predicts a histogram of returns with so many.

    With `zeros` an untrained critic predicts 0 rather than noise. With `orthogonal` the last layer starts with a row of
    norm `gain`, and a layer before it with orthogonal columns of norm `hidden_gain`; √2 and 1 are the usual choice
    (Huang et al. 2022, "The 37 implementation details of PPO", detail 2). `default` leaves each layer as `nn.Linear`
    makes it.
    """
    last = nn.Linear(size if kind == "linear" else 4 * size, bins or 1)
    layers: list[nn.Module] = [last] if kind == "linear" else [nn.Linear(size, 4 * size), nn.GELU(), last]
    for layer in layers[::2]:
        assert isinstance(layer, nn.Linear)
        if init == "orthogonal":
            nn.init.orthogonal_(layer.weight, gain if layer is last else hidden_gain)
        elif init == "zeros" and layer is last:
            nn.init.zeros_(layer.weight)
        if init == "orthogonal" or (init == "zeros" and layer is last):
            nn.init.zeros_(layer.bias)
    head = last if kind == "linear" else nn.Sequential(*layers)
    return head if bins is None else HistogramHead(head)


def file_names(number: int) -> tuple[str, str]:
    """Names of a saved critic's head and trunk, counted from 1."""
    if number == 1:
        return HEAD_FILE, TRUNK_FOLDER
    return HEAD_FILE.replace(".", f"-{number}.", 1), f"{TRUNK_FOLDER}-{number}"


class SavedCritic(NamedTuple):
    """Where a run saved a critic, beside its policy."""

    name: str
    head: Path
    trunk: Path | None
    """Folder of a separate critic's trunk."""


def saved_critics(name: str) -> list[SavedCritic]:
    """The critics that a run saved in this local folder: none, one, or the members of an ensemble."""
    folder, saved = Path(name).expanduser(), list[SavedCritic]()
    while name and (folder / file_names(len(saved) + 1)[0]).is_file():
        head, trunk = (folder / part for part in file_names(len(saved) + 1))
        saved.append(SavedCritic(name, head, trunk if (trunk / "config.json").is_file() else None))
    return saved


def start_of(args: CriticConfig, model: ModelConfig) -> list[SavedCritic]:
    """The saved critics that a critic starts from: none, one for each member, or one for all.

    Raises:
        ConfigError: there are several, and not as many as members.
    """
    if args.kind == "none" or (args.name is None and args.init != "saved"):
        return []
    saved = saved_critics(args.name or model.name)
    if args.kind == "separate" and len(saved) not in (0, 1, args.members):
        raise ConfigError(
            f"critic.members is {args.members}, and {saved[0].name!r} holds {len(saved)} critics; set it to "
            f"{len(saved)}"
        )
    return saved


def build_critic(
    args: CriticConfig, model: ModelConfig, lm: PreTrainedModel, trunks: Sequence[PreTrainedModel]
) -> tuple[Critic | Ensemble | None, list[str]]:
    """The critic that the configuration asks for, if any, and what there is to say of where it comes from.

    Raises:
        ConfigError: a saved head that cannot be read, or more layers than there are.
    """
    if args.kind == "none":
        return None, []
    tap = None if trunks else fewer_layers(args.layers, lm)
    init = "zeros" if args.init == "saved" else args.init
    bins = args.bins if args.loss == "histogram" else None
    size = width(trunks[0] if trunks else lm) if tap is None else lm.config.get_text_config().hidden_size
    members = []
    for number in range(args.members):
        head = build_value_head(args.head, size, init, args.gain, args.hidden_gain, bins)
        members.append(Critic(head, trunks[number] if trunks else None, detach=args.detach, tap=tap))
    critic = members[0] if len(members) == 1 else Ensemble(members)
    saved = start_of(args, model)
    if not saved or args.init != "saved":
        return critic, []
    name = saved[0].name
    if saved[0].trunk is not None and not trunks:
        return critic, [f"the critic saved in {name} is separate, and critic.kind is shared: a new critic begins"]
    heads = [load_head(saved[min(number, len(saved) - 1)]) for number in range(args.members)]
    newly_cut = bool(trunks) and saved[0].trunk is None and args.layers is not None
    if newly_cut or heads[0].layers != (None if tap is None else str(tap)):
        return critic, [f"the value head saved in {name} is for other layers than critic.layers: a new one begins"]
    if any(shapes(head.weights) != shapes(critic.members[0].head.state_dict()) for head in heads):
        return critic, [
            f"the value head saved in {name} has another form than critic.head and critic.loss give: a new one begins"
        ]
    for member, saved_head in zip(members, heads, strict=True):
        member.head.load_state_dict(saved_head.weights)
    return critic, [f"the critic goes on from the one saved in {name}"]


def shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    """The form of each tensor."""
    return {key: x.shape for key, x in weights.items()}


class SavedHead(NamedTuple):
    """The file of a value head."""

    weights: dict[str, Tensor]
    layers: str | None


def load_head(saved: SavedCritic) -> SavedHead:
    """The value head that a run saved.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(saved.head, framework="pt") as file:
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return SavedHead(weights, (file.metadata() or {}).get(LAYERS))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{saved.head}: {error}; critic.init: zeros begins with a new critic") from error
