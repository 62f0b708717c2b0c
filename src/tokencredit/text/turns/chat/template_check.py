"""Episodes token by token beside one rendering of the whole transcript: `tokencredit check-template`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from transformers import GenerationConfig, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.text.data.detokenizer import shared_start
from tokencredit.text.data.prompts import check_prompt_settings
from tokencredit.text.models.model_loading import load_tokenizer, resolve
from tokencredit.text.turns.chat.chat_template import USER, ChatTemplate, Rejected, look_up
from tokencredit.text.turns.chat.framing import ChatFraming
from tokencredit.text.turns.chat.tool_calls import THINK
from tokencredit.text.turns.protocols.episode import Message, Turn

CALL = ("look_up", {"word": "rain", "limit": 3}, "call00000")
"""Name, arguments and id of a call."""
END_OF_THINKING = "</think>"
CONTEXT = 12
"""Tokens shown before one that differs."""


class Case(NamedTuple):
    """A made-up transcript that ends with an observation."""

    name: str
    messages: Sequence[Message]
    ends: bool = True
    """False if the sampled turns lack their end-of-turn token."""


class Outcome(NamedTuple):
    """Result of a transcript."""

    kind: Literal["same", "rendered anew", "wrong", "rejected"]
    """Wrong are an observation's tokens; rendered anew are those of a prompt or turn, which episodes keep."""
    text: str


def check_template(
    tokenizer: PreTrainedTokenizerBase, config: PromptsConfig, end_ids: Sequence[int] = ()
) -> tuple[list[str], int]:
    """Compare episodes with one rendering of the same transcripts; the arguments are those of `ChatFraming`.

    Returns:
        Lines for the reader, and the number of transcripts in which an observation's tokens differ or calls are not
        read back.

    Raises:
        ConfigError: there is no chat template, or it takes observations neither as user messages nor from tools.
    """
    check_prompt_settings(tokenizer, config)
    lines: list[str] = []
    refused: list[ConfigError] = []
    outcomes: list[Outcome] = []
    for kind, tools in (("user messages", False), ("tools", True)):
        try:
            framing = ChatFraming(tokenizer, config, uses_tools=tools, end_ids=end_ids)
        except ConfigError as error:
            refused.append(error)
            lines.append(f"{kind}: no: {error}")
            continue
        calls = f"; tool calls are in the format of {framing.format.name}" if framing.format else ""
        lines.append(f"{kind}: a turn ends with {framing.end or 'no token of its own'}{calls}")
        if tools and look_up.__name__ not in framing.prompt([USER], [look_up])[0]:
            lines.append("  the template does not describe tools to the model; describe them in the prompts")
        for case in (tool_cases if tools else text_cases)(framing.template):
            outcomes.append(compare(framing, case))
            lines.append(f"  {case.name}: {outcomes[-1].text}")
        outcomes.append(adversarial(framing))
        lines.append(f"  the template's own tokens, spelt in an observation: {outcomes[-1].text}")
    if len(refused) == 2:
        raise refused[0]
    if any(outcome.kind == "rendered anew" for outcome in outcomes):
        lines.append(
            "Later, this template renders earlier messages differently. Episodes keep the tokens that were sampled; a "
            "chat that renders the whole transcript for each turn shows the model other tokens."
        )
    return lines, sum(outcome.kind == "wrong" for outcome in outcomes)


def compare(framing: ChatFraming, case: Case) -> Outcome:
    """Play a transcript turn by turn, and compare its tokens with one rendering after each observation."""
    template, messages, tools = framing.template, case.messages, [look_up] if framing.format else []
    starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    anew: Outcome | None = None
    try:
        episode = framing.prompt(list(messages[: starts[0]]), tools)[1]
        for number, (at, following) in enumerate(zip(starts, [*starts[1:], len(messages)], strict=True), 1):
            # A turn as the model would sample it, whose calls must be read back.
            ids = sampled(framing, case, at)
            turn = framing.parse(ids, episode, tools)
            episode = [*episode, *ids]
            calls = functions(messages[at])
            if len(calls) > 1 and calls[-1]["arguments"]["word"] not in turn.text:
                return Outcome("rejected", "the template drops all calls of a turn but one")
            if functions(turn.message) != calls:
                reason = turn.malformed or f"they are read as {functions(turn.message)}"
                return Outcome("wrong", f"the calls of turn {number} are not read back: {reason}")
            # The observation after it, beside one rendering of everything so far.
            between = framing.observation(messages[at + 1 : following], turn)
            schemas = [framing.schema(tool) for tool in tools]
            whole = template.encoder.ids(template.render(messages[:following], tools=schemas, generate=True))
            # Where the turn itself is rendered differently, the observations are aligned by their ends.
            start = len(episode) if whole[: len(episode)] == episode else max(len(whole) - len(between), 0)
            if whole[start:] != between:
                text = difference(framing, [*episode, *between], [*episode, *whole[start:]])
                return Outcome("wrong", f"observation {number} differs at {text}")
            episode = [*episode, *between]
            if episode != whole and anew is None:
                text = difference(framing, episode, whole)
                anew = Outcome("rendered anew", f"rendered anew after turn {number}, which differs at {text}")
    except (Rejected, ConfigError) as error:
        return Outcome("rejected", f"the template rejects it: {error}")
    return anew or Outcome("same", "same")


