"""An iteration's scored completions with credit, and their metrics and sample records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.masked import moments
from tokencredit.core.off_policy import CorrectionStats, correction_stats
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import critic_metrics
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.pipeline import Scored
from tokencredit.text.rewards.terms import term_metrics
from tokencredit.text.rewards.texts import last_message
from tokencredit.text.turns.episode_record import episode_metrics, episode_record

DECIMALS = 6
"""Decimals of numbers in samples.jsonl."""


@dataclass(frozen=True)
class Batch:
    """Scored completions with the credit of each token, `[batch, time]`."""

    scored: Scored
    rewards: Tensor
    """Reward of each token: scores, at the last token unless dense, less the KL penalty."""
    advantages: Tensor
    returns: Tensor
    in_loss: Tensor
    """True at tokens in the loss."""
    valued: Tensor
    """True at tokens whose value the critic learns: all, or the first of each turn."""
    masks: bool = False
    """Completions may be masked from the loss; adds the metric `masked`, the share of masked tokens."""
    weights: Tensor | None = None
    """Importance weights on the policy loss; None without a correction."""

    def metrics(self, processes: Processes) -> dict[str, float]:
        """The batch's metrics, over the completions of all processes."""
        scored, rollout, mask = self.scored, self.scored.rollout, self.scored.rollout.mask
        totals = scored.totals()
        all_rows = torch.ones_like(totals, dtype=torch.bool)
        _, reward, variance = moments(totals, all_rows, processes.sum)
        (rows, tokens, entropy, cut, in_loss), texts = self._sums(processes), text_metrics(scored, processes)
        # If no token is in the loss, average over all tokens.
        _, advantage, advantage_variance = moments(self.advantages, self.in_loss if in_loss else mask, processes.sum)
        metrics = {
            "reward": float(reward),
            "reward_std": float(variance.sqrt()),
            **term_metrics(scored.terms, processes.sum, mask.device),
            "entropy": entropy / tokens,
            "tokens": tokens,
            "length": tokens / rows,
            "truncated": cut / rows,
            **texts,
            "advantage_mean": float(advantage),
            "advantage_std": float(advantage_variance.sqrt()),
        }
        if scored.episodes is not None:
            metrics |= episode_metrics(scored.episodes, processes, mask.device)
        if rollout.age is not None:
            oldest = float(processes.max(rollout.age.max()))
            metrics |= {"age_mean": float(processes.sum(rollout.age.sum())) / tokens, "age_max": oldest}
        if self.masks:
            metrics["masked"] = 1 - in_loss / tokens
        if rollout.behavior_logprobs is not None:
            metrics |= behavior_metrics(rollout, self.weights, processes)
        if rollout.values is not None:
            metrics |= critic_metrics(rollout.values, self.returns, self.valued, processes.sum)
        if (reference := scored.reference.logprobs) is not None and (distance := scored.kl()) is not None:
            name, kl = distance
            kl_sum, ref_logprobs = processes.sum(torch.stack([kl.sum(), reference.sum()])).tolist()
            metrics |= {name: kl_sum / rows, "ref_logprob": ref_logprobs / tokens}
        return metrics

    def _sums(self, processes: Processes) -> list[float]:
        """Sums over processes: rows, tokens, entropy, truncated rows, tokens in the loss."""
        rollout = self.scored.rollout
        entropy = -rollout.logprobs.sum() if rollout.entropy is None else rollout.entropy.sum()
        rows = entropy.new_full((), len(rollout.mask))
        values = (rows, rollout.mask.sum(), entropy, rollout.truncated.sum(), self.in_loss.sum())
        sums: list[float] = processes.sum(torch.stack(values)).tolist()
        return sums

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, rows: Iterable[int], new_logprobs: Tensor | None = None
    ) -> list[dict[str, Any]]:
        """Records of completions for samples.jsonl, with per-token numbers.

        Args:
            tokenizer: the policy's.
            rows: indices of the completions.
            new_logprobs: `[count, time]`, log-probs of the first `count` completions after the update.
        """
        return [self._sample(row, tokenizer, new_logprobs) for row in rows]

    def _sample(self, row: int, tokenizer: PreTrainedTokenizerBase, new_logprobs: Tensor | None) -> dict[str, Any]:
        scored, rollout = self.scored, self.scored.rollout
        length, episode = (
            int(rollout.response_lengths()[row]),
            None if scored.episodes is None else scored.episodes[row],
        )

        def numbers(tensor: Tensor) -> list[float]:
            return [round(x, DECIMALS) for x in tensor[row, :length].tolist()]

        ids = rollout.response_ids[row, :length].tolist()
        prompt = scored.prompts.prompts[row]
        sample = {
            "prompt": scored.prompts.texts[row],
            **({} if isinstance(prompt, str) else {"message": last_message(prompt)}),
            "completion": scored.completions[row],
            "reward": round(float(scored.totals()[row]), DECIMALS),
            "terms": {name: _rounded(values[row]) for name, values in scored.terms.items()},
            "truncated": bool(rollout.truncated[row]),
            "token_ids": ids,
            "tokens": rollout.tokens(row, tokenizer),
            "logprobs": numbers(rollout.logprobs),
            **({} if rollout.behavior_logprobs is None else {"behavior_logprobs": numbers(rollout.behavior_logprobs)}),
            **({} if new_logprobs is None else {"new_logprobs": numbers(new_logprobs)}),
            "rewards": numbers(self.rewards),
            "advantages": numbers(self.advantages),
            "returns": numbers(self.returns),
        }
        if episode is not None:
            sample |= {"mask": rollout.mask[row, :length].int().tolist(), **episode_record(episode)}
        if rollout.age is not None:
            sample["age"] = rollout.age[row, :length].tolist()
        if rollout.values is not None:
            sample["values"] = numbers(rollout.values)
        if scored.bootstrap is not None and rollout.truncated[row]:
            sample["bootstrap"] = round(float(scored.bootstrap[row]), DECIMALS)
        if scored.reference.logprobs is not None:
            sample["ref_logprobs"] = numbers(scored.reference.logprobs)
        return sample


