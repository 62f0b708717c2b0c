"""Tool calls in sampled turns: known formats, and parsing by the response templates of Transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import parse_response

from tokencredit.errors import cut
from tokencredit.text.turns.protocols.episode import Message

Schema = dict[str, Any]
"""JSON schema of a tool, as chat templates take it."""
MAX_DESCRIPTION = 200
"""Longest description of a malformed call, in characters."""
MAX_DEPTH = 64
"""Deepest nesting of a call's arguments."""
MAX_CALLS = 64
"""Most calls, and most thoughts, per turn; the parser's time grows with their number times the length of the text."""
SURROGATE = re.compile("[\ud800-\udfff]")
THINK = "<think>"
"""Begins thinking; some templates write it into the generation prompt."""
NO_ANCHOR = r"(?!)"
"""Matches nowhere: the prefix is the part of the message that the generation prompt holds, and nothing before it."""


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls, as a response template of Transformers."""

    name: str
    marker: str
    """Text that begins a call; left over in the content, the call is malformed. Empty if there is none."""
    template: dict[str, Any]
    reads_prompt: bool = False
    """True if the template finds the beginning of the message in the whole prompt; else it gets that part alone."""


def call_format(name: str, marker: str, *, repeats: bool = True, **calls: Any) -> CallFormat:
    """A format with thinking in `<think>`, calls as given, and everything else as content."""
    fields = {
        "reasoning_content": {"open": THINK, "close": "</think>", "content": "text"},
        "tool_calls": {"repeats": repeats, "content": "json", **calls},
        "content": {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""},
    }
    return CallFormat(
        name, marker, {"defaults": {"role": "assistant"}, "start_anchor_pattern": NO_ANCHOR, "fields": fields}
    )


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""A call whose name stands before its arguments."""

FORMATS = (
    call_format("Hermes and Qwen", "<tool_call>", open="<tool_call>", close="</tool_call>"),
    call_format(
        "Qwen3-Coder",
        "<tool_call>",
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
        },
        transform=NAMED,
    ),
    call_format(
        "GLM",
        "<tool_call>",
        open_pattern=r"<tool_call>\s*(?P<name>[^<\s{]+)",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>(?P<key>[^<]*)</arg_key>\n?<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
        },
        transform=NAMED,
    ),
    call_format("Mistral", "[TOOL_CALLS]", open="[TOOL_CALLS]"),
    call_format(
        "Mistral with names",
        "[TOOL_CALLS]",
        open_pattern=r"\[TOOL_CALLS\](?P<name>[^\[\]\s{]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])",
        transform=NAMED,
    ),
    call_format("Phi-4-mini and Granite", "<|tool_call|>", open="<|tool_call|>", close="<|/tool_call|>"),
    call_format(
        "DeepSeek-V3",
        "<｜tool▁call▁begin｜>",
        open_pattern=r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        close_pattern=r"\n```<｜tool▁call▁end｜>\n?(?:<｜tool▁calls▁end｜>)?",
        transform=NAMED,
    ),
    call_format(
        "DeepSeek-V3.1",
        "<｜tool▁call▁begin｜>",
        open_pattern=r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>[^<\n]+)<｜tool▁sep｜>",
        close_pattern=r"<｜tool▁call▁end｜>\n?(?:<｜tool▁calls▁end｜>)?",
        transform=NAMED,
    ),
    call_format("Command R", "Action:", open_pattern=r"Action:\s?```json", close="```"),
    call_format("Command R7B", "<|START_ACTION|>", open="<|START_ACTION|>", close="<|END_ACTION|>"),
    call_format(
        "Kimi",
        "<|tool_call_begin|>",
        open_pattern=(
            r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>(?P<id>(?:functions\.)?(?P<name>[^<:\s]+)(?::\d+)?)"
            r"<\|tool_call_argument_begin\|>"
        ),
        close_pattern=r"<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?",
        transform={"id": "{id}", **NAMED},
    ),
    call_format(
        "FunctionGemma",
        "<start_function_call>",
        open_pattern=r"<start_function_call>call:(?P<name>\w+)",
        close="<end_function_call>",
        content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        transform=NAMED,
    ),
    call_format(
        "Gemma 4",
        "<|tool_call>",
        open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
        close="<tool_call|>",
        content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        transform=NAMED,
    ),
    call_format(
        "harmony",
        "to=functions.",
        open_pattern=r"to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>",
        close="<|call|>",
        transform=NAMED,
    ),
    # Last, because any turn that is JSON with a name looks like a call.
    call_format("Llama 3.1", "", repeats=False, open_pattern=r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type)")'),
)
"""Known formats; `find_format` takes the first that parses what a chat template renders."""