def sampled(framing: ChatFraming, case: Case, at: int) -> list[int]:
    """Token ids of an assistant's message, as a model samples them."""
    message, template = case.messages[at], framing.template
    schemas = [framing.schema(look_up)] if framing.format else []
    text = template.turn_text(case.messages[:at], message, schemas)
    if message["content"] not in text:  # the template drops thinking, which is sampled all the same
        text = message["content"]
    prompt = template.render(case.messages[:at], tools=schemas, generate=True)
    if prompt.rstrip().endswith(THINK) and END_OF_THINKING not in text:  # the prompt begins what the template drops
        text = END_OF_THINKING + text
    ids = template.encoder.continuation(text)
    return [*ids, template.encoder.protected[framing.end]] if case.ends and framing.end else ids


def adversarial(framing: ChatFraming) -> Outcome:
    """Spell all of the template's tokens in an observation."""
    protected = framing.encoder.protected
    message = framing.template.assistant([CALL]) if framing.format else {"role": "assistant", "content": "Yes."}

    def tokens(content: str) -> list[int]:
        observation = [answer(content)] if framing.format else content
        ids = framing.observation(observation, Turn([], "", message))
        return [index for index in ids if index in protected.values()]

    forged = tokens(" ".join(protected)) != tokens("harmless")
    return Outcome("wrong", "they become its tokens") if forged else Outcome("same", "they remain text")


def text_cases(template: ChatTemplate) -> list[Case]:
    """Transcripts in which a user's messages are the observations."""

    def talk(*contents: str) -> list[Message]:
        roles = ("user", "assistant")
        return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]

    thinking = "<think>\nThe word is rain.\n</think>\n\nIt rains."
    return [
        Case("answers", talk("A question?", "It rains.", "And now?", "It snows.", "And then?")),
        Case("turns without their end", talk("A question?", "It rai", "And now?", "It sno", "And then?"), ends=False),
        Case("Unicode", talk("한국어 😀?", "Ça va, e\u0301 ☂️.", "\u200bمرحبا", "日本。", "👩‍👩‍👧 ok")),
        Case("leading white space", talk("  A question?", "\n\n  It rains.", "\n  And now?", " It snows.", "\tEnd")),
        Case("thinking in the text", talk("A question?", thinking, "And now?", thinking, "And then?")),
        *thoughts(template, talk("A question?", "It rains.", "And now?", "It snows.", "And then?")),
    ]


def tool_cases(template: ChatTemplate) -> list[Case]:
    """Transcripts in which tools answer."""
    call = template.assistant([CALL])
    two = template.assistant([CALL, ("look_up", {"word": "snow", "limit": 1}, "call00001")])
    again = answer("Snow.") | {"tool_call_id": "call00001"}
    strange = template.assistant([("look_up", {"word": 'é "q" \\ 한\u200b😀', "limit": -1}, "call00000")])
    loop = [USER, call, answer("Rain."), call, answer("")]
    return [
        Case("tool loop", loop),
        Case("several calls per turn", [USER, two, answer("Rain."), again, two, answer("7"), again]),
        Case("turns without their end", loop, ends=False),
        Case("Unicode and quotes", [USER, strange, answer('{"a": "é 한 😀"}\n'), strange, answer("\\n")]),
        Case("leading white space", [USER, call, answer("\n  Rain."), call, answer(" 7")]),
        *thoughts(template, loop),
    ]


def thoughts(template: ChatTemplate, messages: Sequence[Message]) -> list[Case]:
    """The transcript with thinking in the assistant's messages, if the template writes it."""
    thinking = [
        {**message, "reasoning_content": "zqx"} if message["role"] == "assistant" else message for message in messages
    ]
    with suppress(Rejected):
        if "zqx" in template.render(thinking[:2]):
            return [Case("thinking", thinking)]
    return []


def answer(content: str) -> Message:
    """A tool's message."""
    return {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": content}


def functions(message: Message | None) -> list[Any]:
    """Names and arguments of the calls of a message, whose arguments may be JSON text."""
    calls = [dict(call["function"]) for call in (message or {}).get("tool_calls", ())]
    for call in calls:
        if isinstance(call["arguments"], str):
            call["arguments"] = json.loads(call["arguments"])
    return calls


def difference(framing: ChatFraming, episode: Sequence[int], whole: Sequence[int]) -> str:
    """The first token in which two sequences differ, with the text before it."""
    at = shared_start(episode, whole)
    decode = framing.tokenizer.decode
    one, other = (repr(decode([ids[at]])) if at < len(ids) else "nothing" for ids in (episode, whole))
    before = decode(list(episode[max(at - CONTEXT, 0) : at]))
    return f"token {at}: {one}, and {other} in one rendering, after {before!r}"


def check_model(name: str, config: PromptsConfig) -> tuple[list[str], int]:
    """`check_template` for a model by name; its tokenizer and generation settings are read, and no weights."""
    tokenizer = load_tokenizer(ModelConfig(name=name))
    ends = None
    with suppress(OSError):  # there are no generation settings
        ends = GenerationConfig.from_pretrained(resolve(name, "policy")).eos_token_id
    return check_template(tokenizer, config, [ends] if isinstance(ends, int) else ends or [])
