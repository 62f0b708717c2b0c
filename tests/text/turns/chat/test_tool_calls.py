"""Sampled turns to messages: formats, malformed calls, thinking, and any text at all."""

import json
import random
import string

import pytest

from helpers.chat_templates import MODELS, chat_tokenizer
from helpers.proofs import proofs
from helpers.transcripts import TOOLS
from tokencredit.text.turns.chat.chat_template import look_up
from tokencredit.text.turns.chat.framing import ChatFraming
from tokencredit.text.turns.chat.template_check import functions
from tokencredit.text.turns.chat.tool_calls import (
    FORMATS,
    MAX_CALLS,
    MAX_DEPTH,
    MAX_DESCRIPTION,
    find_format,
    parse_turn,
)

FORMAT = {form.name: form for form in FORMATS}
WITH_TOOLS = [name for name, model in MODELS.items() if model.tools]
CALL = {"name": "look_up", "arguments": {"word": "rain", "limit": 2}}
HERMES = '<tool_call>\n{"name": "look_up", "arguments": %s}\n</tool_call>'


def parse(name, text, tools=TOOLS, prefix=""):
    """A turn of a model, from the text that it writes."""
    framing = ChatFraming(chat_tokenizer(name), uses_tools=True)
    encode = framing.tokenizer
    return framing.parse(encode(text).input_ids, encode(prefix).input_ids, tools)


def hermes(text, prefix=""):
    """A message and what is malformed in it, in the format of Hermes and Qwen."""
    return parse_turn(text, prefix, FORMAT["Hermes and Qwen"], [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Hermes and Qwen", HERMES % '{"word": "rain", "limit": 2}'),
        ("Mistral", '[TOOL_CALLS] [{"name": "look_up", "arguments": {"word": "rain", "limit": 2}, "id": "abcdefghi"}]'),
        ("Mistral with names", '[TOOL_CALLS]look_up[ARGS]{"word": "rain", "limit": 2}'),
        ("Mistral with names", '[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"word": "rain", "limit": 2}'),
        ("Phi-4-mini and Granite", '<|tool_call|>[{"arguments": {"word": "rain", "limit": 2}, "name": "look_up"}]'),
        ("Llama 3.1", '<|python_tag|>{"name": "look_up", "parameters": {"word": "rain", "limit": 2}}'),
        ("Llama 3.1", '\n{"type": "function", "name": "look_up", "parameters": {"word": "rain", "limit": 2}}'),
        ("Command R", 'Action: ```json\n[{"tool_name": "look_up", "parameters": {"word": "rain", "limit": 2}}]\n```'),
        (
            "Command R7B",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look_up", '
            '"parameters": {"word": "rain", "limit": 2}}]<|END_ACTION|>',
        ),
        (
            "DeepSeek-V3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>"
            '{"word": "rain", "limit": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "Kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>"
            '{"word": "rain", "limit": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        ("Gemma 4", '<|tool_call>call:look_up{word:<|"|>rain<|"|>,limit:2}<tool_call|>'),
        (
            "harmony",
            "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
            '{"word": "rain", "limit": 2}<|call|>',
        ),
    ],
)
def test_each_format_reads_its_calls(name, text):
    message, malformed = parse_turn(text, "", FORMAT[name], [])
    assert malformed is None
    assert functions(message) == [CALL]
    assert find_format(text, CALL, [], None).name == name


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_templates_calls_are_found_by_a_round_trip_and_read_from_tokens(name):
    framing = ChatFraming(chat_tokenizer(name), uses_tools=True)
    arguments = {"word": 'it\'s "rain" & 한국어\\', "limit": -3}
    message = framing.template.assistant([("look_up", arguments, "call00000")])
    text = framing.template.turn_text([{"role": "user", "content": "x"}], message)
    turn = parse(name, text + (framing.end or ""))
    assert functions(turn.message) == [{"name": "look_up", "arguments": arguments}]
    assert turn.message["tool_calls"][0]["id"] == "call00000"
    assert turn.malformed is None


def test_the_tokenizers_own_response_template_comes_first():
    tokenizer = ChatFraming(chat_tokenizer("Qwen2.5"), uses_tools=True).tokenizer
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    tokenizer.response_template = own
    try:
        framing = ChatFraming(tokenizer, uses_tools=True)
        assert framing.format.name == "response_template"
        prefix = tokenizer("<|im_start|>user\n<tool_call><|im_end|>\n<|im_start|>assistant\n").input_ids
        text = HERMES % '{"word": "rain", "limit": 2}'
        turn = framing.parse(tokenizer(text).input_ids, prefix, TOOLS)
        assert functions(turn.message) == [CALL]
        assert framing.parse(tokenizer("<tool_call>{").input_ids, prefix, TOOLS).malformed
    finally:
        tokenizer.response_template = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"word": "rain"', "the call is not valid JSON: Expecting ',' delimiter"),
        ("[1]", "the arguments of 'look_up' are [1]; they must be an object"),
        ('{"a": NaN}', "a number in the call is nan; it must be finite"),
        ('{"a": -Infinity}', "a number in the call is -inf; it must be finite"),
        ('{"a": 1e999}', "a number in the call is inf; it must be finite"),
        ('{"a": "\\ud800"}', "a text in the call holds half a character"),
        ('{"\\udfff": 1}', "a text in the call holds half a character"),
        ('{"a": ' + "[" * 80 + "]" * 80 + "}", f"the arguments are nested deeper than {MAX_DEPTH} levels"),
        ('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", f"the arguments are nested deeper than {MAX_DEPTH} levels"),
        ('{"a": ' + "9" * 10**5 + "}", "the call cannot be read: Exceeds the limit"),
        ('"{\\"a\\": "', "the call is not valid JSON: Expecting value"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(arguments, message):
    parsed, malformed = hermes("So: " + HERMES % arguments)
    assert malformed.startswith(message)
    assert len(malformed) <= MAX_DESCRIPTION
    assert "tool_calls" not in parsed
    assert parsed["content"].startswith("So: ")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("7", "a call is 7; it must be an object with a name and arguments"),
        ("{}", "a call has the name None; it must be a text"),
        ('{"name": 7}', "a call has the name 7; it must be a text"),
        ('{"name": ""}', "a call has the name ''; it must be a text"),
        ("", "the call is not valid JSON"),
    ],
)
def test_what_is_no_call_says_so(call, message):
    assert hermes(f"<tool_call>{call}</tool_call>")[1].startswith(message)


def test_arguments_may_be_missing_a_text_or_given_twice():
    assert functions(hermes('<tool_call>{"name": "f"}</tool_call>')[0]) == [{"name": "f", "arguments": {}}]
    assert functions(hermes(HERMES % '"{\\"a\\": 1}"')[0])[0]["arguments"] == {"a": 1}
    assert functions(hermes(HERMES % '{"a": 1, "a": 2}')[0])[0]["arguments"] == {"a": 2}
    assert functions(hermes(HERMES % '{"a": "<|im_end|>"}')[0])[0]["arguments"] == {"a": "<|im_end|>"}


def test_several_calls_have_texts_around_them_and_ids_of_their_own():
    message, malformed = hermes(f"First. {HERMES % '{}'} Then. {HERMES % '{}'}")
    assert malformed is None
    assert message["content"] == "First.  Then."
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]
    message, malformed = hermes(f"{HERMES % '{}'}{HERMES % '{'}")
    assert malformed
    assert "tool_calls" not in message, "one bad call spoils the turn"


