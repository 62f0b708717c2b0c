"""Prompts and completions as reward terms see them: plain texts, or lists of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Text = str | Sequence[dict[str, Any]]
"""A plain text, or messages `[{"role": …, "content": …}]`. A completion has the format of its prompt."""


def plain(text: Text) -> str:
    """A text as it is; of messages their contents, without roles, one below the other."""
    return text if isinstance(text, str) else "\n".join(map(content, text))


def content(message: dict[str, Any]) -> str:
    """The text of a message; its content is a text, blocks such as `{"type": "text", "text": "…"}`, or None."""
    blocks = message.get("content") or ""
    return blocks if isinstance(blocks, str) else "".join(block.get("text") or "" for block in blocks)


def joined(prompt: Text, completion: Text) -> str:
    """A prompt with its completion as one plain text: what a reader without a chat template can read."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return plain([*messages(prompt, "user"), *messages(completion, "assistant")])


def messages(text: Text, role: str) -> list[dict[str, Any]]:
    """A text as messages; a plain one becomes a single message of this role."""
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def prefilled(prompt: Text) -> bool:
    """True for a conversation whose last message is the assistant's, which the completion continues."""
    return not isinstance(prompt, str) and bool(prompt[-1]["role"] == "assistant")


def answer(prompt: Sequence[dict[str, Any]], text: str, completion: str) -> dict[str, Any]:
    """The assistant's message: the prefill, as it ends in the text that the model reads, with the completion."""
    if not prefilled(prompt):
        return {"role": "assistant", "content": completion}
    begun = content(prompt[-1])
    bare = begun.rstrip()  # as templates may leave it
    begun = begun if text.endswith(begun[len(bare) :]) else bare
    return prompt[-1] | {"content": begun + completion}
