"""A tokenizer's chat template: rendering, the text between two turns, and tokenization safe from untrusted texts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from tokencredit.errors import ConfigError
from tokencredit.text.data.completions import TEMPLATE_ERRORS
from tokencredit.text.data.detokenizer import shared_start
from tokencredit.text.turns.chat.tool_calls import Schema
from tokencredit.text.turns.protocols.episode import Message

MARK = "\ufdd0"
"""A noncharacter, which no text holds. Inside an untrusted text it splits the names of added tokens."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NO_TEXT = re.compile(f"[\ud800-\udfff{MARK}]")
"""Characters that are no text: lone surrogates, which tokenizers reject, and the mark."""
USER: Message = {"role": "user", "content": "x"}


def look_up(word: str, limit: int) -> str:
    """Look up a word.

    Args:
        word: The word.
        limit: Most results.
    """
    return word * limit


PROBE: Schema = get_json_schema(look_up)
"""A tool that no environment has, for checks of a template."""


class TemplateEncoder:
    """Tokenizes rendered templates: what untrusted texts in them spell never becomes an added token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = ""):
        """Protect the special tokens, and the added tokens in the chat template's source."""
        self.tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder
        self.protected = {
            token.content: index
            for index, token in tokens.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        """Names and ids of the protected tokens."""
        self._special = [name for name, index in self.protected.items() if not tokens[index].rstrip][:1]
        names = "|".join(re.escape(name) for name in sorted(self.protected, key=len, reverse=True))
        self._begins = re.compile(f"(?=(?:{names}))(.)", re.DOTALL) if names else None

    def guarded(self, value: Any) -> Any:
        """An untrusted text, list or mapping with marks that keep it from becoming protected tokens."""
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        return [self.guarded(item) for item in value] if isinstance(value, list | tuple) else value

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text without its marks; the tokenizer adds no special tokens."""
        if MARK not in text:
            return self._encode(self.tokenizer, text)
        marked, mark = self._with_mark
        return [index for index in self._encode(marked, text) if index != mark]

    def continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows others.

        SentencePiece puts a space before the first word of a text. Where it does, the text is tokenized after another
        one, so that the ids decode to the text alone.
        """
        lead, written = self.ids("."), text.replace(MARK, "")
        before = str(self.tokenizer.decode(lead))
        for start in ("", *self._special, "\n", "."):
            begun, both = self.ids(start), self.ids(start + text)
            ids = both[len(begun) :]
            if both[: len(begun)] == begun and self.tokenizer.decode([*lead, *ids]) == before + written:
                return ids
        return self.ids(text)

    def first(self, text: str) -> str | None:
        """The name of the protected token that a text begins with; None if it begins with another text."""
        return max((name for name in self.protected if text.startswith(name)), key=len, default=None)

    def _guarded_text(self, text: str) -> str:
        text = NO_TEXT.sub(REPLACEMENT, text)
        broken = self._begins.sub(rf"\1{MARK}", text) if self._begins else text
        if not self._forged(broken):
            return broken
        # A name of one character, or characters that the tokenizer's normalizer turns into a name.
        return MARK.join(REPLACEMENT if self._forged(character) else character for character in text)

    def _forged(self, text: str) -> bool:
        return not set(self.protected.values()).isdisjoint(self.ids(text))

    @cached_property
    def _with_mark(self) -> tuple[PreTrainedTokenizerBase, int]:
        """The tokenizer with the mark as a special token, which splits texts and is then left out; and its id."""
        marked = copy.deepcopy(self.tokenizer)
        marked.add_tokens([AddedToken(MARK, special=True, normalized=False)], special_tokens=True)
        return marked, marked.added_tokens_encoder[MARK]

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])


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
        """Find out how the template wants tool calls; `end_ids` are token ids that end a turn in sampling."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template, which conversations and tools need; set chat_template in its "
                "tokenizer_config.json" + ("" if uses_tools else ", or give the prompts as plain texts")
            )
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.source = str(tokenizer.get_chat_template(None, [PROBE] if uses_tools else None))
        self.encoder = TemplateEncoder(tokenizer, self.source)
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
        """The conversation as text, with the generation prompt if `generate`; raises `Rejected` if the template raises.

        With `unfinished`, the last message is the beginning of a turn, and has no end.
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
        except TEMPLATE_ERRORS as error:
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
        """A user's message, and an assistant's with a text; with calls (name, id), the last call has the text."""
        if not calls:
            return [USER, {"role": "assistant", "content": payload}]
        arguments = [{"word": "y"}] * (len(calls) - 1) + [{"word": payload}]
        return [USER, self.assistant([(name, args, key) for (name, key), args in zip(calls, arguments, strict=True)])]

    def assistant(self, calls: Sequence[tuple[str, dict[str, Any], str]]) -> Message:
        """An assistant's message of calls: name, arguments and id of each."""
        tool_calls = []
        for name, arguments, key in calls:
            function = {"name": name, "arguments": json.dumps(arguments) if self.arguments_as_text else arguments}
            tool_calls.append({"type": "function", "id": key, "function": function})
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    def after_turn(self, messages: Sequence[Message], calls: Sequence[tuple[str, str]]) -> tuple[str, str | None]:
        """The text that follows a turn: its end, these messages, and the next generation prompt.

        `messages` are the observation, and `calls` names and ids of the turn's calls, all guarded. Returns the name of
        the token that ends the turn too: the text's first, after whitespace at most; None if there is no such token.
        Raises `Rejected` if the template raises, or drops the assistant's message.
        """
        # Render a made-up turn that ends with an anchor: what follows the anchor follows every turn.
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
            limit = shared_start(rest, alone)
            starts = (rest.find(name, 0, limit + len(name)) for name in self.turn_ends)
            end = min((start for start in starts if start >= 0), default=min(limit, len(alone.rstrip())))
            rest = rest[end:]
        return rest, self.encoder.first(rest.lstrip())

    def turn_text(self, before: Sequence[Message], message: Message, tools: Sequence[Schema] = ()) -> str:
        """The text of an assistant's message after the generation prompt, without the end of the turn."""
        turn = self.render([*before, message], tools=tools)
        prompt = self.render(before, tools=tools, generate=True)
        shared = turn[: shared_start(turn, prompt)]
        # Where they part inside a tag, such as <think> and <tool_call>, the turn begins with the tag.
        start = len(prompt) if shared == prompt else max((m.end() for m in re.finditer(r"[\n>\]]", shared)), default=0)
        text = turn[start:]
        while end := next((name for name in self.turn_ends if text.rstrip().endswith(name)), None):
            text = text.rstrip().removesuffix(end)
        return text

    @cached_property
    def turn_ends(self) -> set[str]:
        """Names of the tokens that may end a turn: those of sampling, and the end of a turn of text."""
        end = None
        with suppress(Rejected):  # it takes no user message after the assistant's
            end = self.after_turn([USER], [])[1]
        return {*self.ends, *([end] if end else [])}
