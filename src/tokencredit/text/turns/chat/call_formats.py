"""Formats of tool calls, as response templates of Transformers, for tokenizers that have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

THINK = "<think>"
"""Begins thinking; some templates write it into the generation prompt."""
NO_ANCHOR = r"(?!)"
"""Matches nowhere: the prefix is the part of the message that the generation prompt holds, and nothing before it."""


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls."""

    name: str
    marker: str
    """Text that begins a call; left over in the content, the call is malformed. Empty if there is none."""
    template: dict[str, Any]
    """Response template of Transformers."""
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
"""Known formats; `tool_calls.find_format` takes the first that parses what a chat template renders."""
