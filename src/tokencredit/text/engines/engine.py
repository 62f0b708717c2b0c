"""The `Engine` protocol and the `Rollout` that an engine returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.masked import extents
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.detokenizer import Detokenizer
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.precision import Precision

FAILURES = (EngineLost, RunStopped, OSError, ConfigError)
"""Errors of sampling that are those of all processes, ordered by severity."""


@dataclass
class Rollout:
    """Prompts `[batch, prompt]` and sampled completions `[batch, time]`, with per-token numbers."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    """True at sampled tokens, the end-of-sequence token included. A row's tokens run without gaps to its last sampled
    one; those in between that are false are an environment's."""
    logprobs: Tensor
    """Log-prob of each token under the policy at its temperature, in nats, before filters such as top_p. Under the
    policy that drew it, of an earlier update, if it has an `age` and no `behavior_logprobs`."""
    values: Tensor | None
    """Value of the state before each token; None if the engine did not compute it."""
    truncated: Tensor
    """`[batch]`, true if the completion reached the length limit, or the episode was cut off."""
    entropy: Tensor | None = None
    """Entropy of the distribution behind each log-prob, in nats; None without filters, where −log-prob estimates it."""
    turn_ends: Tensor | None = None
    """True at the last token of each turn; None if completions are single turns."""
    behavior_logprobs: Tensor | None = None
    """Log-prob with which the engine drew each token, by its own arithmetic and after filters such as top_p; None where
    that is `logprobs`."""
    versions: Tensor | None = None
    """Version of the weights that drew each token, −1 elsewhere; None if they did not change while it was sampled."""
    age: Tensor | None = None
    """Updates of the policy since each token was drawn, 0 elsewhere; None if there were none."""
    support: Tensor | None = None
    """`[batch, time, top_k]`, int32: ids of the tokens that filters left when each token was drawn, padded with −1;
    None if they are not kept."""

    def inputs(self) -> dict[str, Tensor]:
        """Inputs of `ActorCritic` for evaluating these responses again."""
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "response_ids": self.response_ids,
            "mask": self.mask,
        }

    def head(self, count: int) -> Rollout:
        """The first rows."""
        rows: dict[str, Any] = {name: None if x is None else x[:count] for name, x in vars(self).items()}
        return Rollout(**rows)

    def lengths(self) -> Tensor:
        """Length of each prompt plus its response, in tokens."""
        return self.prompt_mask.sum(1) + extents(self.mask)

    def response_lengths(self) -> Tensor:
        """Length of each response in tokens, those of an environment between turns included, `[batch]`."""
        return extents(self.mask)

    def columns(self, ref_logprobs: Tensor | None) -> dict[str, list[Any]]:
        """Extra columns for reward functions.

        `completion_ids`, the token ids after the prompt; `completion_mask`, with several turns, 1 at sampled tokens and
        0 at an environment's; `ref_logprobs`, log-probs of sampled tokens under the reference model, if there is one.
        """
        # One transfer from the device per tensor, not per row.
        rows, lengths = list(self.mask.cpu()), self.response_lengths().tolist()
        response_ids = zip(self.response_ids.cpu(), lengths, strict=True)
        columns: dict[str, list[Any]] = {"completion_ids": [ids[:length].tolist() for ids, length in response_ids]}
        if self.turn_ends is not None:
            masks = zip(rows, lengths, strict=True)
            columns["completion_mask"] = [mask[:length].int().tolist() for mask, length in masks]
        if ref_logprobs is not None:
            columns["ref_logprobs"] = [x[acted].tolist() for x, acted in zip(ref_logprobs.cpu(), rows, strict=True)]
        return columns

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions, detokenized after their prompts, without special tokens."""
        prompt_rows = zip(self.prompt_ids.cpu(), self.prompt_mask.cpu(), strict=True)
        prompts = [tuple(ids[mask].tolist()) for ids, mask in prompt_rows]
        detokenizers = {ids: Detokenizer(tokenizer, ids) for ids in dict.fromkeys(prompts)}
        rows = zip(prompts, self.response_ids.cpu(), self.response_lengths().tolist(), strict=True)
        return [detokenizers[prompt].text(ids[:length].tolist()) for prompt, ids, length in rows]

    def tokens(self, row: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The text of each token of a completion, special tokens included."""
        prompt = self.prompt_ids[row][self.prompt_mask[row]].tolist()
        return Detokenizer(tokenizer, prompt).tokens(self.response_ids[row, : self.response_lengths()[row]].tolist())


class Conversation(Protocol):
    """Turns of a batch of rows, each of which an environment may answer."""

    def sample(
        self,
        rows: Sequence[int],
        observations: Sequence[Sequence[int]],
        limits: Sequence[int],
        ended: Callable[[int], None],
    ) -> None:
        """Sample the next turn of some rows.

        Args:
            rows: indices of rows.
            observations: token ids that follow each row's last turn; empty before the first.
            limits: most tokens of each row's turn, at least 1; observation and turn fit into what is `left`.
            ended: called with a row when its turn has ended, if possible while others are still being sampled.
        """

    def left(self, row: int) -> int:
        """Tokens that are left of a row's `max_new_tokens`."""

    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""

    def tokens(self, row: int) -> list[int]:
        """All token ids of a row so far: prompt, turns and observations."""

    def end(self, row: int) -> None:
        """Free what a row keeps for further turns: its episode has ended."""

    def rollout(self) -> Rollout:
        """The rollout of all rows, with `turn_ends`; `truncated` is that of each row's last turn."""


class Engine(Protocol):
    """Samples completions from the policy, for training, evaluation and generation alike."""

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    precision: Precision
    budget: int | None
    """Tokens per micro-batch of a full forward pass, padding included; None for no limit."""
    in_step: Processes | None
    """Processes that make the passes of a rollout in step, since the policy is sharded over them; None without."""
    notes: Sequence[str]
    """Lines for the user on choices that were made for this model."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a prompt with its completion; None where the model alone limits them."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample a completion for each row of prompts.

        Log-probs are those of a full forward pass, so that an update's ratio starts at 1 up to rounding. The engine's
        own, after filters, are `behavior_logprobs`; an engine that may draw with others
        (`settings.rollout.differs_from_training`) always sets them.

        Args:
            prompts: one row per completion.
            settings: sampling settings and stop conditions.
            uniforms: `[batch, settings.max_new_tokens]`, random numbers in [0, 1). An engine with its own sampler
                derives seeds from them.
            per_prompt: number of consecutive rows with the same prompt; it divides the batch.
            started: first tokens of each completion, the same for all rows of a prompt; None starts from the prompts.
                Length limit and stop conditions count them as sampled, and their log-probs may be left unset. The
                context must fit prompt + longest start + limit − shortest start tokens.
        """

    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> Conversation:
        """Begin episodes of several turns, one per row; arguments as in `generate`.

        The stop conditions end a turn; `settings.max_new_tokens` limits all tokens of an episode after its prompt.
        """

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """A rollout of its sampler with log-probs, and values of a critic on the trunk, by a full forward pass."""

    def weights_changed(self) -> None:
        """Sync with the policy's weights; called in all processes after each update, before the next `generate`.

        Raises:
            EngineLost: the engine failed; `recover` tries again.
            RunStopped: its log-probs are not the policy's.
        """

    def recover(self) -> None:
        """Sync again if the engine was lost in some process; called in all, before they sample."""

    def agreed(self) -> AbstractContextManager[None]:
        """A context for sampling a rollout, in which a failure of one process is raised in all."""

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds a sharded policy whole, unless processes pass in step."""
