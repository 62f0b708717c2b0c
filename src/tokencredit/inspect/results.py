"""All readings of a pair of models on one text, as in inspect.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.inspect import answer, attribution, lens, patching, weights
from tokencredit.inspect.attention import attention_from, input_gradient
from tokencredit.inspect.parts import Part, Parts
from tokencredit.inspect.question import Question, choose
from tokencredit.inspect.recording import Record, record
from tokencredit.text.models.critic import Critic, Ensemble

MOVED = 10
"""Tokens listed by how far their probability rose or fell."""
NORM = (
    "the final norm's scale is frozen at its value for this state, in each model its own; a layer norm also centres "
    "each part, an RMS norm does not; the norm's bias and the output projection's bias are the part 'bias'"
)


@dataclass(frozen=True)
class Pair:
    """Two models of the same shape, and the text on which they are compared."""

    name: str
    """Name of the tuned model in messages."""
    base: Parts
    tuned: Parts
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    """Token ids `[time]` of prompt and completion."""
    prompt_length: int

    def __post_init__(self) -> None:
        shapes = [{key: x.shape for key, x in parts.lm.named_parameters()} for parts in (self.base, self.tuned)]
        if shapes[0] != shapes[1] or self.base.heads != self.tuned.heads:
            raise ConfigError(
                f"the model to compare with has other shapes than {self.name!r} (layers, heads, width or vocabulary); "
                "--against needs a model of the same architecture and size"
            )

    @property
    def positions(self) -> list[int]:
        """Positions that predict the completion's tokens."""
        return list(range(self.prompt_length - 1, len(self.ids) - 1))

    def texts(self, ids: Sequence[int] | Tensor) -> list[str]:
        """The text of each token."""
        return [str(self.tokenizer.decode([int(i)])) for i in ids]


def compare(
    pair: Pair,
    up: Sequence[int] = (),
    down: Sequence[int] = (),
    others: Sequence[Tensor] = (),
    critic: Critic | Ensemble | None = None,
) -> dict[str, Any]:
    """All readings of a pair of models, from `tokens` to `weights` in inspect.json.

    Args:
        pair: the models and the text.
        up: token ids of the question's first set; empty to choose them.
        down: those of the second set.
        others: token ids of further texts of the tuned model; the means of ablation are over these and the text.
        critic: the tuned model's critic, if it has one.
    """
    models = (pair.base, pair.tuned)
    seen = (record(pair.name, pair.base, pair.ids), record(pair.name, pair.tuned, pair.ids))
    at = torch.tensor(pair.positions, device=pair.ids.device)
    with torch.no_grad():
        base, tuned = (parts.logprobs(x.normed[at]) for parts, x in zip(models, seen, strict=True))
    question = choose(base, tuned, pair.positions[0], up, down)
    direct = tuple(
        attribution.attribute(parts, x, question.position, question.up, question.down)
        for parts, x in zip(models, seen, strict=True)
    )
    odds = [
        float(attribution.log_odds(parts, x.states[-1][question.position], question.up, question.down))
        for parts, x in zip(models, seen, strict=True)
    ]
    patched, numbers = _patching(pair, seen[1], question, (direct[0], direct[1]), odds, others)
    words, same = (pair.texts(question.up), pair.texts(question.down)), weights.unchanged(*models)
    row = question.position - pair.positions[0]
    result: dict[str, Any] = rounded(
        {
            "tokens": pair.texts(pair.ids),
            "prompt_length": pair.prompt_length,
            "question": {
                "up": words[0],
                "down": words[1],
                "source": question.source,
                "base": odds[0],
                "tuned": odds[1],
                "change": odds[1] - odds[0],
                "position": question.position,
            },
            "answer": answer.record(numbers, answer.sentence(numbers, *words, same)),
            "lens": _lens(pair, seen),
            "attribution": _attribution((direct[0], direct[1]), odds),
            "patching": patched,
            "attention": _attention(pair, question),
            "critic": None if critic is None else _critic(pair, critic),
            "weights": {
                "modules": [x._asdict() for x in weights.changes(*models)],
                **_moved(pair, base[row].exp(), tuned[row].exp()),
            },
        }
    )
    return result


def _lens(pair: Pair, seen: tuple[Record, Record]) -> dict[str, Any]:
    """The logit lens."""
    read = lens.logit_lens((pair.base, pair.tuned), seen, pair.positions, pair.ids)
    sides = {}
    for side, name in enumerate(("base", "tuned")):
        sides[name] = {
            "token": [pair.texts(row) for row in read.tokens[side]],
            "probability": read.probabilities[side].tolist(),
            "rank": read.ranks[side].tolist(),
        }
    return {"layers": _layers(len(read.kl)), "positions": pair.positions, **sides, "kl": read.kl.tolist()}


