"""Prompts, turns and observations as token ids. Sampled tokens are kept; only the texts between them are tokenized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.text.data.completions import prompt_ids
from tokencredit.text.data.detokenizer import MAX_TOKENS, Detokenizer
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.rewards.texts import for_template, prefilled
from tokencredit.text.rewards.texts import messages as as_messages
from tokencredit.text.turns.chat.chat_template import PROBE, USER, ChatTemplate, Rejected, TemplateEncoder
from tokencredit.text.turns.chat.tool_calls import THINK, CallFormat, Schema, find_format, parse_turn
from tokencredit.text.turns.protocols.episode import Message, Turn

Tool = Callable[..., Any]
"""A function or method with type hints and a docstring."""


class TextFraming:
    """Plain texts: an observation continues the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptsConfig | None = None):
        self.tokenizer, self.config, self.encoder = tokenizer, config or PromptsConfig(), TemplateEncoder(tokenizer)

    def prompt(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[str, list[int]]:  # noqa: ARG002  (ChatFraming)
        """The text and its token ids, tokenized as prompts without environments are."""
        if not isinstance(prompt, str):
            raise ConfigError("an environment's prompt is a conversation; it must be a plain text, as the others are")
        [ids] = prompt_ids(self.tokenizer, [prompt], special=self.config.add_bos is None)
        return prompt, with_bos(self.tokenizer, self.config, ids)

    def parse(self, ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Tool] = ()) -> Turn:  # noqa: ARG002
        """The sampled turn as text."""
        return Turn(ids, text_of(self.tokenizer, ids, prefix))

    def observation(self, observation: str | Sequence[Message], turn: Turn) -> list[int]:  # noqa: ARG002
        """Token ids of the observation's text alone, without special tokens."""
        if not isinstance(observation, str):
            raise ConfigError("an environment answers with messages; prompts are plain texts, so it must be a text")
        return self.encoder.continuation(self.encoder.guarded(observation))


