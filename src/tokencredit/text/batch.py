"""A batch of completions: sampled, scored and given credit; its metrics and sample records.

From engine to loss a token passes six carriers, each with one reason to exist:

1. `PromptBatch`: prompts as token ids, before anything is sampled.
2. `Rollout`: the tensors that an engine makes, and nothing of texts or rewards.
3. `Batch`: everything known of completions in the end, for records, metrics and audits; filled step by step.
4. `Experience`: what an update reads, for text and Gymnasium alike; minibatches and micro-batches are its rows.
5. `PolicyOutputs`: what the model now says of the rows, with the critic's outputs as the critic gives them.
6. `Loss`: the policy's and the critic's part of the loss, with gradients, and the terms for the metrics.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.masked import moments
from tokencredit.core.off_policy import CorrectionStats, correction_stats
from tokencredit.core.rewards import k1
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import critic_metrics
from tokencredit.runs.summary import SHAPED
from tokencredit.runs.transcript import SIGN, conversation
from tokencredit.runs.untrusted import visible
from tokencredit.text.data.prefixes import Ended
from tokencredit.text.data.prompts import Prompt, PromptBatch
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.rewards.terms import PendingCall, term_metrics
from tokencredit.text.rewards.texts import messages_of
from tokencredit.text.rollout_passes import ReferenceOutputs
from tokencredit.text.turns.episode_record import Transcript, episode_metrics, episode_record

DECIMALS = 6
"""Decimals of numbers in samples.jsonl."""
EMPTY = torch.empty(0)
"""A tensor that a later step fills."""


@dataclass(frozen=True)
class Batch:
    """Completions of prompts. `Pipeline.sample` makes a batch; `Pipeline.scored` and `Credit.give` each fill a part.

    Tensors are `[batch, time]` unless said otherwise.
    """

    prompts: PromptBatch
    rollout: Rollout
    completions: list[str]
    episodes: list[Transcript] | None = None
    """Transcripts of episodes of several turns; None if a completion is one turn."""
    pending: Mapping[str, PendingCall] = field(default_factory=dict)
    """Calls of reward terms that `Pipeline.start_rewards` has started."""
    updates: int = 0
    """In a loop by hand: updates of the policy before these completions were drawn."""

    # Filled by `Pipeline.scored`.
    reference: ReferenceOutputs = ReferenceOutputs()  # noqa: RUF009  (immutable)
    bootstrap: Tensor | None = None
    """`[batch]`, the critic's value of the state after truncated completions, 0 elsewhere; None without a bootstrap."""
    scores: Tensor = EMPTY
    """`[batch]`, weighted sum of terms with one number per completion, the reward of its last token."""
    dense: list[list[float]] | None = None
    """Weighted sum of terms with one number per token; None if there is none."""
    terms: dict[str, list[float | None]] = field(default_factory=dict)
    """Unweighted values of each term; None where it does not apply."""
    of_texts: bool = True
    """True if some term gave one number for a whole completion."""
    drawn_elsewhere: bool = False
    """True if the draws are of another distribution than the policy's: filters such as top_p truncated it, or they were
    adopted with log-probs of their own."""
    prefixes: Tensor | None = None
    """Score of the text before each token; None without such scores."""
    ended: Ended | None = None
    """The same with an end after the text, once, to choose the better."""
    stopped: Tensor | None = None
    """`[batch]`, true for completions that contain a stop string; None without stop strings, and for episodes."""

    # Filled by `Credit.give`.
    rewards: Tensor = EMPTY
    """Reward of each token: scores, at the last token unless dense, less the KL penalty."""
    advantages: Tensor = EMPTY
    """Before whitening."""
    returns: Tensor = EMPTY
    in_loss: Tensor = EMPTY
    """True at tokens in the loss."""
    fitted: Tensor | None = None
    """The part of the values that is fitted to `prefixes`, to which a share of `critic_outputs` is added."""
    critic_outputs: Tensor | None = None
    """Outputs of a critic that learns what the fit leaves of the returns; None without a fit."""
    valued: Tensor = EMPTY
    """True at tokens whose value the critic learns: all, or the first of each turn."""
    weights: Tensor | None = None
    """Importance weights on the policy loss; None without a correction."""
    masks: bool = False
    """Completions may be masked from the loss; adds the metric `masked`, the share of masked tokens."""

    def answers(self) -> list[Prompt]:
        """Completions as reward terms receive them: texts, or messages, of all turns if there are several."""
        if self.episodes is None:
            return self.prompts.answers(self.completions)
        rows = zip(self.episodes, self.prompts.prompts, self.prompts.texts, self.completions, strict=True)
        return [episode.completion(prompt, rendered, text) for episode, prompt, rendered, text in rows]

    def texts(self) -> list[str]:
        """Each prompt's text followed by its completion."""
        return self.prompts.continued(self.completions)

    def shown(self) -> list[str]:
        """Each prompt and its completion in one line of text, or a conversation with a line per message."""
        rows = zip(self.prompts.prompts, self.prompts.texts, self.completions, strict=True)
        return [
            visible(text + completion)
            if isinstance(prompt, str)
            else conversation({"messages": messages_of(prompt)}) + completion.replace(SIGN, "\\u203a")
            for prompt, text, completion in rows
        ]

    def text_of_row(self, row: int, processes: Processes) -> str:
        """The text of a row, counted over all processes, in each of them; collective."""
        texts = self.texts()
        ends = list(accumulate(processes.gather(torch.tensor([len(texts)], device=processes.device)).tolist()))
        owner = bisect(ends, row)
        return processes.texts(texts[row - (ends[owner] - len(texts))] if owner == processes.rank else "")[owner]

    def total_scores(self) -> Tensor:
        """Total reward of each completion, `[batch]`."""
        if self.dense is None:
            return self.scores
        return self.scores + torch.tensor([sum(row) for row in self.dense], device=self.scores.device)

    def kl(self) -> tuple[str, Tensor] | None:
        """Metric name and KL to the reference model at each token, in nats; None without a reference model.

        The exact KL if known, otherwise log π/π_ref of the sampled token, whose mean estimates the KL. For draws of
        another distribution, and for tokens of earlier updates, it is a biased estimate and called `log_ratio`.
        """
        reference = self.reference
        # Whole distributions were compared where the reference's states are kept.
        if reference.hidden is not None and reference.kl is not None:
            return "kl", reference.kl
        if reference.logprobs is None:
            return None
        log_ratio = k1(self.rollout.logprobs, reference.logprobs, self.rollout.mask)
        return "log_ratio" if self.drawn_elsewhere or self.rollout.age is not None else "kl", log_ratio

    def metrics(self, processes: Processes, shaped: Tensor | None = None) -> dict[str, float]:
        """The batch's metrics, over the completions of all processes; `shaped` is `Credit.shaped` of it."""
        rollout, mask, totals = self.rollout, self.rollout.mask, self.total_scores()
        _, reward, variance = moments(totals, torch.ones_like(totals, dtype=torch.bool), processes.sum)
        entropies = -rollout.logprobs if rollout.entropy is None else rollout.entropy
        counts = (entropies.new_full((), len(mask)), mask.sum(), entropies.sum(), rollout.truncated.sum())
        rows, tokens, entropy, cut, in_loss = processes.sum(torch.stack([*counts, self.in_loss.sum()])).tolist()
        texts = text_metrics(self, processes)
        # If no token is in the loss, average over all tokens.
        _, advantage, advantage_variance = moments(self.advantages, self.in_loss if in_loss else mask, processes.sum)
        metrics = {
            "reward": float(reward),
            "reward_std": float(variance.sqrt()),
            **term_metrics(self.terms, processes.sum, mask.device),
            "tokens": tokens,
            "length": tokens / rows,
            "truncated": cut / rows,
            **texts,
            "advantage_mean": float(advantage),
            "advantage_std": float(advantage_variance.sqrt()),
        }
        # Without exact entropies −log-prob estimates them, if the policy of now drew the tokens.
        if rollout.entropy is not None or not (self.drawn_elsewhere or rollout.age is not None):
            metrics["entropy"] = entropy / tokens
        if shaped is not None:
            _, reward, variance = moments(shaped, torch.ones_like(shaped, dtype=torch.bool), processes.sum)
            metrics |= {SHAPED: float(reward), f"{SHAPED}_std": float(variance.sqrt())}
        if self.episodes is not None:
            metrics |= episode_metrics(self.episodes, processes, mask.device)
        if rollout.age is not None:
            oldest = float(processes.max(rollout.age.max()))
            metrics |= {"age_mean": float(processes.sum(rollout.age.sum())) / tokens, "age_max": oldest}
        if self.stopped is not None:
            metrics["stopped"] = float(processes.sum(self.stopped.sum())) / rows
        if self.masks:
            metrics["masked"] = 1 - in_loss / tokens
        if rollout.behavior_logprobs is not None:
            metrics |= behavior_metrics(rollout, self.weights, processes)
        if rollout.values is not None:
            metrics |= critic_metrics(rollout.values, self.returns, self.valued, processes.sum)
        if (reference := self.reference.logprobs) is not None and (distance := self.kl()) is not None:
            name, kl = distance
            kl_sum, ref_logprobs = processes.sum(torch.stack([kl.sum(), reference.sum()])).tolist()
            metrics |= {name: kl_sum / rows, "ref_logprob": ref_logprobs / tokens}
        return metrics

    def samples(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rows: Iterable[int],
        new_logprobs: Tensor | None = None,
        loss_advantages: Tensor | None = None,
    ) -> list[dict[str, Any]]:
        """Records of these rows for samples.jsonl.

        After an update, `new_logprobs` and `loss_advantages` are `[count, time]` of the first rows; the latter as the
        loss used them, NaN at tokens that are not in it.
        """
        after = {"new_logprobs": new_logprobs, "loss_advantages": loss_advantages}
        return [self._sample(row, tokenizer, after) for row in rows]

    def _sample(
        self, row: int, tokenizer: PreTrainedTokenizerBase, after: Mapping[str, Tensor | None]
    ) -> dict[str, Any]:
        rollout, prompt = self.rollout, self.prompts.prompts[row]
        length = int(rollout.response_lengths()[row])
        per_token = {
            "logprobs": rollout.logprobs,
            "behavior_logprobs": rollout.behavior_logprobs,
            "rewards": self.rewards,
            "advantages": self.advantages,
            **after,
            "returns": self.returns,
            "values": rollout.values,
            "ref_logprobs": self.reference.logprobs,
        }
        sample = {
            "prompt": self.prompts.texts[row],
            **({} if isinstance(prompt, str) else {"messages": messages_of(prompt)}),
            "completion": self.completions[row],
            "reward": round(float(self.total_scores()[row]), DECIMALS),
            "terms": {
                name: None if (x := values[row]) is None else round(x, DECIMALS) for name, values in self.terms.items()
            },
            "truncated": bool(rollout.truncated[row]),
            "token_ids": rollout.response_ids[row, :length].tolist(),
            "tokens": rollout.tokens(row, tokenizer),
        }
        for name, numbers in per_token.items():
            if numbers is not None:
                values = numbers[row, :length].tolist()
                sample[name] = [None if math.isnan(x) else round(x, DECIMALS) for x in values]
        if self.episodes is not None:
            sample |= {"mask": rollout.mask[row, :length].int().tolist(), **episode_record(self.episodes[row])}
        if rollout.age is not None:
            sample["age"] = rollout.age[row, :length].tolist()
        if self.bootstrap is not None and rollout.truncated[row]:
            sample["bootstrap"] = round(float(self.bootstrap[row]), DECIMALS)
        return sample


