"""Prompts and completions as reward terms receive them: plain texts, or lists of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Text = str | Sequence[dict[str, Any]]
"""A plain text, or messages `[{"role": …, "content": …}]`. A completion has the format of its prompt."""


def plain(text: Text) -> str:
    """A plain text unchanged; the contents of messages, one per line, without roles."""
    return text if isinstance(text, str) else "\n".join(map(content, text))


def content(message: dict[str, Any]) -> str:
    """The text of a message, whose content is a string, blocks such as `{"type": "text", "text": "…"}`, or None."""
    blocks = message.get("content") or ""
    return blocks if isinstance(blocks, str) else "".join(block.get("text") or "" for block in blocks)


def joined(prompt: Text, completion: Text) -> str:
    """A prompt and its completion as one plain text, for models without a chat template."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return plain([*messages(prompt, "user"), *messages(completion, "assistant")])


def messages(text: Text, role: str) -> list[dict[str, Any]]:
    """Messages unchanged; a plain text as a single message with this role."""
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def last_message(prompt: Text) -> str:
    """A plain text unchanged; the text of a conversation's last user message, or last message without one."""
    if isinstance(prompt, str):
        return prompt
    return content(next((m for m in reversed(prompt) if m["role"] == "user"), prompt[-1]))


def prefilled(prompt: Text) -> bool:
    """True for a conversation whose last message is the assistant's, which the completion continues."""
    return not isinstance(prompt, str) and bool(prompt[-1]["role"] == "assistant")


def answer(prompt: Sequence[dict[str, Any]], text: str, completion: str) -> dict[str, Any]:
    """The assistant's message: the prefill, as rendered in `text`, followed by the completion."""
    if not prefilled(prompt):
        return {"role": "assistant", "content": completion}
    prefill = content(prompt[-1])
    stripped = prefill.rstrip()  # some templates strip it
    prefill = prefill if text.endswith(prefill[len(stripped) :]) else stripped
    return prompt[-1] | {"content": prefill + completion}