def test_a_marker_that_opens_no_call_is_malformed():
    turn = parse("Qwen3-Coder", '<tool_call>\n{"name": "look_up"}\n</tool_call>')
    assert turn.malformed == "a call that begins with <tool_call> is not in the format of this model's tool calls"
    assert parse("Qwen3-Coder", "No call.").malformed is None


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        (f"<think>\n{HERMES % '{}'}</think>Yes.", ""),
        (f"{HERMES % '{}'}</think>Yes.", "<think>"),
        (f"{HERMES % '{'}</think>Yes.", "<think>"),
    ],
)
def test_a_call_in_thinking_is_no_call(text, prefix):
    message, malformed = hermes(text, prefix)
    assert malformed is None
    assert message["content"] == "Yes."
    assert "tool_calls" not in message
    assert "<tool_call>" in message["reasoning_content"]


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2.5"])
def test_thinking_that_the_prompt_begins_is_seen_in_its_tokens(name):
    """One token in Qwen3, several in Qwen2.5."""
    prompt = "<|im_start|>assistant\n<think>\n"
    turn = parse(name, f"a {HERMES % '{}'} b</think>\n{HERMES % '{}'}<|im_end|>", prefix=prompt)
    assert functions(turn.message) == [{"name": "look_up", "arguments": {}}]
    assert parse(name, f"a {HERMES % '{}'}<|im_end|>", prefix=prompt).message.get("tool_calls") is None


