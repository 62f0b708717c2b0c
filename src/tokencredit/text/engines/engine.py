"""What a rollout engine is: prompts, settings and random numbers in, a rollout out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.settings.training import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.detokenizer import Detokenizer


@dataclass
class Rollout:
    """Prompts and what was sampled after them; `[batch, prompt]`, `[batch, time]` and `[batch]`."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    """True at sampled tokens, the end-of-sequence token included."""
    logprobs: Tensor
    """Of each token under the policy at its temperature, nats; filters such as top_p do not enter."""
    values: Tensor | None
    """Of the state before each token; None where the engine's passes did not compute them."""
    truncated: Tensor
    """`[batch]`, true where the length limit came before an end."""
    entropy: Tensor | None = None
    """Of the distribution that each token's log-probability is of, nats; None where that is the one it was drawn from,
    so that −log-probability estimates it."""

    def inputs(self) -> dict[str, Tensor]:
        """What `ActorCritic` needs to evaluate these responses again."""
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "response_ids": self.response_ids,
            "mask": self.mask,
        }

    def head(self, count: int) -> Rollout:
        """The first rows."""
        rows: dict[str, Any] = {name: x if x is None else x[:count] for name, x in vars(self).items()}
        return Rollout(**rows)

    def lengths(self) -> Tensor:
        """Tokens of each prompt and its response."""
        return self.prompt_mask.sum(1) + self.mask.sum(1)

    def columns(self, ref_logprobs: Tensor | None) -> dict[str, list[Any]]:
        """Columns for reward functions beside the texts: token ids, and log-probabilities under the reference."""
        rows = list(self.mask)
        columns = {"completion_ids": [ids[acted].tolist() for ids, acted in zip(self.response_ids, rows, strict=True)]}
        if ref_logprobs is not None:
            columns["ref_logprobs"] = [x[acted].tolist() for x, acted in zip(ref_logprobs, rows, strict=True)]
        return columns

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions without special tokens, each as it reads after its prompt."""
        prompts = [tuple(ids[own].tolist()) for ids, own in zip(self.prompt_ids, self.prompt_mask, strict=True)]
        readers = {ids: Detokenizer(tokenizer, ids) for ids in dict.fromkeys(prompts)}
        rows = zip(prompts, self.response_ids, self.mask, strict=True)
        return [readers[prompt].text(ids[acted].tolist()) for prompt, ids, acted in rows]

    def tokens(self, row: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The text of each token of a completion, special ones included."""
        prompt = self.prompt_ids[row][self.prompt_mask[row]].tolist()
        return Detokenizer(tokenizer, prompt).tokens(self.response_ids[row][self.mask[row]].tolist())


class Engine(Protocol):
    """Samples completions from the policy. Everything that samples goes through one."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample a completion for each row of prompts.

        The log-probabilities are those that a full pass of the policy gives, so that an update's ratio starts at 1 up
        to rounding.

        Args:
            prompts: one row per completion.
            settings: how to draw and when to stop.
            uniforms: `[batch, settings.max_new_tokens]`, in [0, 1): the randomness. An engine that draws by itself
                takes its seeds from them.
            per_prompt: consecutive rows with the same prompt; it divides the batch.
            started: first tokens of each completion, the same in rows of one prompt, after which sampling goes on:
                each completion is as long, and ends, as if it had drawn them. Their log-probs in the rollout need not
                be filled in. An engine may hold prompt + longest start + limit − shortest start tokens. None for none.
        """

    def weights_changed(self) -> None:
        """Take the policy's weights as they are now; called after each update, before the next `generate`."""
