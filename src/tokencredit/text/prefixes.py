"""Scores of the prefixes of completions, by the reward terms that can score an unfinished text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.text.batch import Batch
from tokencredit.text.data.detokenizer import Detokenizer
from tokencredit.text.rewards.calls import RewardError, Term
from tokencredit.text.rewards.terms import score


def prefix_scores(terms: Sequence[Term], batch: Batch, tokenizer: PreTrainedTokenizerBase, every: int) -> Tensor:
    """Score of the text before each token, `[batch, time]`: the weighted sum of the terms with `prefix`.

    Every `every`-th prefix is scored, and the tokens up to the next one have its score; equal prefixes are scored once.
    Raises as `score`.
    """
    rollout, lengths = batch.rollout, batch.rollout.response_lengths().tolist()
    prompts = [tuple(ids[mask].tolist()) for ids, mask in zip(batch.prompts.ids, batch.prompts.mask, strict=True)]
    responses = [ids[:length].tolist() for ids, length in zip(rollout.response_ids.cpu(), lengths, strict=True)]
    # Rows of one prompt with the same columns, which a function may read.
    contents = list(zip(batch.prompts.prompts, *batch.prompts.columns.values(), strict=True))
    # The row and the length of each distinct prefix; one is known by the number of the one before it, and what follows.
    known: dict[tuple[object, ...], int] = {}
    distinct: list[tuple[int, int]] = []
    numbers = torch.zeros(rollout.mask.shape, dtype=torch.long)
    for row, (prompt, ids) in enumerate(zip(prompts, responses, strict=True)):
        number = -1
        for start in range(0, len(ids), every):
            following = ids[start - every : start] if start else (repr(contents[row]), *prompt)
            number = known.setdefault((number, *following), len(distinct))
            if number == len(distinct):
                distinct.append((row, start))
            numbers[row, start : start + every] = number
    # Their texts, and what a function may take by name: the columns of the data set, and the token ids.
    detokenizers = {prompt: Detokenizer(tokenizer, prompt) for prompt in dict.fromkeys(prompts)}
    ids = [responses[row][:start] for row, start in distinct]
    texts = [detokenizers[prompts[row]].text(prefix) for (row, _), prefix in zip(distinct, ids, strict=True)]
    chosen = batch.prompts.select([row for row, _ in distinct])
    columns = {**chosen.columns, "completion_ids": ids}
    scoring = [term for term in terms if term.prefix]
    scores = score(scoring, chosen.questions(), chosen.answers(texts), columns, [start for _, start in distinct])
    if scores.dense is not None:
        names = " and ".join(repr(term.name) for term in scoring)
        raise RewardError(f"reward term {names} scores prefixes, and gave a number per token; leave out prefix: true")
    return torch.tensor(scores.totals)[numbers].to(rollout.mask.device)
