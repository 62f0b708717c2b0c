"""All readings of a pair of models on one text, as in inspect.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.text.models.critic import Critic
from tokencredit.tools.inspect import answer, attribution, lens, patching
from tokencredit.tools.inspect.parts import Part, Parts
from tokencredit.tools.inspect.question import Question, Text, choose, predict
from tokencredit.tools.inspect.recording import Record, record

MOVED = 10
"""Tokens listed by how far their probability rose or fell."""
NORM = (
    "the final norm's scale is frozen at its value for this state, in each model its own; a layer norm also centres "
    "each part, an RMS norm does not; the norm's bias and the output projection's bias are the part 'bias'"
)


@dataclass(frozen=True)
class ModelPair:
    """Two models of the same shape, and the text on which they are compared."""

    name: str
    """Name of the tuned model in messages."""
    base: Parts
    tuned: Parts
    tokenizer: PreTrainedTokenizerBase
    text: Text

    def __post_init__(self) -> None:
        shapes = [{key: x.shape for key, x in parts.lm.named_parameters()} for parts in (self.base, self.tuned)]
        if shapes[0] != shapes[1] or self.base.heads != self.tuned.heads:
            raise ConfigError(
                f"the model to compare with has other shapes than {self.name!r} (layers, heads, width or vocabulary); "
                "--against needs a model of the same architecture and size"
            )

    @property
    def models(self) -> tuple[Parts, Parts]:
        """Base and tuned model."""
        return self.base, self.tuned

    def record(self, text: Text) -> tuple[Record, Record]:
        """Their outputs in a text."""
        return record(self.name, self.base, text.ids), record(self.name, self.tuned, text.ids)

    def words(self, ids: Sequence[int] | Tensor) -> list[str]:
        """The text of each token; its number if it has none, as an id that only the model knows."""
        return [str(self.tokenizer.decode([int(i)])) or f"<{int(i)}>" for i in ids]


def compare(
    pair: ModelPair,
    up: Sequence[int] = (),
    down: Sequence[int] = (),
    others: Sequence[Text] = (),
    critic: Critic | None = None,
    before: str = "before training",
) -> dict[str, Any]:
    """All readings of a pair of models, from `tokens` to `weights` in inspect.json.

    Args:
        pair: the models and the text.
        up: token ids of the question's first set; empty to choose them.
        down: those of the second set.
        others: further texts of the tuned model, in which the strongest parts are patched too; the means of ablation
            are over these and the text.
        critic: the tuned model's critic, if it has one.
        before: where the base model's numbers are from, in the answer's words.
    """
    seen = pair.record(pair.text)
    predicted = predict(pair.models, seen, pair.text)
    question = choose(predicted, pair.text, up, down)
    base, tuned = (x[question.position - pair.text.prompt_length + 1].exp() for x in predicted)
    numbers = _numbers(pair, seen, question)
    elsewhere = [(text, pair.record(text)) for text in others]
    repeated = [
        patching.repeat(pair.models, records, text.apart(pair.text), up, down, numbers.top)
        for text, records in elsewhere
    ]
    means = patching.means(pair.tuned, [seen[1], *(records[1] for _, records in elsewhere)])
    numbers = numbers._replace(others=[list(column) for column in zip(*repeated, strict=True)])
    words = (pair.words(question.up), pair.words(question.down))
    return {
        "tokens": pair.words(pair.text.ids),
        "prompt_length": pair.text.prompt_length,
        "question": {
            "up": words[0],
            "down": words[1],
            "source": question.source,
            **_two(numbers.base, numbers.tuned, "change"),
            "position": question.position,
        },
        "answer": answer.record(numbers, answer.sentence(numbers, *words, unchanged(*pair.models), before)),
        "lens": _lens(pair, seen),
        "attribution": _attribution(numbers),
        "patching": _patching(numbers, patching.ablate(pair.tuned, means, pair.text.ids, question)),
        "attention": _attention(pair, question),
        "critic": None if critic is None else _critic(pair, critic),
        "weights": {
            "modules": changes(*pair.models),
            "tokens_up": _moved(pair, base, tuned, tuned - base),
            "tokens_down": _moved(pair, base, tuned, base - tuned),
        },
    }


def _lens(pair: ModelPair, seen: tuple[Record, Record]) -> dict[str, Any]:
    """The logit lens."""
    positions = pair.text.positions
    read = lens.logit_lens(pair.models, seen, positions, pair.text.ids)
    sides = {
        name: {"token": [pair.words(row) for row in tokens], "probability": shares.tolist(), "rank": ranks.tolist()}
        for name, tokens, shares, ranks in zip(("base", "tuned"), *read[:3], strict=True)
    }
    return {"layers": _layers(len(read.kl)), "positions": positions, **sides, "kl": read.kl.tolist()}


def _layers(rows: int) -> list[str]:
    """Names of the rows of a lens."""
    return ["embedding", *map(str, range(1, rows))]


def _attribution(numbers: answer.Numbers) -> dict[str, Any]:
    """Direct logit attribution, base and tuned."""
    base, tuned = numbers.direct
    return {
        "target": "log-odds of the question",
        "components": [part.record() | _two(base[part], tuned[part], "difference") for part in base],
        "total": _two(numbers.base, numbers.tuned, "difference"),
        "error": {"base": numbers.base - attribution.total(base), "tuned": numbers.tuned - attribution.total(tuned)},
        "norm": NORM,
    }


def _two(base: float, tuned: float, change: str) -> dict[str, float]:
    return {"base": base, "tuned": tuned, change: tuned - base}


def _numbers(pair: ModelPair, seen: tuple[Record, Record], question: Question) -> answer.Numbers:
    """The numbers of the answer but for other texts: direct contributions, and patching of parts."""
    at = (question.position, question.up, question.down)
    direct = (attribution.attribute(pair.base, seen[0], *at), attribution.attribute(pair.tuned, seen[1], *at))
    base, tuned = patching.odds_of(pair.models, seen, question)
    parts = patching.candidates(pair.tuned)
    values = patching.patch(*pair.models, seen[1], pair.text.ids, question, [{part} for part in parts])
    patched = dict(zip(parts, values, strict=True))
    shares = {part: patching.share(x, base, tuned) for part, x in patched.items()}
    top = patching.strongest(patched, base, tuned)
    (together,) = patching.patch(*pair.models, seen[1], pair.text.ids, question, [set(top)])
    return answer.Numbers(base, tuned, patched, shares, direct, top, together, [])


def _patching(numbers: answer.Numbers, ablated: Mapping[Part, float]) -> dict[str, Any]:
    """Patching and ablation of each part."""
    base, tuned, together = numbers.base, numbers.tuned, numbers.together
    components = []
    for part, patched in numbers.patched.items():
        without = ablated.get(part)
        lost = None if without is None else patching.share(without, tuned, base)
        row = {"patched": patched, "share": numbers.shares[part], "ablated": without, "ablated_share": lost}
        components.append(part.record() | row)
    names = [part.name for part in numbers.top]
    return {
        "metric": "log-odds of the question",
        "components": components,
        "top_five": {"names": names, "patched": together, "share": patching.share(together, base, tuned)},
    }


def _attention(pair: ModelPair, question: Question) -> dict[str, Any]:
    """Attention from the question's position to the prompt, and gradient × input."""
    ids, length = pair.text
    models = {"base": pair.base, "tuned": pair.tuned}
    weight = {side: lens.attention_from(parts, ids, question.position) for side, parts in models.items()}
    heads = []
    if (example := weight["tuned"]) is not None:
        for layer, head in torch.cartesian_prod(*map(torch.arange, example.shape[:2])).tolist():
            sides = {side: x[layer, head, :length].tolist() for side, x in weight.items() if x is not None}
            heads.append({"layer": layer + 1, "head": head + 1, **sides})
    gradient = {side: lens.input_gradient(parts, ids, question)[:length].tolist() for side, parts in models.items()}
    return {"from": question.position, "to": list(range(length)), "heads": heads, "input_gradient": gradient}


