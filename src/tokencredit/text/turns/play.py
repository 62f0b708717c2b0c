"""Rollouts of several turns: the policy and the environments in turn, until every episode has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.environment import EnvironmentConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompt, PromptBatch
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.engine import Conversation, Engine, Rollout
from tokencredit.text.rewards.texts import content
from tokencredit.text.turns.chat.framing import ChatFraming, Framing, TextFraming
from tokencredit.text.turns.environments import Environments
from tokencredit.text.turns.episode import TERMINATED, Ending, Episode, Message, Reply, Turn
from tokencredit.text.turns.observations import fit
from tokencredit.text.user_code.workers import Workers


class Span(NamedTuple):
    """Tokens of one speaker, `start` to `end − 1` of those after the prompt."""

    role: str
    start: int
    end: int


@dataclass
class Transcript:
    """One episode as it happened."""

    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    """The reply to each turn."""
    spans: list[Span] = field(default_factory=list)
    """All tokens after the prompt, in order."""
    ending: Ending | None = None
    unfit: tuple[int, int] | None = None
    """Tokens of an observation that did not fit, and of the room for it."""
    following: list[int] = field(default_factory=list)
    """Tokens of the observation after the last turn, if the turns ran out and another would have fit."""

    def completion(self, prompt: Prompt, text: str) -> str | list[Message]:
        """The episode after its prompt, as reward functions receive it: the text, or all messages in order."""
        if isinstance(prompt, str):
            return text
        messages: list[Message] = []
        for turn, reply in zip(self.turns, self.replies, strict=True):
            messages.append(turn.message or {"role": "assistant", "content": turn.text})
            messages += _messages(reply)
        return messages

    def turn_rewards(self) -> list[tuple[int, float]]:
        """Number of sampled tokens and reward of each turn."""
        return [(len(turn.ids), reply.reward or 0.0) for turn, reply in zip(self.turns, self.replies, strict=True)]

    def after(self) -> str:
        """The text of the observation after the last turn, which is not among the tokens."""
        return text_of(self.replies[-1])


class Played(NamedTuple):
    """A batch of episodes."""

    prompts: PromptBatch
    rollout: Rollout
    transcripts: list[Transcript]


@dataclass
class Framings:
    """The framing of plain texts, and that of conversations once there is one."""

    text: TextFraming
    chat: Callable[[], ChatFraming]
    """Checks the tokenizer's chat template; called once at most."""
    _chat: ChatFraming | None = None

    def of(self, prompts: Sequence[Prompt]) -> Framing:
        """The framing of a batch of prompts.

        Raises:
            ConfigError: there are texts and conversations, or the chat template cannot be used.
        """
        texts = {isinstance(prompt, str) for prompt in prompts}
        if len(texts) > 1:
            raise ConfigError("reset gave plain texts and conversations; all prompts of a run must be of one kind")
        if texts == {True}:
            return self.text
        self._chat = self._chat or self.chat()
        return self._chat

    @classmethod
    def build(
        cls, tokenizer: PreTrainedTokenizerBase, environments: Environments, config: PromptsConfig, ends: Sequence[int]
    ) -> Framings:
        """The framings of a run; raises `ConfigError` for a chat template that does not take the tools."""
        chat = partial(ChatFraming, tokenizer, config, uses_tools=environments.needs_tools, end_ids=ends)
        return cls(TextFraming(tokenizer, config), chat, chat() if environments.needs_tools else None)


@dataclass
class Player:
    """Plays episodes with an engine."""

    engine: Engine
    framings: Framings
    environments: Environments
    config: EnvironmentConfig
    longest_prompt: Callable[[int], int | None]
    """Longest prompt that leaves room for this number of tokens; None for no limit."""
    workers: Workers = field(default_factory=Workers)

    def play(self, tasks: TaskBatch, settings: SamplingConfig, uniforms: Tensor) -> Played:
        """Play an episode for each row of tasks.

        Args:
            tasks: rows and seeds.
            settings: sampling settings; `max_new_tokens` counts all tokens of an episode after its prompt.
            uniforms: `[batch, settings.max_new_tokens]`, random numbers in [0, 1).

        Raises:
            ConfigError: user code cannot begin an episode.
            RunStopped: the prompt of an episode is too long.
        """
        episodes = self.environments.begin(tasks.rows, tasks.seeds)
        starts = [self.workers.submit(episode.start) for episode in episodes]
        prompted = [start.result() for start in starts]
        framing = self.framings.of(prompted)
        prompts = self._prompts(framing, prompted, episodes, tasks, self.longest_prompt(settings.max_new_tokens))
        conversation = self.engine.converse(prompts, settings, uniforms)
        transcripts = [Transcript(episode) for episode in episodes]
        Game(self, framing, conversation, transcripts).play()
        rollout = conversation.rollout()
        terminated = [transcript.ending in TERMINATED for transcript in transcripts]
        truncated = ~torch.tensor(terminated, device=rollout.mask.device)
        return Played(prompts, replace(rollout, truncated=truncated), transcripts)

    def _prompts(
        self,
        framing: Framing,
        prompts: list[Prompt],
        episodes: Sequence[Episode],
        tasks: TaskBatch,
        longest: int | None,
    ) -> PromptBatch:
        """Tokenize the prompts of episodes."""
        framed = [framing.prompt(prompt, episode.tools) for prompt, episode in zip(prompts, episodes, strict=True)]
        ids = [row for _, row in framed]
        for row in ids:
            if not row or (longest is not None and len(row) > longest):
                most = "" if longest is None else f", and at most {longest}, so that max_new_tokens fit beside it"
                raise RunStopped(f"the prompt of an episode has {len(row)} tokens; it must have at least one{most}")
        width = max(map(len, ids))
        return PromptBatch(
            prompts=prompts,
            texts=[text for text, _ in framed],
            ids=torch.tensor([[0] * (width - len(row)) + row for row in ids]),
            mask=torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids]),
            columns=tasks.columns,
        )


