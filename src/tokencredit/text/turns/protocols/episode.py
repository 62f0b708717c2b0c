"""Episodes: turns of the policy, an environment's replies, and their observations within bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from tokencredit.text.data.prompts import Prompt, is_conversation
from tokencredit.text.rewards.texts import content, plain
from tokencredit.text.turns.protocols.factories import Instance

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
CUT = " [cut]"
"""Mark at the end of an observation that was cut."""
CHARACTERS = 16
"""Characters kept per token that an observation may have; tokens are rarely longer."""


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

    def text(self) -> str:
        """The text of the observation."""
        return plain(self.observation)


class Episode(ABC):
    """One episode of an environment with its tools. `start` and `reply` run user code, and are called in threads."""

    def __init__(self, instance: Instance, row: Mapping[str, Any], tokens: int):
        """Keep an environment, the arguments of its `reset`, and the longest observation in tokens."""
        self.instance, self.row, self._tokens = instance, row, tokens
        self.environment: Any = None
        """The environment, for reward functions that ask for `environments`; None if there are only functions."""
        self.tools: Sequence[Callable[..., Any]] = ()
        """Functions and methods that the policy may call; the prompt's chat template describes them."""

    @abstractmethod
    def start(self) -> Prompt:
        """Reset the environment with the row; returns the prompt."""

    def reply(self, turn: Turn) -> Reply:
        """The reply to a turn, with an observation within bounds; user code that fails raises nothing here."""
        return bounded(self.answer(turn), self._tokens)

    @abstractmethod
    def answer(self, turn: Turn) -> Reply:
        """The reply to a turn, with an observation of any length."""


def as_text(result: Any) -> str:
    """A result as text: texts and lists of text blocks as they are, anything else by `str`."""
    return content({"content": result}) if is_text_blocks(result) else str(result)


def shorten(text: str, tokens: int) -> tuple[str, bool]:
    """A text of at most 16 characters per token, without lone surrogates, which no tokenizer takes; true if cut."""
    limit = CHARACTERS * tokens
    return _encodable(text if len(text) <= limit else text[:limit] + CUT), len(text) > limit


def bounded(reply: Reply, tokens: int) -> Reply:
    """A reply whose texts have at most 16 characters per token, without lone surrogates; marked if one was cut."""
    if not reply.observation:
        return reply
    if isinstance(reply.observation, str):
        text, cut = shorten(reply.observation, tokens)
        return replaced(reply, text, cut)
    texts = [shorten(message["content"], tokens) for message in reply.observation]
    messages = [{**message, "content": text} for message, (text, _) in zip(reply.observation, texts, strict=True)]
    return replaced(reply, clean_messages(messages), any(cut for _, cut in texts))


def replaced(reply: Reply, observation: str | list[Message], cut: bool) -> Reply:
    """A reply with another observation, and with the problem `cut` if it was cut."""
    problems = tuple(dict.fromkeys((*reply.problems, "cut"))) if cut else reply.problems
    return replace(reply, observation=observation, problems=problems)


def readable(prompt: Any) -> bool:
    """True for a text, and for messages each of which has a role and a text, or tool calls."""
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    return is_conversation(prompt) and all(_has_text(message) or message.get("tool_calls") for message in prompt)


def clean(prompt: Prompt) -> Prompt:
    """A prompt without lone surrogates, and without keys that are None, which Arrow tables fill in."""
    return _encodable(prompt) if isinstance(prompt, str) else clean_messages(prompt)


def clean_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages without lone surrogates, and without keys that are None."""
    return [{key: _encodable(value) for key, value in message.items() if value is not None} for message in messages]


def _encodable(value: Any) -> Any:
    """A text, or the texts inside a list or dict, without lone surrogates."""
    if isinstance(value, dict):
        return {_encodable(key): _encodable(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_encodable(x) for x in value]
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value


def fit(reply: Reply, tokens: int, tokenizer: PreTrainedTokenizerBase) -> Reply:
    """A reply whose observation has at most so many tokens, not counting the chat template's own.

    What is longer is cut from its end and marked as cut; messages after the limit are only the mark. Not for threads
    that share the tokenizer.
    """
    if isinstance(reply.observation, str):
        short: str | list[Message] = _cut(reply.observation, tokens, tokenizer)[0]
        unchanged = short == reply.observation
    else:
        short = []
        for message in reply.observation:
            text, used = _cut(content(message), tokens, tokenizer)
            tokens -= used
            short.append(message if text == content(message) else {**message, "content": text})
        unchanged = short == list(reply.observation)
    return reply if unchanged else replaced(reply, short, cut=True)


def _cut(text: str, tokens: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """A text of at most so many tokens, or the mark alone; and how many it has."""
    count = _count(text, tokenizer)
    if count <= tokens:
        return text, count
    body = text.removesuffix(CUT)
    low, high = 0, len(body)
    while low < high:  # the longest beginning that fits together with the mark
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _count(body[:middle] + CUT, tokenizer) <= tokens else (low, middle - 1)
    cut = body[:low] + CUT
    return cut, min(tokens, _count(cut, tokenizer))


def _count(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def is_text_blocks(value: Any) -> bool:
    """True for a list of text blocks, as in the content of a message."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str) for x in value)


def _has_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str) or is_text_blocks(message.get("content"))


def appended(prompt: Prompt, text: str) -> Prompt:
    """A prompt with a text appended to its last message."""
    if isinstance(prompt, str):
        return prompt + text
    last = prompt[-1]
    parts = last.get("content") or ""
    content = parts + text if isinstance(parts, str) else [*parts, {"type": "text", "text": text}]
    return [*prompt[:-1], {**last, "content": content}]


def messages_of(observation: Any) -> list[Message] | None:
    """The messages of an observation with the roles `user` and `tool`; None if it has another form."""
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return None
    if not all(isinstance(m, dict) and m.get("role") in ("user", "tool") and _has_text(m) for m in messages):
        return None
    return [{**message, "content": content(message)} for message in messages]
