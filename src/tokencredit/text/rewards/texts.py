"""Prompts and completions as reward terms see them: plain texts, or lists of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Text = str | Sequence[dict[str, Any]]
"""A plain text, or messages `[{"role": …, "content": …}]`. A completion has the format of its prompt."""


def plain(text: Text) -> str:
    """A text as it is; of messages their contents, without roles, one below the other."""
    return text if isinstance(text, str) else "\n".join(message["content"] or "" for message in text)


def joined(prompt: Text, completion: Text) -> str:
    """A prompt with its completion as one plain text: what a reader without a chat template can read."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return plain([*messages(prompt, "user"), *messages(completion, "assistant")])


def messages(text: Text, role: str) -> list[dict[str, Any]]:
    """A text as messages; a plain one becomes a single message of this role."""
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)
