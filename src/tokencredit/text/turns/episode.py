"""Turns of the policy, and an environment's replies to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.instances import Instance

Message = dict[str, Any]
"""A message of a conversation: a role and a content, and for an assistant's calls `tool_calls`."""
Ending = Literal["done", "answer", "max_turns", "length", "error"]
"""The end of an episode: the environment was done; a turn had no tool call; `env.max_turns` or the tokens were spent,
also those of a turn without a call (`env.turn_tokens`); the environment failed. The first two terminate an episode, the
others truncate it."""
TERMINATED: tuple[Ending, ...] = ("done", "answer")
Problem = Literal["malformed", "failed", "timeout", "cut"]
"""Problem with a turn: a tool call that could not be parsed, a call that raised, one that exceeded its timeout, an
observation that was cut."""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    ids: Sequence[int]
    """The sampled token ids, the end-of-turn token included."""
    text: str
    """Their text, without special tokens."""
    message: Message | None = None
    """The assistant's message, with parsed `tool_calls`; None if prompts are plain texts."""
    malformed: str | None = None
    """What is wrong with a tool call that could not be parsed; None if there is no such call."""


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a turn."""

    observation: str | Sequence[Message] = ()
    """A text that continues plain texts, or messages with the roles `tool` and `user`; may be empty at the end."""
    reward: float | None = None
    """Reward of the turn; None if the environment pays none by turn."""
    ending: Ending | None = None
    """None if the policy has another turn."""
    problems: tuple[Problem, ...] = ()


class Episode(Protocol):
    """One episode of an environment with its tools. Its methods run the user's code, and are called in threads."""

    environment: Any
    """The environment, for reward functions that ask for `environments`; None if there are only tools."""
    tools: Sequence[Callable[..., Any]]
    """Functions and methods that the policy may call; the prompt's chat template describes them."""

    @property
    def instance(self) -> Instance | None:
        """The holder of its environment; None if there are only tools."""

    def start(self) -> Prompt:
        """Reset the environment; returns the prompt: a plain text, or messages."""

    def reply(self, turn: Turn) -> Reply:
        """The environment's or the tools' reply to a turn, within `env.timeout`; never raises for the user's code."""