class Game:
    """The episodes of one batch: turns are sampled together, replies computed in threads."""

    def __init__(self, player: Player, framing: Framing, conversation: Conversation, transcripts: Sequence[Transcript]):
        """Start before the first turns."""
        self.player, self.framing, self.conversation, self.transcripts = player, framing, conversation, transcripts
        self.pending: dict[int, Future[Reply]] = {}
        self.cut: dict[int, bool] = {}
        """Rows whose turn was cut at its limit."""
        self.late: set[Future[Reply]] = set()
        """Replies that came too late for a batch, for which no batch waits again."""

    def play(self) -> None:
        """Play until every episode has ended."""
        ready: dict[int, list[int]] = {row: [] for row in range(len(self.transcripts))}
        while ready or self.pending:
            if ready:
                self._sample(ready)
            ready = self._continue()

    def _sample(self, observations: dict[int, list[int]]) -> None:
        """Sample the next turn of these rows, after their observations."""
        most, rows = self.player.config.turn_tokens, list(observations)
        left = [self.conversation.left(row) - len(observations[row]) for row in rows]
        limits = left if most is None else [min(most, room) for room in left]
        for row in rows:
            self._span(row, observations[row])
        begun = {row: len(self.conversation.tokens(row)) + len(observations[row]) for row in rows}
        self.conversation.sample(rows, list(observations.values()), limits, partial(self._ended, begun))

    def _span(self, row: int, observation: Sequence[int]) -> None:
        """Record the tokens of an observation."""
        spans = self.transcripts[row].spans
        if observation:
            spans.append(
                Span(_role(self.transcripts[row].replies[-1]), spans[-1].end, spans[-1].end + len(observation))
            )

    def _ended(self, begun: dict[int, int], row: int) -> None:
        """A turn has ended: parse it, and ask for the reply in a thread."""
        transcript = self.transcripts[row]
        ids, self.cut[row] = self.conversation.turn(row)
        prefix = self.conversation.tokens(row)[: begun[row]]
        turn = self.framing.parse(ids, prefix, transcript.episode.tools)
        start = transcript.spans[-1].end if transcript.spans else 0
        transcript.spans.append(Span("assistant", start, start + len(ids)))
        transcript.turns.append(turn)
        self.pending[row] = self.player.workers.submit(transcript.episode.reply, turn)

    def _continue(self) -> dict[int, list[int]]:
        """Wait for replies; returns the observations of the rows that have another turn.

        Replies that come within `env.patience` are taken together, in the order of the rows, so that the batches, and
        with them the rounding of log-probs, do not depend on the threads.
        """
        if not self.pending:
            return {}
        wait(set(self.pending.values()) - self.late, self.player.config.patience)
        done, self.late = wait(self.pending.values(), 0)
        if not done:
            done, self.late = wait(self.late, return_when=FIRST_COMPLETED)
        rows = sorted(row for row, reply in self.pending.items() if reply in done)
        ready: dict[int, list[int]] = {}
        for row in rows:
            observation = self._reply(row, self.pending.pop(row).result())
            if observation is None:
                self.conversation.end(row)
            else:
                ready[row] = observation
        return ready

    def _reply(self, row: int, reply: Reply) -> list[int] | None:
        """Record a reply; returns the tokens of its observation, or None at the end of the episode."""
        transcript, config = self.transcripts[row], self.player.config
        reply = fit(reply, config.observation_tokens, self.player.framings.text.tokenizer)
        transcript.replies.append(reply)
        left, cut = self.conversation.left(row), self.cut.pop(row)
        if reply.ending is not None:
            # A text that was cut before its end is no answer.
            transcript.ending = "length" if reply.ending == "answer" and cut else reply.ending
            return None
        ids = self.framing.observation(reply.observation, transcript.turns[-1])
        fits = len(ids) < left
        if len(transcript.turns) == config.max_turns:
            transcript.ending, transcript.following = "max_turns", ids if fits else []
            return None
        if not fits:
            transcript.ending, transcript.unfit = "length", (len(ids), left)
            return None
        return ids


def text_of(reply: Reply) -> str:
    """The text of a reply's observation."""
    observation = reply.observation
    return observation if isinstance(observation, str) else "\n".join(content(message) for message in observation)


def _messages(reply: Reply) -> list[Message]:
    """The observation of a reply as messages."""
    if isinstance(reply.observation, str):
        return [{"role": "user", "content": reply.observation}] if reply.observation else []
    return list(reply.observation)


def _role(reply: Reply) -> str:
    """The speaker of a reply's observation."""
    if isinstance(reply.observation, str) or not reply.observation:
        return "environment"
    return str(reply.observation[0]["role"])


def columns(transcripts: Sequence[Transcript]) -> dict[str, list[Any]]:
    """Columns of episodes for reward functions."""
    return {
        "environments": [transcript.episode.environment for transcript in transcripts],
        "turn_rewards": [transcript.turn_rewards() for transcript in transcripts],
    }
