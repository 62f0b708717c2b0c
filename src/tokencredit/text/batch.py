"""One iteration's completions with everything that is known of them, and what is written down of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.kl import k1
from tokencredit.core.masked import Reduce, explained_variance, moments
from tokencredit.text.engines.sampling import Rollout
from tokencredit.text.rewards.terms import term_metrics

DECIMALS = 6
"""Of the numbers in samples.jsonl."""


@dataclass(frozen=True)
class Batch:
    """A rollout, its texts, its rewards and its credit; `[batch]` or `[batch, time]`."""

    rollout: Rollout
    prompts: list[str]
    completions: list[str]
    scores: Tensor
    """`[batch]`: the weighted sum of the reward's terms, over all tokens where a term gives one number a token."""
    terms: dict[str, list[float | None]]
    """Each term by itself; None where it does not apply."""
    ref_logprobs: Tensor | None
    """Of the same tokens under the reference, nats."""
    rewards: Tensor
    """For each token: the score at the last one, less the price of KL."""
    advantages: Tensor
    returns: Tensor

    def metrics(self, reduce: Reduce, accelerator: Accelerator) -> dict[str, float]:
        """Means over all completions; `reduce` sums a tensor over the accelerator's processes."""
        rollout, mask = self.rollout, self.rollout.mask
        everyone = torch.ones_like(self.scores, dtype=torch.bool)
        _, reward, variance = moments(self.scores, everyone, reduce)
        _, advantage, advantage_variance = moments(self.advantages, mask, reduce)

        def total(*values: Tensor | float) -> list[float]:
            return reduce(torch.tensor([float(x) for x in values], device=mask.device)).tolist()

        texts = len(set(zip(self.prompts, self.completions, strict=True)))
        all_pairs, pairs, distinct_in_rows = token_pairs(rollout.response_ids, mask)
        rows, tokens, logprobs, cut, distinct, all_pairs, distinct_in_rows = total(
            len(mask),
            mask.sum(),
            rollout.logprobs.sum(),
            rollout.truncated.sum(),
            texts,
            all_pairs,
            distinct_in_rows,
        )
        distinct_pairs = distinct_over_processes(pairs, accelerator)
        metrics = {
            "reward": float(reward),
            "reward_std": float(variance.sqrt()),
            **term_metrics(self.terms, reduce, mask.device),
            "entropy": -logprobs / tokens,
            "tokens": tokens,
            "length": tokens / rows,
            "truncated": cut / rows,
            "distinct": distinct / rows,
            "distinct_2": distinct_pairs / max(all_pairs, 1),
            "repetition": 1 - distinct_in_rows / max(all_pairs, 1),
            "advantage_mean": float(advantage),
            "advantage_std": float(advantage_variance.sqrt()),
            "explained_variance": float(explained_variance(rollout.values, self.returns, mask, reduce)),
        }
        if self.ref_logprobs is not None:
            kl, ref_logprobs = total(k1(rollout.logprobs, self.ref_logprobs, mask).sum(), self.ref_logprobs.sum())
            metrics |= {"kl": kl / rows, "ref_logprob": ref_logprobs / tokens}
        return metrics

    def samples(self, tokenizer: PreTrainedTokenizerBase, new_logprobs: Tensor) -> list[dict[str, Any]]:
        """The first completions, token by token, as records for samples.jsonl.

        Args:
            tokenizer: the policy's.
            new_logprobs: `[count, time]`, of the first `count` completions under the policy after the update.
        """
        return [self._sample(row, tokenizer, new_logprobs) for row in range(len(new_logprobs))]

    def _sample(self, row: int, tokenizer: PreTrainedTokenizerBase, new_logprobs: Tensor) -> dict[str, Any]:
        acted = self.rollout.mask[row]

        def numbers(tensor: Tensor) -> list[float]:
            return [round(x, DECIMALS) for x in tensor[row][acted].tolist()]

        ids = self.rollout.response_ids[row][acted].tolist()
        sample = {
            "prompt": self.prompts[row],
            "completion": self.completions[row],
            "reward": round(float(self.scores[row]), DECIMALS),
            "terms": {name: _rounded(values[row]) for name, values in self.terms.items()},
            "truncated": bool(self.rollout.truncated[row]),
            "token_ids": ids,
            "tokens": [tokenizer.decode([i]) for i in ids],
            "logprobs": numbers(self.rollout.logprobs),
            "new_logprobs": numbers(new_logprobs),
            "values": numbers(self.rollout.values),
            "rewards": numbers(self.rewards),
            "advantages": numbers(self.advantages),
            "returns": numbers(self.returns),
        }
        if self.ref_logprobs is not None:
            sample["ref_logprobs"] = numbers(self.ref_logprobs)
        return sample


def token_pairs(ids: Tensor, mask: Tensor) -> tuple[int, Tensor, int]:
    """Pairs of neighbouring tokens: how many, those that are distinct, and how many are distinct within their row.

    Args:
        ids: `[batch, time]`, int64, below 2³¹.
        mask: `[batch, time]`, true at tokens.

    Returns:
        The count, the pairs as one number each, and the count within rows.
    """
    both = mask[:, 1:] & mask[:, :-1]
    pairs = ((ids[:, :-1] << 32) + ids[:, 1:])[both]
    in_rows = torch.stack([both.nonzero()[:, 0], pairs], dim=1).unique(dim=0)
    return len(pairs), pairs.unique(), len(in_rows)


def distinct_over_processes(pairs: Tensor, accelerator: Accelerator) -> int:
    """How many different pairs the processes have together; what each has, `[n]`, may differ in length."""
    padded = accelerator.pad_across_processes(pairs, pad_index=-1)
    everyone: Tensor = accelerator.gather(padded)
    return len(everyone[everyone >= 0].unique())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)