def behavior_metrics(rollout: Rollout, weights: Tensor | None, processes: Processes) -> dict[str, float]:
    """Distance from the log-probs of the update to those of the draws, over the tokens of all processes.

    Returns:
        `behavior_ratio` and `behavior_kl`; with weights also `weight_mean`, `weight_zero` and `weight_ess`
        (`core.off_policy.CorrectionStats`).
    """
    behavior, mask = rollout.behavior_logprobs, rollout.mask
    assert behavior is not None
    stats = correction_stats(weights, rollout.logprobs, behavior, mask)
    return CorrectionStats(processes.sum(stats.sums), stats.weighted).metrics()


def text_metrics(scored: Scored, processes: Processes) -> dict[str, float]:
    """Diversity metrics over the completions of all processes.

    Returns:
        `distinct`, the share of distinct texts; `distinct_2`, the share of distinct token bigrams; and `repetition`,
        the share of bigrams that repeat one of the same completion.
    """
    rollout = scored.rollout
    hashes = text_hashes(scored.prompts.texts, scored.completions).to(rollout.mask.device)
    all_pairs, pairs, distinct_in_rows = token_pairs(rollout.response_ids, rollout.mask)
    counts = torch.tensor(
        [float(x) for x in (len(rollout.mask), all_pairs, distinct_in_rows)], device=rollout.mask.device
    )
    rows, all_pairs_sum, distinct_in_rows_sum = processes.sum(counts).tolist()
    return {
        "distinct": distinct_over_processes(hashes, processes) / rows,
        "distinct_2": distinct_over_processes(pairs, processes) / max(all_pairs_sum, 1),
        "repetition": 1 - distinct_in_rows_sum / max(all_pairs_sum, 1),
    }


def text_hashes(prompts: Sequence[str], completions: Sequence[str]) -> Tensor:
    """A hash of 63 bits of each prompt with its completion, the same in every process, `[n]`."""
    texts = [json.dumps(pair).encode() for pair in zip(prompts, completions, strict=True)]
    digests = [blake2b(text, digest_size=8).digest() for text in texts]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.long)


def token_pairs(ids: Tensor, mask: Tensor) -> tuple[int, Tensor, int]:
    """Count token bigrams.

    Args:
        ids: `[batch, time]`, int64, below 2³¹.
        mask: `[batch, time]`, true at tokens.

    Returns:
        The number of bigrams, the distinct ones encoded as one integer each, and the number distinct within their row.
    """
    both = mask[:, 1:] & mask[:, :-1]
    pairs = ((ids[:, :-1] << 32) + ids[:, 1:])[both]
    in_rows = torch.stack([both.nonzero()[:, 0], pairs], dim=1).unique(dim=0)
    return len(pairs), pairs.unique(), len(in_rows)


def distinct_over_processes(numbers: Tensor, processes: Processes) -> int:
    """Number of distinct numbers over all processes, from those of this one, `[n]`, which are not negative."""
    gathered = processes.gather(numbers)
    return len(gathered[gathered >= 0].unique())


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)