def test_types_come_from_the_schema_where_the_format_has_none():
    text = "<tool_call>\n<function=look_up>\n<parameter=word>\n7\n</parameter>\n<parameter=limit>\n7\n</parameter>\n"
    turn = parse("Qwen3-Coder", text + "</function>\n</tool_call><|im_end|>")
    assert functions(turn.message) == [{"name": "look_up", "arguments": {"word": "7", "limit": 7}}]


def test_ids_of_the_model_are_kept_if_the_template_takes_them():
    call = {"name": "look_up", "arguments": {}, "id": "aB3456789"}
    turn = parse("Mistral", f"[TOOL_CALLS] {json.dumps([call, {**call, 'id': 'short'}])}</s>", [look_up])
    assert [made["id"] for made in turn.message["tool_calls"]] == ["aB3456789", "call00001"]


def test_the_end_of_a_turn_is_no_part_of_its_message():
    stranger = chat_tokenizer("Qwen2.5").convert_tokens_to_ids("<|endoftext|>")
    framing = ChatFraming(chat_tokenizer("Qwen2.5"), uses_tools=True, end_ids=[stranger])
    for end in ("<|im_end|>", "<|endoftext|>", ""):
        turn = framing.parse(framing.tokenizer("Yes." + end).input_ids, [], TOOLS)
        assert turn.message == {"role": "assistant", "content": "Yes."}
    for end in ("<end_of_turn>", "<start_function_response>"):
        assert parse("FunctionGemma", "Yes." + end).message["content"] == "Yes."


def test_without_tools_a_call_is_text():
    framing = ChatFraming(chat_tokenizer("Qwen2.5"))
    text = HERMES % "{}"
    turn = framing.parse(framing.tokenizer(text + "<|im_end|>").input_ids, [], [])
    assert turn.message == {"role": "assistant", "content": text}
    assert turn.malformed is None


def garbage(rng, special):
    """A text that a model might write: pieces of calls, special tokens, bytes and JSON, in any order."""
    pieces = [
        *special,
        *["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "<parameter=a>", "</parameter>"],
        *['{"name": "look_up", "arguments": {', '"word": ', "}", "]", "[", "{", '"', "\\", "\\ud800"],
        *["NaN", "-Infinity", "[ARGS]"],
        *["9" * 5000, "[" * 2000, '{"a":' * 2000, " " * 3000, "\n" * 200, "Action: ```json", "```", "to=functions.x"],
        *["call:look_up", "\x00\x01\x02", "\ud7ff", "😀", "한", "{content}", "null", "1e999", '{"name": ', ", ", ":"],
        "".join(rng.choices(string.printable, k=20)),
    ]
    return "".join(rng.choices(pieces, k=rng.randint(1, 12)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [25, *proofs(120)])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_no_turn_raises_or_gives_a_call_that_cannot_be_written(name, number):
    rng = random.Random(name)
    framing = ChatFraming(chat_tokenizer(name), uses_tools=True)
    vocabulary, seen = len(framing.tokenizer), {"calls": 0, "malformed": 0}
    for index in range(number):
        text = garbage(rng, MODELS[name].special)
        if index % 3:
            ids = framing.tokenizer(text).input_ids
        else:
            ids = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 60))]
        turn = framing.parse(ids, framing.prompt("x", TOOLS)[1], TOOLS)
        assert turn.ids == ids
        assert turn.malformed is None or len(turn.malformed) <= MAX_DESCRIPTION
        assert isinstance(turn.message["content"], str)
        json.dumps(turn.message, allow_nan=False).encode()
        (turn.message["content"] + (turn.malformed or "")).encode()
        framing.observation([{"role": "tool", "name": "x", "tool_call_id": "call00000", "content": text}], turn)
        seen["calls"] += "tool_calls" in turn.message
        seen["malformed"] += turn.malformed is not None
    assert seen["malformed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_long_repetitive_turns_are_parsed_quickly(form):
    for piece in (" ", "\n", form.marker or '{"name": "a', "<", "{", "<think>", "<think></think>", "<parameter=a>"):
        message, malformed = parse_turn(piece * 20_000, "", form, [])
        assert message["role"] == "assistant"
        if piece in (form.marker, "<think>"):
            assert malformed == f"the turn has more than {MAX_CALLS} calls or thoughts"
    [begin] = ["<tool_call>\n<function=a>" if form.name == "Qwen3-Coder" else form.marker]
    for piece in ("<parameter=a>", "<arg_key>a</arg_key>", "<escape>", "a", "[", "to=", "\n"):
        assert parse_turn(begin + piece * 20_000, "", form, [])[0]["role"] == "assistant"
