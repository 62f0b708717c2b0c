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

from tokencredit.errors import RunStopped
from tokencredit.settings.data import EnvironmentConfig, PromptsConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompt, PromptBatch, check_prompt_settings
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.engine import Conversation, Engine
from tokencredit.text.turns.chat.framing import ChatFraming, Framing, TextFraming
from tokencredit.text.turns.environments import Environments
from tokencredit.text.turns.episode_record import Span, Transcript, episode_record
from tokencredit.text.turns.protocols.episode import TERMINATED, Episode, Reply, fit
from tokencredit.text.turns.protocols.factories import EnvironmentFailed
from tokencredit.text.turns.replay import EpisodeStart, Replayed, replay, require_equal
from tokencredit.user_code.workers import Workers

PATIENCE = 1.0
"""Seconds that episodes whose replies have come wait for the others, so that they continue as one batch."""


class PlayedBatch(NamedTuple):
    """A batch of episodes."""

    prompts: PromptBatch
    rollout: Rollout
    transcripts: list[Transcript]

    def record(self, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """An episode in the fields of a sample's record that need no scores: prompt, tokens, mask, turns, ending."""
        length = int(self.rollout.response_lengths()[row])
        shown = {"prompt": self.prompts.texts[row], "tokens": self.rollout.tokens(row, tokenizer)}
        return shown | {"mask": self.rollout.mask[row, :length].int().tolist()} | episode_record(self.transcripts[row])


class Framings:
    """The framing of plain texts, and that of conversations once there is one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, environments: Environments, config: PromptsConfig, ends: Sequence[int]
    ):
        """Check the tokenizer's chat template now if there are tools, and else with the first conversation."""
        check_prompt_settings(tokenizer, config)
        self.text = TextFraming(tokenizer, config)
        self._build_chat = partial(ChatFraming, tokenizer, config, uses_tools=bool(environments.tools), end_ids=ends)
        self._chat = self._build_chat() if environments.tools else None

    def of(self, prompts: Sequence[Prompt]) -> Framing:
        """The framing of a batch of prompts, which must be all texts or all conversations."""
        texts = {isinstance(prompt, str) for prompt in prompts}
        if len(texts) > 1:
            raise EnvironmentFailed(
                "reset gave plain texts and conversations; all prompts of a run must be of one kind"
            )
        if texts == {True}:
            return self.text
        self._chat = self._chat or self._build_chat()
        return self._chat


@dataclass
class EpisodePlayer:
    """Plays episodes with an engine."""

    engine: Engine
    framings: Framings
    environments: Environments
    config: EnvironmentConfig
    longest_prompt: Callable[[int], int | None]
    """Longest prompt that leaves room for this number of tokens; None for no limit."""
    workers: Workers = field(default_factory=Workers)

    def play(self, tasks: TaskBatch, settings: SamplingConfig, uniforms: Tensor) -> PlayedBatch:
        """Play an episode for each row of tasks.

        `settings.max_new_tokens` counts all tokens of an episode after its prompt; `uniforms` are
        `[batch, settings.max_new_tokens]`, random numbers in [0, 1).
        """
        # Reset all environments at once, in threads: each gives its prompt.
        episodes = self.environments.begin(tasks.rows, tasks.seeds)
        starts = [self.workers.submit(episode.start) for episode in episodes]
        prompted = [start.result() for start in starts]
        framing = self.framings.of(prompted)
        prompts = self._prompts(framing, prompted, episodes, tasks.columns, settings.max_new_tokens)
        # Play turns and replies until every episode has ended.
        conversation = self.engine.converse(prompts, settings, uniforms)
        transcripts = [Transcript(episode) for episode in episodes]
        return self._finished(prompts, EpisodeState(self, framing, conversation, transcripts))

    def resume(
        self,
        prompts: PromptBatch,
        starts: Sequence[EpisodeStart],
        started: Sequence[Tensor],
        settings: SamplingConfig,
        uniforms: Tensor,
    ) -> PlayedBatch:
        """Replay recorded episodes up to a state, and go on from there; other arguments as in `play`.

        `started` are the tokens before the states, whose mask and numbers are unset in the rollout. Raises
        `NotReplayed` if the environment answers otherwise than in the record.
        """
        transcripts, turns, _ = self.replay(starts)
        conversation = self.engine.converse(prompts, settings, uniforms)
        conversation.begin([tokens.tolist() for tokens in started], turns)
        state = EpisodeState(self, self.framings.of(prompts.prompts), conversation, transcripts)
        for row, (start, begun) in enumerate(zip(starts, transcripts, strict=True)):
            if len(begun.turns) > len(begun.replies):
                # A text that was cut at its limit, as `_record` has it.
                recorded = start.transcript
                answered = recorded.replies[len(begun.replies)].ending == "answer"
                state.ask(row, cut=recorded.ending == "length" and answered)
        return self._finished(prompts, state)

    def replay(self, starts: Sequence[EpisodeStart]) -> tuple[list[Transcript], list[int], list[Replayed]]:
        """Replay recorded episodes up to a state, in threads.

        Returns transcripts up to there, of environments that are there too, the first token of each one's next turn,
        and the environment's answers. Raises `NotReplayed` if they are not those of the record.
        """
        episodes = self.environments.repeat(start.transcript.episode for start in starts)
        transcripts, turns = zip(*map(EpisodeStart.begin, starts, episodes), strict=True)
        calls = [
            self.workers.submit(replay, episode, begun, start.seed)
            for start, episode, begun in zip(starts, episodes, transcripts, strict=True)
        ]
        replayed = [call.result() for call in calls]
        tokenizer = self.framings.text.tokenizer
        for answers, start, begun in zip(replayed, starts, transcripts, strict=True):
            require_equal(answers, start, begun, self.config.observation_tokens, tokenizer)
        return list(transcripts), list(turns), replayed

    def _finished(self, prompts: PromptBatch, state: EpisodeState) -> PlayedBatch:
        state.play()
        # An episode that neither the environment nor an answer ended is cut off, and worth its bootstrap.
        rollout = state.conversation.rollout()
        terminated = [transcript.ending in TERMINATED for transcript in state.transcripts]
        truncated = ~torch.tensor(terminated, device=rollout.mask.device)
        return PlayedBatch(prompts, replace(rollout, truncated=truncated), state.transcripts)

    def _prompts(
        self,
        framing: Framing,
        prompts: list[Prompt],
        episodes: Sequence[Episode],
        columns: dict[str, list[Any]],
        max_new_tokens: int,
    ) -> PromptBatch:
        texts, ids, longest = [], [], self.longest_prompt(max_new_tokens)
        for prompt, episode in zip(prompts, episodes, strict=True):
            text, row = framing.prompt(prompt, episode.tools)
            if not row or (longest is not None and len(row) > longest):
                advice = f"; lower max_new_tokens ({max_new_tokens}) or shorten the prompt"
                limit = "" if longest is None else f", and at most {longest}{advice}"
                raise RunStopped(f"the prompt of an episode has {len(row)} tokens; it must have at least one{limit}")
            texts.append(text)
            ids.append(row)
        return PromptBatch.padded(prompts, texts, ids, columns)


class EpisodeState:
    """The episodes of one batch: turns are sampled together, replies computed in threads."""

    def __init__(
        self, player: EpisodePlayer, framing: Framing, conversation: Conversation, transcripts: Sequence[Transcript]
    ):
        self.player, self.framing, self.conversation = player, framing, conversation
        self.transcripts = list(transcripts)
        self.pending: dict[int, Future[Reply]] = {}
        self.cut: dict[int, bool] = {}
        """Rows whose turn was cut at its limit."""
        self.late: set[Future[Reply]] = set()
        """Replies that came too late for a batch, for which no batch waits again."""

    def play(self) -> None:
        """Play until every episode has ended."""
        ready: dict[int, list[int]] = {row: [] for row in range(len(self.transcripts)) if row not in self.pending}
        while ready or self.pending:
            if ready:
                self._sample(ready)
            ready = self._receive()

    def _sample(self, observations: dict[int, list[int]]) -> None:
        """Sample the next turn of these rows, after their observations."""
        limit, rows, conversation = self.player.config.turn_tokens, list(observations), self.conversation
        limits = []
        starts: dict[int, int] = {}
        for row, observation in observations.items():
            transcript, count = self.transcripts[row], len(observation)
            if observation:
                end, reply = transcript.spans[-1].end, transcript.replies[-1]
                transcript.spans.append(Span(_role(reply), end, end + count))
            left, begun = conversation.left(row) - count, conversation.begun[row]
            limits.append(left if limit is None else min(limit - begun, left))
            starts[row] = len(conversation.tokens(row)) + count - begun
        conversation.sample(rows, list(observations.values()), limits, partial(self._ended, starts))

    def _ended(self, starts: dict[int, int], row: int) -> None:
        """A turn has ended: parse it, and ask for the reply."""
        transcript = self.transcripts[row]
        ids, cut = self.conversation.turn(row)
        prefix = self.conversation.tokens(row)[: starts[row]]
        turn = self.framing.parse(ids, prefix, transcript.episode.tools)
        start = transcript.spans[-1].end if transcript.spans else 0
        transcript.spans.append(Span("assistant", start, start + len(ids)))
        transcript.turns.append(turn)
        self.ask(row, cut=cut)

    def ask(self, row: int, *, cut: bool) -> None:
        """Ask for the reply to a row's last turn in a thread; `cut`: the turn was cut at its limit."""
        transcript = self.transcripts[row]
        self.cut[row] = cut
        self.pending[row] = self.player.workers.submit(transcript.episode.reply, transcript.turns[-1])

    def _receive(self) -> dict[int, list[int]]:
        """Wait for replies; returns the observations of the rows that have another turn.

        Replies that come within `PATIENCE` are taken together, in the order of the rows, so that the batches, and
        with them the rounding of log-probs, do not depend on the threads.
        """
        if not self.pending:
            return {}
        # Wait for all but late replies, and for a late one only if there is nothing else to do.
        wait(set(self.pending.values()) - self.late, PATIENCE)
        done, self.late = wait(self.pending.values(), 0)
        if not done:
            done, self.late = wait(self.late, return_when=FIRST_COMPLETED)
        ready: dict[int, list[int]] = {}
        for row in sorted(row for row, reply in self.pending.items() if reply in done):
            observation = self._record(row, self.pending.pop(row).result())
            if observation is None:
                self.conversation.end(row)
            else:
                ready[row] = observation
        return ready

    def _record(self, row: int, reply: Reply) -> list[int] | None:
        """Record a reply; returns the tokens of its observation, or None at the end of the episode."""
        transcript, config = self.transcripts[row], self.player.config
        if reply.ending != "error":  # which no policy reads
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
            transcript.ending, transcript.overflow = "length", (len(ids), left)
            return None
        return ids


def _role(reply: Reply) -> str:
    """The speaker of a reply's observation."""
    if isinstance(reply.observation, str) or not reply.observation:
        return "environment"
    return str(reply.observation[0]["role"])