class MalformedCall(ValueError):
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
        if max(text.count(form.marker) if form.marker else 0, text.count(THINK)) > MAX_CALLS:
            raise MalformedCall(f"the turn has more than {MAX_CALLS} calls or thoughts")
        parsed = parse_response(text, form.template, prefix=prefix, tools=list(schemas))
        listed = parsed.get("tool_calls")
        listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
        # Formats with a list per region give lists of lists.
        flat = [call for item in listed for call in (item if isinstance(item, list) else [item])]
        calls = [as_call(call, index) for index, call in enumerate(flat)]
        content = str(parsed.get("content") or "").strip()
        if form.marker and form.marker in content:
            raise MalformedCall(
                f"a call that begins with {form.marker} is not in the format of this model's tool calls"
            )
    except Exception as error:  # the text is the model's, and may break the parser in any way
        return {"role": "assistant", "content": text}, describe_error(error)
    for index, call in enumerate(calls):
        if ids_of_nine and not re.fullmatch("[A-Za-z0-9]{9}", call["id"]):
            call["id"] = new_id(index)
    message = {"role": "assistant", "content": content}
    if thinking := parsed.get("reasoning_content") or parsed.get("thinking"):
        message["reasoning_content"] = thinking
    return message | ({"tool_calls": calls} if calls else {}), None


def find_format(text: str, call: dict[str, Any], schemas: Sequence[Schema], own: Any) -> CallFormat | None:
    """The format that parses a rendered turn back to its call; None if there is none.

    `text` is the turn without its end-of-turn token, `call` the name and arguments in it, `schemas` the JSON schema of
    its function, and `own` the tokenizer's `response_template`, if it has one.
    """
    formats = list(FORMATS)
    if own:
        opening = own.get("fields", {}).get("tool_calls", {}).get("open")
        marker = opening if isinstance(opening, str) else ""
        formats.insert(0, CallFormat("response_template", marker, own, reads_prompt=True))
    for form in formats:
        message, _ = parse_turn(text, "", form, schemas)
        if [parsed["function"] for parsed in message.get("tool_calls", ())] == [call]:
            return form
    return None


def as_call(call: Any, index: int) -> dict[str, Any]:
    """A parsed call in OpenAI's form, `{"type": "function", "id": …, "function": …}`; raises `MalformedCall`."""
    if not isinstance(call, dict):
        raise MalformedCall(f"a call is {cut(repr(call), 40)}; it must be an object with a name and arguments")
    function = call["function"] if isinstance(call.get("function"), dict) else call
    name = function.get("name", function.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise MalformedCall(f"a call has the name {cut(repr(name), 40)}; it must be a text")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCall(
            f"the arguments of {cut(repr(name), 40)} are {cut(repr(arguments), 40)}; they must be an object"
        )
    check_json({"name": name, "arguments": arguments})
    key = call.get("id")
    if not (isinstance(key, str) and 0 < len(key) <= 64 and not SURROGATE.search(key)):
        key = new_id(index)
    return {"type": "function", "id": key, "function": {"name": name, "arguments": arguments}}


def new_id(index: int) -> str:
    """An id for a call without one, in nine letters and digits, which Mistral's templates demand."""
    return f"call{index % 100_000:05d}"


def check_json(value: Any, depth: int = 0) -> None:
    """Raise `MalformedCall` for NaN, infinity, lone surrogates and deep nesting."""
    if depth > MAX_DEPTH:
        raise MalformedCall(f"the arguments are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str) and SURROGATE.search(value):
        raise MalformedCall("a text in the call holds half a character (a lone surrogate)")
    if isinstance(value, float) and not math.isfinite(value):
        raise MalformedCall(f"a number in the call is {value}; it must be finite")
    if isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            check_json(item, depth + 1)


def describe_error(error: BaseException) -> str:
    """What is wrong with a call, in at most 200 characters."""
    cause = error.__cause__ or error
    if isinstance(cause, json.JSONDecodeError):
        text = f"the call is not valid JSON: {cause}"
    elif isinstance(cause, RecursionError):
        text = f"the arguments are nested deeper than {MAX_DEPTH} levels"
    else:
        text = str(cause) if isinstance(cause, MalformedCall) else f"the call cannot be read: {cause}"
    return cut(SURROGATE.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split())), MAX_DESCRIPTION)
