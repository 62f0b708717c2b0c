"""Prompts and completions as reward terms receive them: plain texts, or lists of messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Messages = list[dict[str, Any]]
"""A conversation: messages with a role and a content."""
Text = str | Sequence[dict[str, Any]]
"""A plain text, or messages `[{"role": …, "content": …}]`. A completion has the format of its prompt."""
Texts = Sequence[Text]


def plain(text: Text) -> str:
    """A plain text unchanged; the contents of messages, one per line, without roles."""
    return text if isinstance(text, str) else "\n".join(map(content, text))


def content(message: dict[str, Any]) -> str:
    """The text of a message, whose content is a string, blocks such as `{"type": "text", "text": "…"}`, or None."""
    blocks = message.get("content") or ""
    return blocks if isinstance(blocks, str) else "".join(block.get("text") or "" for block in blocks)


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a chat template reads it: one text, and a tool call's arguments as an object.

    `ValueError` for a content that is neither a text nor blocks of text, or none but the assistant's.
    """
    # Arrow tables fill in missing keys with None, which a chat template may treat as set.
    message = {key: value for key, value in message.items() if value is not None}
    if "content" not in message and message["role"] != "assistant":
        raise ValueError(f"a message of the role {message['role']} has no content")
    blocks = message.get("content", "")
    if isinstance(blocks, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in blocks):
        message["content"] = content(message)
    elif not isinstance(blocks, str):
        raise ValueError(f"a message's content is {blocks!r:.60}; it must be a text, or a list of text blocks")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return message


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments, a JSON text in OpenAI's form, are the object; others unchanged."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call


def joined(prompt: Text, completion: Text) -> str:
    """A prompt and its completion as one plain text, for models without a chat template."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return plain([*messages(prompt, "user"), *messages(completion, "assistant")])


def messages(text: Text, role: str) -> Messages:
    """Messages unchanged; a plain text as a single message with this role."""
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def messages_of(prompt: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Role and text of each message of a conversation."""
    return [{"role": message["role"], "content": content(message)} for message in prompt]


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
