"""Sampled turns to messages with tool calls, by the response templates of Transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from transformers.utils.chat_parsing import parse_response

from tokencredit.text.turns.chat.call_formats import FORMATS, THINK, CallFormat
from tokencredit.text.turns.episode import Message

Schema = dict[str, Any]
"""JSON schema of a tool, as chat templates take it."""
MOST = 200
"""Longest description of a malformed call, in characters."""
DEEPEST = 64
"""Deepest nesting of a call's arguments."""
MOST_CALLS = 64
"""Most calls, and most thoughts, per turn; the parser's time grows with their number times the length of the text."""
SURROGATE = re.compile("[\ud800-\udfff]")


class Malformed(ValueError):
    """A tool call that cannot be parsed, or that is no call."""


def parse_turn(
    text: str, prefix: str, form: CallFormat, schemas: Sequence[Schema], *, ids_of_nine: bool = False
) -> tuple[Message, str | None]:
    """An assistant's message of a sampled turn, and what is wrong with a malformed call.

    Args:
        text: the turn, with its special tokens and without its end-of-turn token; any text at all.
        prefix: the whole prompt if the format reads it, else the part of the assistant's message in the generation
            prompt, such as `<think>`.
        form: format of the calls.
        schemas: JSON schemas of the tools, which give arguments without types theirs.
        ids_of_nine: a call's own id is kept only if it has nine letters and digits.

    Returns:
        The message: `content`, `reasoning_content` if there is any, and `tool_calls` if there are calls and none is
        malformed. The description of a malformed call has at most 200 characters.
    """
    try:
        if max(text.count(form.marker) if form.marker else 0, text.count(THINK)) > MOST_CALLS:
            raise Malformed(f"the turn has more than {MOST_CALLS} calls or thoughts")
        parsed = parse_response(text, form.template, prefix=prefix, tools=list(schemas))
        calls = [as_call(call, index) for index, call in enumerate(flat(parsed.get("tool_calls")))]
        content = str(parsed.get("content") or "").strip()
        if form.marker and form.marker in content:
            raise Malformed(f"a call that begins with {form.marker} is not in the format of this model's tool calls")
    except Exception as error:  # the text is the model's, and may break the parser in any way
        return {"role": "assistant", "content": text}, describe(error)
    for index, call in enumerate(calls):
        if ids_of_nine and not re.fullmatch("[A-Za-z0-9]{9}", call["id"]):
            call["id"] = new_id(index)
    message = {"role": "assistant", "content": content}
    if thinking := parsed.get("reasoning_content") or parsed.get("thinking"):
        message["reasoning_content"] = thinking
    return message | ({"tool_calls": calls} if calls else {}), None


def find_format(text: str, call: dict[str, Any], schemas: Sequence[Schema], own: Any) -> CallFormat | None:
    """The format that parses a rendered turn back to its call; None if there is none.

    Args:
        text: the turn as the chat template renders it, without its end-of-turn token.
        call: `name` and `arguments` of the call in it.
        schemas: the JSON schema of its function.
        own: the tokenizer's `response_template`; None if it has none.
    """
    for form in ([own_format(own)] if own else []) + list(FORMATS):
        message, _ = parse_turn(text, "", form, schemas)
        if [made["function"] for made in message.get("tool_calls", ())] == [call]:
            return form
    return None


def own_format(template: dict[str, Any]) -> CallFormat:
    """The format of a tokenizer's own response template."""
    opening = template.get("fields", {}).get("tool_calls", {}).get("open")
    return CallFormat("response_template", opening if isinstance(opening, str) else "", template, reads_prompt=True)


def flat(calls: Any) -> list[Any]:
    """Calls of a parsed message as one list; formats with a list per region give lists of lists."""
    if not isinstance(calls, list):
        return [] if calls is None else [calls]
    return [call for item in calls for call in (item if isinstance(item, list) else [item])]


def as_call(call: Any, index: int) -> dict[str, Any]:
    """A parsed call in OpenAI's form: `{"type": "function", "id": …, "function": {"name": …, "arguments": {…}}}`.

    Raises:
        Malformed: it is no call.
    """
    if not isinstance(call, dict):
        raise Malformed(f"a call is {shorten(call)}; it must be an object with a name and arguments")
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name = function.get("name", function.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise Malformed(f"a call has the name {shorten(name)}; it must be a text")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {shorten(name)} are {shorten(arguments)}; they must be an object")
    check_json({"name": name, "arguments": arguments})
    identity = call.get("id")
    known = isinstance(identity, str) and 0 < len(identity) <= 64 and not SURROGATE.search(identity)
    key = identity if known else new_id(index)
    return {"type": "function", "id": key, "function": {"name": name, "arguments": arguments}}


def new_id(index: int) -> str:
    """An id for a call without one, in nine letters and digits, which Mistral's templates demand."""
    return f"call{index % 100_000:05d}"


def check_json(value: Any, depth: int = 0) -> None:
    """Raise `Malformed` for NaN, infinity, lone surrogates and deep nesting."""
    if depth > DEEPEST:
        raise Malformed(f"the arguments are nested deeper than {DEEPEST} levels")
    if isinstance(value, str) and SURROGATE.search(value):
        raise Malformed("a text in the call holds half a character (a lone surrogate)")
    if isinstance(value, float) and not math.isfinite(value):
        raise Malformed(f"a number in the call is {value}; it must be finite")
    if isinstance(value, dict):
        for key, item in value.items():
            check_json(key, depth + 1)
            check_json(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_json(item, depth + 1)


def describe(error: BaseException) -> str:
    """What is wrong with a call, in at most 200 characters."""
    cause = error if error.__cause__ is None else error.__cause__
    if isinstance(cause, json.JSONDecodeError):
        text = f"the call is not valid JSON: {cause}"
    elif isinstance(cause, RecursionError):
        text = f"the arguments are nested deeper than {DEEPEST} levels"
    elif isinstance(cause, Malformed):
        text = str(cause)
    else:
        text = f"the call cannot be read: {cause}"
    text = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))
    return text if len(text) <= MOST else text[: MOST - 1] + "…"


def shorten(value: Any) -> str:
    """A value of a message, in at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
