import random
from functools import cache
from pathlib import Path

import pytest

from demo.transcripts import calculator_messages, calculator_row, grid_pieces, grid_row, rendered
from demo.turns import calculator_tokenizer, grid_tokenizer
from tokencredit.text.turns.builtin.calculator import Calculator
from tokencredit.text.turns.builtin.grid import DIRECTIONS
from tokencredit.text.turns.chat.framing import ChatFraming, TextFraming
from tokencredit.text.turns.protocols.episode import Turn

pytestmark = pytest.mark.slow

tokenizer_of = cache(lambda make: make(random.Random(0)))


def test_an_episode_on_the_grid_has_the_tokens_of_a_rollout():
    tokenizer = tokenizer_of(grid_tokenizer)
    framing, turns = TextFraming(tokenizer), set()
    for seed in range(100):
        row, (prompt, *pieces) = grid_row(tokenizer, random.Random(seed)), grid_pieces(random.Random(seed))
        ids = framing.prompt(prompt)[1]
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += framing.observation(piece, Turn([tokenizer.eos_token_id], ""))
            else:
                end = row.index(tokenizer.eos_token_id, len(ids)) + 1
                turn = framing.parse(row[len(ids) : end], ids)
                assert turn.text == piece
                turns.add((turn.text.strip(), len(turn.ids)))
                ids = row[:end]
        assert ids == row
        assert len(row) <= tokenizer.model_max_length
    assert {(word, 2) for word in DIRECTIONS} < turns


def test_an_episode_with_the_calculator_has_the_tokens_of_a_rollout():
    tokenizer, world = tokenizer_of(calculator_tokenizer), Calculator()
    framing, tools = ChatFraming(tokenizer, uses_tools=True), [world.answer, world.calculate]
    for seed in range(40):
        row = calculator_row(tokenizer, random.Random(seed))
        question, *messages = calculator_messages(random.Random(seed))
        ids, turn = framing.prompt([question], tools)[1], Turn([], "")
        for message in messages:
            if message["role"] == "tool":
                ids = ids + framing.observation([message], turn)
            else:
                end = row.index(tokenizer.eos_token_id, len(ids)) + 1
                turn = framing.parse(row[len(ids) : end], ids, tools)
                calls = [call["function"] for call in turn.message.get("tool_calls", ())]
                assert turn.malformed is None
                assert calls == [call["function"] for call in message.get("tool_calls", ())]
                ids = row[:end]
        assert ids == row
        assert len(row) <= tokenizer.model_max_length


def test_demo_episodes_are_well_formed_and_mostly_unsolved():
    played = [grid_pieces(random.Random(seed)) for seed in range(2_000)]
    said = [piece.strip() for pieces in played for piece in pieces[1::2]]
    assert 0.005 < sum(word not in DIRECTIONS for word in said) / len(said) < 0.04
    for word in DIRECTIONS:
        assert 0.2 < said.count(word) / len(said) < 0.3
    asked = [calculator_messages(random.Random(seed)) for seed in range(2_000)]
    tools = [messages[1]["tool_calls"][0]["function"]["name"] for messages in asked]
    assert 0.25 < tools.count("calculate") / len(tools) < 0.35
    assert all(messages[-1] == {"role": "assistant", "content": "Done."} for messages in asked)


def test_the_tools_do_not_depend_on_the_conversation():
    tokenizer = tokenizer_of(calculator_tokenizer)
    texts = [rendered(calculator_messages(random.Random(seed)), tokenizer) for seed in (1, 2)]
    first, second = (text.partition("<|im_start|>user\n") for text in texts)
    assert first[0] == second[0]
    assert "calculate(expression): Evaluate" in first[0]
    assert first[2] != second[2]


@pytest.mark.parametrize("make", [grid_tokenizer, calculator_tokenizer])
def test_tokenizers_spell_any_text(make, tmp_path: Path):
    tokenizer = tokenizer_of(make)
    text = 'Café <tool_call>\n{"x": -10}\n</tool_call>  naïve\n\n🙂 end '
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer.eos_token != tokenizer.pad_token or make is grid_tokenizer
    assert len(tokenizer) <= 520