def behavior_metrics(rollout: Rollout, weights: Tensor | None, processes: Processes) -> dict[str, float]:
    """Distance from the log-probs of the update to those of the draws, over the tokens of all processes."""
    behavior, mask = rollout.behavior_logprobs, rollout.mask
    assert behavior is not None
    stats = correction_stats(weights, rollout.logprobs, behavior, mask)
    return CorrectionStats(processes.sum(stats.sums), stats.weighted).metrics()


def text_metrics(batch: Batch, processes: Processes) -> dict[str, float]:
    """Diversity metrics over the completions of all processes.

    Returns:
        `distinct`, the share of distinct texts; `distinct_2`, the share of distinct token bigrams; and `repetition`,
        the share of bigrams that repeat one of the same completion; the last two are NaN without a bigram.
    """
    rollout, device = batch.rollout, batch.rollout.mask.device
    hashes = text_hashes(batch.prompts.texts, batch.completions).to(device)
    number, pairs, distinct_in_rows = token_pairs(rollout.response_ids, rollout.mask)
    counts = [float(x) for x in (len(rollout.mask), number, distinct_in_rows)]
    rows, all_pairs, distinct_in_all_rows = processes.sum(torch.tensor(counts, device=device)).tolist()
    return {
        "distinct": distinct_over_processes(hashes, processes) / rows,
        "distinct_2": distinct_over_processes(pairs, processes) / (all_pairs or math.nan),
        "repetition": (all_pairs - distinct_in_all_rows) / (all_pairs or math.nan),
    }


def text_hashes(prompts: Sequence[str], completions: Sequence[str]) -> Tensor:
    """A hash of 63 bits of each prompt with its completion, the same in every process, `[n]`."""
    texts = [json.dumps(pair).encode() for pair in zip(prompts, completions, strict=True)]
    digests = [blake2b(text, digest_size=8).digest() for text in texts]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.long)


def token_pairs(ids: Tensor, mask: Tensor) -> tuple[int, Tensor, int]:
    """The number of token bigrams, the distinct ones as one integer each, and the number distinct within their row.

    `ids` `[batch, time]` are int64 and below 2³¹.
    """
    both = mask[:, 1:] & mask[:, :-1]
    pairs = ((ids[:, :-1] << 32) + ids[:, 1:])[both]
    in_rows = torch.stack([both.nonzero()[:, 0], pairs], dim=1).unique(dim=0)
    return len(pairs), pairs.unique(), len(in_rows)


def distinct_over_processes(numbers: Tensor, processes: Processes) -> int:
    """Number of distinct numbers over all processes, from those of this one, `[n]`, which are not negative."""
    gathered = processes.gather(numbers)
    return len(gathered[gathered >= 0].unique())