class ChatFraming:
    """Conversations, in which the chat template frames the observations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptsConfig | None = None,
        *,
        uses_tools: bool = False,
        end_ids: Collection[int] = (),
    ):
        """Check the chat template; `ConfigError` names the part that it lacks, rejects or drops.

        With `uses_tools` tools answer, in messages with the role `tool`; other answers are user messages. `end_ids` are
        token ids that end a turn in sampling, beside the tokenizer's.
        """
        self.tokenizer, self.config = tokenizer, config or PromptsConfig()
        kwargs = self.config.chat_template_kwargs
        self.template = ChatTemplate(tokenizer, kwargs, uses_tools=uses_tools, end_ids=end_ids)
        self.encoder = self.template.encoder
        self._schemas: WeakKeyDictionary[Any, Schema] = WeakKeyDictionary()
        self.end = check_texts(self.template)
        """Name of the token that ends a turn; None if the template has none."""
        if uses_tools:
            self.end = check_tools(self.template)
        self.format = call_format(self.template) if uses_tools else None

    def prompt(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[str, list[int]]:
        """The text and the token ids of a conversation with its tools and the generation prompt."""
        try:
            conversation = [for_template(message) for message in as_messages(prompt, "user")]
        except ValueError as error:
            raise ConfigError(f"an environment's prompt: {error}") from error
        schemas, begun = [self.schema(tool) for tool in tools], prefilled(conversation)
        try:
            text = self.template.render(conversation, tools=schemas, generate=not begun, unfinished=begun)
        except Rejected as error:
            raise ConfigError(f"the tokenizer's chat template rejects an environment's prompt: {error}") from error
        return text, with_bos(self.tokenizer, self.config, self.encoder.ids(text))

    def parse(self, ids: Sequence[int], prefix: Sequence[int], tools: Sequence[Tool] = ()) -> Turn:
        """The sampled turn as text and as an assistant's message; never raises for what the policy wrote.

        `prefix` are all ids before it. The tools' schemas give arguments their types in formats that have none.
        """
        text = text_of(self.tokenizer, ids, prefix)
        if self.format is None:
            return Turn(ids, text, {"role": "assistant", "content": text})
        # The parser reads special tokens, and the end of the turn is none of the message.
        ends = {self.encoder.protected[name] for name in {*self.template.turn_ends, *([self.end] if self.end else [])}}
        kept = ids[:-1] if len(ids) and ids[-1] in ends else ids
        with_tokens = str(self.tokenizer.decode(list(kept)))
        before = str(self.tokenizer.decode(list(prefix if self.format.reads_prompt else prefix[-4 * MAX_TOKENS :])))
        if not self.format.reads_prompt:
            before = THINK if before.rstrip().endswith(THINK) else ""
        schemas, ids_of_nine = [self.schema(tool) for tool in tools], self.template.ids_of_nine
        message, malformed = parse_turn(with_tokens, before, self.format, schemas, ids_of_nine=ids_of_nine)
        return Turn(ids, text, message if malformed is None else {**message, "content": text}, malformed)

    def observation(self, observation: str | Sequence[Message], turn: Turn) -> list[int]:
        """Token ids that the template writes between the turn and the next one.

        They begin with the template's end of a turn if the sampled ids lack it. The observation never becomes one of
        the template's tokens, whatever it spells.
        """
        messages = as_messages(observation, "user")
        # Render after a made-up turn, with marks that break up what the observation spells of the template's tokens.
        guarded = [{**self.encoder.guarded(message), "role": message["role"]} for message in messages]
        calls = self.encoder.guarded(answered_calls(turn, messages))
        text, end = self._after_turn(guarded, calls)
        # Leave out the end of the turn where the policy sampled it.
        last = turn.ids[-1] if len(turn.ids) else None
        if end is None or last not in self._closing(text, end):
            return self.encoder.continuation(text)
        return self.encoder.ids(text.lstrip())[1:]

    def schema(self, tool: Tool) -> Schema:
        """JSON schema of a tool, from its type hints and its docstring; `ConfigError` if it lacks them."""
        function = getattr(tool, "__func__", tool)
        if function not in self._schemas:
            try:
                self._schemas[function] = get_json_schema(tool)
            except Exception as error:  # Transformers has no common class for these
                name = getattr(tool, "__name__", repr(tool))
                raise ConfigError(f"the tool {name} cannot be described to the model: {error}") from error
        return self._schemas[function]

    def _after_turn(self, messages: list[Message], calls: list[tuple[str, str]]) -> tuple[str, str | None]:
        """What follows a turn; a template that renders one call per turn sees the first of several."""
        try:
            return self.template.after_turn(messages, calls)
        except Rejected as error:
            if len(calls) > 1:
                return self._after_turn(messages, calls[:1])
            raise ConfigError(f"the tokenizer's chat template rejects an observation: {error}") from error

    def _closing(self, text: str, end: str) -> set[int]:
        """Ids that close a turn: the end that the text begins with, and any other end of sampling in the template."""
        own = {self.encoder.protected[end]}
        # Where the next speaker's header is itself the end of a turn, as in GLM, only the right one ends it.
        if not self.encoder.first(text.lstrip()[len(end) :].lstrip()):
            return own
        return own | {index for name, index in self.template.ends.items() if name in self.template.source}


Framing = TextFraming | ChatFraming
"""Token ids of everything that the policy does not write, and the message in what it writes."""


def check_texts(template: ChatTemplate) -> str | None:
    """Check that a template takes an observation as a user message; returns the token that ends a turn."""
    try:
        text, end = template.after_turn([{"role": "user", "content": "zqanswer"}], [])
    except Rejected as error:
        raise ConfigError(
            "the tokenizer's chat template cannot take the environment's answer as a user message after the "
            f"assistant's: {error}"
        ) from error
    if "zqanswer" not in text:
        raise ConfigError("the tokenizer's chat template drops user messages after the assistant's")
    return end


def check_tools(template: ChatTemplate) -> str | None:
    """Check that a template renders calls of tools and their answers; returns the token that ends a turn with calls."""
    parts = {
        "zqname": "the names of called tools",
        "zqkey": "the names of arguments",
        "zqvalue": "the arguments",
        "zqanswer": "the messages of tools",
    }
    call = template.assistant([("zqname", {"zqkey": "zqvalue"}, "call00000")])
    answer = {"role": "tool", "name": "zqname", "tool_call_id": "call00000", "content": "zqanswer"}
    try:
        text = template.render([USER, call, answer], generate=True)
        dropped = [part for word, part in parts.items() if word not in text]
        end = None if dropped else template.after_turn([answer], [("zqname", "call00000")])[1]
    except Rejected as error:
        raise ConfigError(f"the tokenizer's chat template rejects tool calls or their answers: {error}") from error
    if dropped:
        raise ConfigError(
            f"the tokenizer's chat template drops {', '.join(dropped)}; take a model whose template supports tools, or "
            "set chat_template in its tokenizer_config.json"
        )
    return end


def call_format(template: ChatTemplate) -> CallFormat:
    """The format of the template's tool calls, found by a round trip through text and tokens."""
    arguments = {"word": 'a "b" é', "limit": 3}
    text = template.turn_text([USER], template.assistant([("look_up", arguments, "call00000")]))
    text = str(template.tokenizer.decode(template.encoder.continuation(text)))
    own = getattr(template.tokenizer, "response_template", None)
    form = find_format(text, {"name": "look_up", "arguments": arguments}, [PROBE], own)
    if form is None:
        raise ConfigError(
            f"the tool calls of the tokenizer's chat template are in no known format: {text.strip()[:200]!r}; set "
            "response_template in its tokenizer_config.json, as Transformers describes it"
        )
    return form


def answered_calls(turn: Turn, messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Name and id of each call that the messages answer; empty if no tool answers."""
    answers = [message for message in messages if message["role"] == "tool"]
    calls = (turn.message or {}).get("tool_calls") or []
    if answers and calls:
        return [(call["function"]["name"], call["id"]) for call in calls]
    return [(answer.get("name") or "look_up", answer.get("tool_call_id") or "call00000") for answer in answers]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prefix: Sequence[int]) -> str:
    """The text of sampled ids after those before them, without special tokens."""
    return Detokenizer(tokenizer, prefix[-2 * MAX_TOKENS :]).text(ids)


def with_bos(tokenizer: PreTrainedTokenizerBase, config: PromptsConfig, ids: list[int]) -> list[int]:
    """Token ids of a prompt, after a beginning-of-sequence token if `prompts.add_bos` demands one that they lack."""
    bos = tokenizer.bos_token_id
    if not config.add_bos or ids[:1] == [bos]:
        return ids
    return [bos, *ids]