def _layers(rows: int) -> list[str]:
    """Names of the rows of a lens."""
    return ["embedding", *map(str, range(1, rows))]


def _attribution(direct: tuple[Mapping[Part, float], Mapping[Part, float]], odds: Sequence[float]) -> dict[str, Any]:
    """Direct logit attribution, base and tuned."""
    base, tuned = direct
    sums = [attribution.total(dict(x)) for x in direct]
    return {
        "target": "log-odds of the question",
        "components": [part.record() | _three(base[part], tuned[part]) for part in base],
        "total": _three(*odds),
        "error": {"base": odds[0] - sums[0], "tuned": odds[1] - sums[1]},
        "norm": NORM,
    }


def _three(base: float, tuned: float) -> dict[str, float]:
    return {"base": base, "tuned": tuned, "difference": tuned - base}


def _patching(
    pair: Pair,
    seen: Record,
    question: Question,
    direct: tuple[Mapping[Part, float], Mapping[Part, float]],
    odds: Sequence[float],
    others: Sequence[Tensor],
) -> tuple[dict[str, Any], answer.Numbers]:
    """Patching and ablation of each part, and the numbers of the answer."""
    base, tuned = odds
    parts = patching.candidates(pair.tuned)
    rows = [{part} for part in parts]
    patched = dict(zip(parts, patching.patch(pair.base, pair.tuned, seen, pair.ids, question, rows), strict=True))
    means = patching.mean_outputs(pair.name, pair.tuned, [pair.ids, *others])
    ablated = patching.ablate(pair.tuned, means, pair.ids, question)
    shares = {part: patching.share(x, base, tuned) for part, x in patched.items()}
    top = patching.strongest(patched, base, tuned)
    (together,) = patching.patch(pair.base, pair.tuned, seen, pair.ids, question, [set(top)])
    components = []
    for part in parts:
        without = ablated.get(part)
        lost = None if without is None else patching.share(without, tuned, base)
        numbers = {"patched": patched[part], "share": shares[part], "ablated": without, "ablated_share": lost}
        components.append(part.record() | numbers)
    five = patching.share(together, base, tuned)
    result = {
        "metric": "log-odds of the question",
        "components": components,
        "top_five": {"names": [part.name for part in top], "patched": together, "share": five},
    }
    return result, answer.Numbers(base, tuned, patched, shares, direct, top, five)


def _attention(pair: Pair, question: Question) -> dict[str, Any]:
    """Attention from the question's position to the prompt, and gradient × input."""
    length, models = pair.prompt_length, {"base": pair.base, "tuned": pair.tuned}
    weight = {side: attention_from(parts, pair.ids, question.position) for side, parts in models.items()}
    heads = []
    if (example := weight["tuned"]) is not None:
        for layer, head in torch.cartesian_prod(*map(torch.arange, example.shape[:2])).tolist():
            sides = {side: x[layer, head, :length].tolist() for side, x in weight.items() if x is not None}
            heads.append({"layer": layer + 1, "head": head + 1, **sides})
    gradient = {side: input_gradient(parts, pair.ids, question)[:length].tolist() for side, parts in models.items()}
    return {"from": question.position, "to": list(range(length)), "heads": heads, "input_gradient": gradient}


def _critic(pair: Pair, critic: Critic | Ensemble) -> dict[str, Any]:
    """The critic's lens."""
    values = lens.critic_lens(critic, pair.tuned.trunk, pair.ids)
    own = len(values) - 1 if critic.tap is None else critic.tap
    where = f"layer {own}" + ("" if critic.tap is not None else ", the last")
    trunk = "the policy's trunk" if critic.shared else "the critic's own trunk"
    return {
        "layers": _layers(len(values)),
        "values": values.tolist(),
        "final": values[own].tolist(),
        "score": None,
        "note": f"the value head was trained on {where}, of {trunk}; its values at other layers are extrapolations",
    }


def _moved(pair: Pair, base: Tensor, tuned: Tensor) -> dict[str, Any]:
    """Tokens whose probability rose and fell most, of probabilities `[vocabulary]`."""
    lists = {}
    for name, change in (("tokens_up", tuned - base), ("tokens_down", base - tuned)):
        values, ids = change.topk(min(MOVED, len(change)))
        ids = ids[values > 0]
        columns = zip(pair.texts(ids), base[ids].tolist(), tuned[ids].tolist(), strict=True)
        lists[name] = [{"token": token, "base": before, "tuned": after} for token, before, after in columns]
    return lists


def rounded(value: Any) -> Any:
    """A tree of lists and dicts with its numbers rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(x) for key, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, list) else value