def _critic(pair: ModelPair, critic: Critic) -> dict[str, Any]:
    """The critic's lens."""
    values = lens.critic_lens(critic, pair.tuned.trunk, pair.text.ids)
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


def _moved(pair: ModelPair, base: Tensor, tuned: Tensor, change: Tensor) -> list[dict[str, Any]]:
    """Tokens with the largest positive change, with their probabilities, all `[vocabulary]`."""
    values, ids = change.topk(min(MOVED, len(change)))
    ids = ids[values > 0]
    columns = zip(pair.words(ids), base[ids].tolist(), tuned[ids].tolist(), strict=True)
    return [{"token": token, "base": before, "tuned": after} for token, before, after in columns]


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
def changes(base: Parts, tuned: Parts) -> list[dict[str, Any]]:
    """The change of each parameter with two dimensions, from the embedding up; tied matrices count once.

    `relative_norm` is the Frobenius norm of the change over that of the base's matrix; 1 if that is 0 and changed.
    """
    before = dict(base.lm.named_parameters())
    rows = []
    for name, after in tuned.lm.named_parameters():
        if after.dim() != 2:
            continue
        difference = after.float() - before[name].float()
        norm, size = float(difference.norm()), float(before[name].float().norm())
        rank = effective_rank(difference) if norm else None
        row = {"name": _title(tuned, name), "relative_norm": norm / (size or norm or 1.0), "effective_rank": rank}
        rows.append({**row, "parameters": after.numel()})
    return rows


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
