"""Observations within bounds: results as texts, cut first by characters and then by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tokencredit.text.data.prompts import Prompt, is_conversation
from tokencredit.text.rewards.texts import content
from tokencredit.text.turns.episode import Message, Reply

CUT = " [cut]"
"""Mark at the end of an observation that was cut."""
CHARACTERS = 16
"""Characters kept per token that an observation may have; tokens are rarely longer."""


def as_text(result: Any) -> str:
    """A result as text: texts and lists of text blocks as they are, anything else by `str`."""
    if is_text_blocks(result):
        return content({"content": result})
    return str(result)


def shorten(text: str, tokens: int) -> tuple[str, bool]:
    """A text of at most 16 characters per token, without lone surrogates, which no tokenizer takes; true if cut."""
    most = CHARACTERS * tokens
    return _encodable(text if len(text) <= most else text[:most] + CUT), len(text) > most


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
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return [{key: _encodable(value) if isinstance(value, str) else value for key, value in m.items()} for m in kept]


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def fit(reply: Reply, tokens: int, tokenizer: PreTrainedTokenizerBase) -> Reply:
    """A reply whose observation has at most so many tokens, not counting the chat template's own.

    What is longer is cut from its end and marked as cut; messages after the limit are only the mark. Not for threads
    that share the tokenizer.
    """
    observation = reply.observation
    if isinstance(observation, str):
        text, _ = _cut(observation, tokens, tokenizer)
        short: str | list[Message] = text
    else:
        short = []
        for message in observation:
            text, used = _cut(content(message), tokens, tokenizer)
            tokens -= used
            short.append(message if text == content(message) else {**message, "content": text})
    if short == (observation if isinstance(observation, str) else list(observation)):
        return reply
    return replace(reply, observation=short, problems=tuple(dict.fromkeys((*reply.problems, "cut"))))


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
    return isinstance(value, list) and bool(value) and all(map(_is_text_block, value))


def _is_text_block(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


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
    found = [observation] if isinstance(observation, dict) else observation
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(map(_is_message, found)):
        return None
    return [{**message, "content": content(message)} for message in found]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("user", "tool") and _has_text(message)


def _has_text(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str) or is_text_blocks(message.get("content"))
