"""Rewards that one word decides, tiny policies to earn them, and the share of the credit that this word gets.

`python recipes/planted-credit/world.py` builds the policies under runs/models/planted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GPT2LMHeadModel

MODELS = Path("runs/models/planted")
LENGTHS = (8, 32, 128, 256)
PROMPTS = ("say", "word", "2", "3", "4")
WORDS = ("red", "not", "green", "blue", "sky", "sea", "old", "warm", "is", "it")
END = "end"
"""The end-of-sequence token, which no policy learns to write."""
IDS = {word: number for number, word in enumerate((*WORDS, *PROMPTS, END))}
PLACE = 3
"""The word that decides `place`, counted from 1."""
OFTEN_RED = 0.25
"""Probability of "red" at each word, before training."""
HALF_TRUE = 0.5
"""Share of texts without a "not" before training, whatever their length."""


def place(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """1 if the third word is "red", else 0; a text that ends before it has 0."""
    return [float(IDS["red"] in ids[PLACE - 1 : PLACE]) for ids in completion_ids]


def kth(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """1 if the word whose number the prompt names is "red", else 0; a text that ends before it has 0."""
    places = [named(prompt) for prompt in prompts]
    return [float(IDS["red"] in ids[at - 1 : at]) for at, ids in zip(places, completion_ids, strict=True)]


def falsify(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """0 if there is a "not", else 1."""
    return [float(IDS["not"] not in ids) for ids in completion_ids]


def named(prompt: str) -> int:
    """The number that a prompt of `kth` names: 3 of "word 3"."""
    return int(prompt.split()[-1])


def deciding(kind: str, prompt: str, ids: Sequence[int]) -> int | None:
    """Index of the token that decides the reward; None in a text without "not", where all words together do."""
    if kind == "falsify":
        return list(ids).index(IDS["not"]) if IDS["not"] in ids else None
    return (PLACE if kind == "place" else named(prompt)) - 1


def build(folder: Path, word: str, rate: float, seed: int = 0) -> None:
    """Save a GPT-2 of two layers that learned texts of random words, in which `word` has the probability `rate`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320, "vocab_size": len(IDS)}
    shape["initializer_range"] = 0.2  # about 1 / √width; with 0.02, GPT-2's, so small a trunk learns to attend late
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": IDS[END], "eos_token_id": IDS[END], "pad_token_id": IDS[END]}
    lm = GPT2LMHeadModel(GPT2Config(**shape, **dropout, **ends))
    probabilities = torch.full((len(WORDS),), (1 - rate) / (len(WORDS) - 1))
    probabilities[WORDS.index(word)] = rate
    optimizer = torch.optim.Adam(lm.parameters(), lr=3e-3)
    for _ in range(100):
        starts = torch.randint(len(WORDS), len(WORDS) + len(PROMPTS), (8, 1))
        texts = torch.multinomial(probabilities, 8 * LENGTHS[-1], replacement=True).view(8, -1)
        loss = lm(input_ids=torch.cat([starts, texts], 1), labels=torch.cat([starts, texts], 1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    words = Tokenizer(models.WordLevel(IDS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    lm.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END).save_pretrained(folder)


def credit_shares(run: Path) -> dict[str, float]:
    """Share of a run's credit on the deciding words, and that of the true credit.

    Returns:
        `shown`, Σ |A| over the deciding words divided by Σ |A| over all words, of all kept completions that have a
        deciding word; `shown_squared`, the same of A²; `true`, of the true |A| of the completions whose policy is
        known: those of the first iteration, and of each after a checkpoint. NaN where all credit is 0.
    """
    import torch
    from transformers import GPT2LMHeadModel

    from tokencredit.distributed.processes import Processes
    from tokencredit.report.reading import read_run
    from tokencredit.runs.checkpoint import read_checkpoint
    from tokencredit.runs.resuming import saved

    read = read_run(run)
    kind = read.config["reward"][0]["function"].rpartition(":")[2]
    samples = [s for s in read.samples if deciding(kind, s["prompt"], s["token_ids"]) is not None]
    lm, true = GPT2LMHeadModel.from_pretrained(read.config["model"]["name"]), []
    for number in sorted({0, *saved(run / "checkpoints")}):
        own = [sample for sample in samples if sample["iteration"] == number + 1]
        if number and own:
            weights = read_checkpoint(run / "checkpoints" / f"{number:06d}", Processes())["trainer"]["weights"]
            kept = {name.removeprefix("lm."): x for name, x in weights.items() if name.startswith("lm.")}
            lm.load_state_dict(kept, strict=False)  # the output projection is the tied embedding
        with torch.no_grad():
            true += [sample | {"advantages": a} for sample, a in zip(own, true_advantages(lm, kind, own), strict=True)]
    return {
        "shown": share(kind, samples, 1),
        "shown_squared": share(kind, samples, 2),
        "true": share(kind, true, 1),
    }


def share(kind: str, samples: Sequence[Mapping[str, Any]], power: int) -> float:
    """Σ |A|ᵖ over the deciding words divided by Σ |A|ᵖ over all words."""
    there = everywhere = 0.0
    for sample in samples:
        there += abs(sample["advantages"][deciding(kind, sample["prompt"], sample["token_ids"])]) ** power
        everywhere += sum(abs(advantage) ** power for advantage in sample["advantages"])
    return there / everywhere if everywhere else math.nan


def true_advantages(lm: GPT2LMHeadModel, kind: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[list[float]]:
    """A(sₜ, aₜ) = V(sₜ₊₁) − V(sₜ) of each completion's words, where V is the probability of the reward.

    In `place` and `kth` V is exact: a sum over all words that may come before the deciding one.
    """
    if kind == "falsify" and samples:
        yield from of_falsify(lm, samples)
        return
    trees: dict[str, list[Tensor]] = {}
    for sample in samples:
        prompt, ids, at = sample["prompt"], sample["token_ids"], deciding(kind, sample["prompt"], sample["token_ids"])
        tree = trees[prompt] if prompt in trees else trees.setdefault(prompt, chances(lm, prompt, at))
        values = [float(level[tuple(ids[:t])]) for t, level in enumerate(tree)] + [float(ids[at] == IDS["red"])]
        yield [after - before for before, after in pairwise(values)]


def chances(lm: GPT2LMHeadModel, prompt: str, at: int) -> list[Tensor]:
    """Probability that word `at` will be "red", after each choice of the words before it: a tensor per number of them.

    Exact: P(w₀ … wₜ₋₁) = Σ π(wₜ | w₀ … wₜ₋₁) P(w₀ … wₜ), from a pass over all texts of `at` words.
    """
    import torch

    count = len(IDS)
    texts = torch.cartesian_prod(*[torch.arange(count)] * at).view(-1, at)
    words = following(lm, prompt, texts).view(*[count] * at, at + 1, count)
    levels = [words[..., at, IDS["red"]]]
    for t in reversed(range(at)):
        first = words[(..., *[0] * (at - t), t, slice(None))]  # the same whatever follows
        levels.insert(0, (first * levels[0]).sum(-1))
    return levels


def of_falsify(lm: GPT2LMHeadModel, samples: Sequence[Mapping[str, Any]]) -> Iterator[list[float]]:
    """V(sₜ) = Π (1 − hᵤ) over u ≥ t, where hᵤ is the probability of "not" at word u; 0 after a "not".

    hₜ is the policy's after the words that stand there, and later hᵤ are means over the texts: exact but for what a
    word does to the chances of a later "not".
    """
    import torch

    ids = torch.tensor([sample["token_ids"] for sample in samples])
    hazards = following(lm, samples[0]["prompt"], ids)[:, :-1, IDS["not"]]
    true_before = torch.nn.functional.pad((ids == IDS["not"]).cumsum(1)[:, :-1], (1, 0)) == 0
    mean = (hazards * true_before).sum(0) / true_before.sum(0).clamp(min=1)
    later = torch.nn.functional.pad((1 - mean).flip(0).cumprod(0).flip(0)[1:], (0, 1), value=1.0)
    values = (1 - hazards) * later * true_before
    true_after = ids.ne(IDS["not"]) & true_before
    yield from ((later * true_after - values) * true_before).tolist()


def following(lm: GPT2LMHeadModel, prompt: str, texts: Tensor) -> Tensor:
    """Probability of each word after the prompt and after each word of the texts, `[texts, words + 1, vocabulary]`."""
    import torch

    start = torch.tensor([IDS[word] for word in prompt.split()]).expand(len(texts), -1)
    ids = torch.cat([start, texts], 1)
    logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, start.shape[1] - 1 :]
    return logits.double().softmax(-1)


def main() -> None:
    """Build the policies that are not there yet."""
    rates = {"red": OFTEN_RED} | {f"not-{length}": 1 - HALF_TRUE ** (1 / length) for length in LENGTHS}
    for name, rate in rates.items():
        if not (MODELS / name / "tokenizer_config.json").is_file():
            build(MODELS / name, name.partition("-")[0], rate)


if __name__ == "__main__":
    main()
