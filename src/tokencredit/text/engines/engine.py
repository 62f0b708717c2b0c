"""What all engines are: `Engine`, and `Conversation` for episodes of several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import gathered
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout, unpadded
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.precision import Precision

FAILURES = (EngineLost, RunStopped, OSError, ConfigError)
"""Errors of sampling that are those of all processes, ordered by severity."""

OnTurn = Callable[[int], None]
"""Called with a row whose turn has ended."""


class Conversation(ABC):
    """Turns of a batch of rows, each of which an environment may answer."""

    def __init__(self, prompts: PromptBatch, settings: SamplingConfig):
        """Start before the first turns; arguments as in `Engine.converse`."""
        self.prompts, self.settings = prompts, settings
        self.prompt_ids: list[list[int]] = unpadded(prompts.ids, prompts.mask)
        self.begun = [0] * len(self.prompt_ids)
        """Tokens of each row's next turn that `begin` has given."""

    def begin(self, started: Sequence[Sequence[int]], turns: Sequence[int]) -> None:
        """Give each row its first tokens after the prompt, before anything is sampled.

        Those from index `turns` of a row on begin its next turn, and count as sampled; the others are earlier turns and
        observations. Their log-probs, and all else of them in the rollout, may be unset.
        """
        self.begun = [len(ids) - turn for ids, turn in zip(started, turns, strict=True)]

    @abstractmethod
    def sample(
        self, rows: Sequence[int], observations: Sequence[Sequence[int]], limits: Sequence[int], ended: OnTurn
    ) -> None:
        """Sample the next turn of some rows.

        Args:
            rows: indices of rows.
            observations: token ids that follow each row's last turn; empty before the first.
            limits: most tokens of each row's turn, at least 1; observation and turn fit into what is `left`.
            ended: called when a turn has ended, if possible while others are still being sampled.
        """

    def left(self, row: int) -> int:
        """Tokens that are left of a row's `max_new_tokens`."""
        return self.settings.max_new_tokens - len(self.ids(row))

    @abstractmethod
    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""

    @abstractmethod
    def ids(self, row: int) -> list[int]:
        """All token ids of a row after its prompt: turns and observations."""

    def tokens(self, row: int) -> list[int]:
        """All token ids of a row so far: prompt, turns and observations."""
        return self.prompt_ids[row] + self.ids(row)

    def end(self, row: int) -> None:  # noqa: ARG002
        """Free what a row keeps for further turns: its episode has ended."""
        return

    @abstractmethod
    def rollout(self) -> Rollout:
        """The rollout of all rows, with `turn_ends`; `truncated` is that of each row's last turn."""


@dataclass
class Engine(ABC):
    """Samples completions from the policy, for training, evaluation and generation alike."""

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    precision: Precision
    budget: int | None = None
    """Tokens per micro-batch of a full forward pass, padding included; None for no limit."""
    in_step: Processes | None = None
    """Processes that make the passes of a rollout in step, since the policy is sharded over them and gathered layer by
    layer; None without."""
    processes: Processes = field(default_factory=Processes)
    """Processes that sample and sync together, and fail together if one of them cannot."""
    notes: Sequence[str] = ()
    """Lines for the user on choices that were made for this model."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a prompt with its completion; None where the model alone limits them."""
        return None

    @abstractmethod
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

    @abstractmethod
    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> Conversation:
        """Begin episodes of several turns, one per row; arguments as in `generate`.

        The stop conditions end a turn; `settings.max_new_tokens` limits all tokens of an episode after its prompt.
        """

    @abstractmethod
    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """A rollout of its sampler with log-probs, and values of a critic on the trunk, by a full forward pass."""

    def weights_changed(self) -> None:
        """Sync with the policy's weights; called in all processes after each update, before the next `generate`.

        Raises:
            EngineLost: the engine failed; `recover` tries again.
            RunStopped: its log-probs are not the policy's.
        """
        return

    def recover(self) -> None:
        """Sync again if the engine was lost in some process; called in all, before they sample."""
        return

    @abstractmethod
    def agreed(self) -> AbstractContextManager[None]:
        """A context for sampling a rollout, in which a failure of one process is raised in all."""

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds a sharded policy whole, unless processes pass in step."""
        return gathered(self.policy.lm) if self.in_step is None else nullcontext()
