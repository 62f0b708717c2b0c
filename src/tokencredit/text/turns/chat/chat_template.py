"""A chat template: rendering, and the frame between two turns, cut out of made-up conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.text.turns.chat.encoding import Encoder
from tokencredit.text.turns.chat.tool_calls import Schema
from tokencredit.text.turns.episode import Message

PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "The word."},
                "limit": {"type": "integer", "description": "Most results."},
            },
            "required": ["word", "limit"],
        },
    },
}
"""A tool that no environment has, for checks of a template."""
USER: Message = {"role": "user", "content": "x"}


class Rejected(Exception):
    """The template rejects a conversation."""


class ChatTemplate:
    """The chat template of a tokenizer, with its settings."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: dict[str, Any],
        *,
        uses_tools: bool,
        end_ids: Collection[int] = (),
    ):
        """Find out how the template wants tool calls.

        Args:
            tokenizer: the policy's.
            kwargs: keyword arguments of the template.
            uses_tools: the policy calls tools.
            end_ids: token ids that end a turn in sampling.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template, which conversations and tools need; set chat_template in its "
                "tokenizer_config.json" + ("" if uses_tools else ", or give the prompts as plain texts")
            )
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.source = str(tokenizer.get_chat_template(None, [PROBE] if uses_tools else None))
        self.encoder = Encoder(tokenizer, self.source)
        ends = {*end_ids, tokenizer.eos_token_id}
        self.ends = {name: index for name, index in self.encoder.protected.items() if index in ends}
        """Names and ids of the tokens that end a turn in sampling."""
        self.arguments_as_text = False
        """True if the template takes the arguments of a call as JSON text, and not as an object."""
        self.ids_of_nine = False
        """True if the template takes ids of calls with nine characters, and not others."""
        if uses_tools and not self._takes_calls("call00000"):
            self.arguments_as_text = True
            self.arguments_as_text = self._takes_calls("call00000")
        if uses_tools and not self._takes_calls("call_1"):
            self.ids_of_nine = self._takes_calls("call00000")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        generate: bool = False,
        unfinished: bool = False,
    ) -> str:
        """The conversation as text.

        Args:
            messages: the conversation.
            tools: JSON schemas of the tools.
            generate: end with the generation prompt.
            unfinished: the last message is the beginning of a turn, and has no end.

        Raises:
            Rejected: the template raises.
        """
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generate,
                continue_final_message=unfinished,
                **self.kwargs,
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise Rejected(str(error)) from error
        return str(rendered)

    def _takes_calls(self, key: str) -> bool:
        """True if the template renders a call with this id, and its answer."""
        answer = {"role": "tool", "name": "look_up", "tool_call_id": key, "content": "x"}
        try:
            self.render([*self.conversation([("look_up", key)], "x"), answer], generate=True)
        except Rejected:
            return False
        return True

    def conversation(self, calls: Sequence[tuple[str, str]], payload: str) -> list[Message]:
        """A user's message, and an assistant's with a text, or with calls, of which the last has the text.

        Args:
            calls: name and id of each call; empty for a text.
            payload: the text.
        """
        if not calls:
            return [USER, {"role": "assistant", "content": payload}]
        arguments = [{"word": "y"}] * (len(calls) - 1) + [{"word": payload}]
        return [USER, self.assistant([(name, given, key) for (name, key), given in zip(calls, arguments, strict=True)])]

    def assistant(self, calls: Sequence[tuple[str, dict[str, Any], str]]) -> Message:
        """An assistant's message of calls: name, arguments and id of each."""
        made = [
            {
                "type": "function",
                "id": key,
                "function": {"name": name, "arguments": json.dumps(given) if self.arguments_as_text else given},
            }
            for name, given, key in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": made}

    def after_turn(self, messages: Sequence[Message], calls: Sequence[tuple[str, str]]) -> tuple[str, str | None]:
        """The text that follows a turn: its end, these messages, and the next generation prompt.

        Args:
            messages: the observation, guarded.
            calls: name and id of each of the turn's calls, guarded; empty for a turn of text.

        Returns:
            The text, and the name of the token that ends the turn: the text's first, after whitespace at most. None if
            the template ends a turn without a token.

        Raises:
            Rejected: the template raises, or drops the assistant's message.
        """
        anchor = "zqx"
        while anchor in repr((messages, calls)) or anchor in self.source:
            anchor += "x"
        before = self.conversation(calls, anchor)
        _, after, rest = self.render([*before, *messages], generate=True).partition(anchor)
        if not after:
            raise Rejected("it drops the assistant's " + ("tool calls" if calls else "texts"))
        if calls:
            # The call goes on after its last argument, up to the end that it has without an observation too.
            alone = self.render(before).partition(anchor)[2]
            most = len(shared_start(rest, alone))
            end = self.encoder.find(rest, self.turn_ends, most)
            rest = rest[min(most, len(alone.rstrip())) if end is None else end :]
        return rest, self.encoder.first(rest.lstrip())

    def turn_text(self, before: Sequence[Message], message: Message, tools: Sequence[Schema] = ()) -> str:
        """The text of an assistant's message after the generation prompt, without the end of the turn.

        Raises:
            Rejected: the template raises.
        """
        turn = self.render([*before, message], tools=tools)
        prompt = self.render(before, tools=tools, generate=True)
        shared = shared_start(turn, prompt)
        # Where they part inside a tag, such as <think> and <tool_call>, the turn begins with the tag.
        start = len(prompt) if shared == prompt else max((m.end() for m in re.finditer(r"[\n>\]]", shared)), default=0)
        text = turn[start:]
        while end := next((name for name in self.turn_ends if text.rstrip().endswith(name)), None):
            text = text.rstrip().removesuffix(end)
        return text

    @cached_property
    def turn_ends(self) -> set[str]:
        """Names of the tokens that may end a turn: those of sampling, and the end of a turn of text."""
        try:
            end = self.after_turn([USER], [])[1]
        except Rejected:  # it takes no user message after the assistant's
            end = None
        return {*self.ends, *([end] if end else [])}


def shared_start(one: str, other: str) -> str:
    """The longest text that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]
