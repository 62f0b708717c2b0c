"""Episodes of the built-in worlds of several turns, played badly: what their policies learn to speak."""

import random
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from tokencredit.text.turns.builtin.calculator import Calculator
from tokencredit.text.turns.builtin.grid import DIRECTIONS, Grid

Message = dict[str, Any]
CAREFUL = 0.85
"""Share of the turns on the grid that avoid walls and holes; the others go anywhere."""
ASTRAY = 0.02
"""Share of the turns on the grid that name no direction."""
OTHER_WORDS = ("back", "north", "forward", "wait")
ASKS = 0.3
"""Share of the calculator's episodes that calculate; in the others the answer is one of the question's numbers."""


def wander(view: str, rng: random.Random) -> str:
    """A turn on the grid that pays no attention to where the goal is."""
    if rng.random() < ASTRAY:
        return rng.choice(OTHER_WORDS)
    open_ways = re.findall(r"(\w+): (?:free|goal)", view)
    if open_ways and rng.random() < CAREFUL:
        return str(rng.choice(open_ways)).lower()
    return rng.choice(list(DIRECTIONS))


def grid_pieces(rng: random.Random) -> list[str]:
    """An episode on the grid: prompt, turn, observation, turn and so on, up to the last turn."""
    world, done = Grid(), False
    pieces = [str(world.reset({"seed": rng.getrandbits(62)}))]
    while not done:
        pieces.append(f" {wander(pieces[-1], rng)}")
        view, _, done = world.step(pieces[-1])
        pieces.append(view)
    return pieces[:-1]


def grid_row(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[int]:
    """Token ids of an episode on the grid, as in a rollout: each turn ends with the end token."""
    ids: list[int] = []
    for number, piece in enumerate(grid_pieces(rng)):
        ids += tokenizer(piece).input_ids + [tokenizer.eos_token_id] * (number % 2)
    return ids


def calculator_row(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[int]:
    """Token ids of an episode with the calculator, up to the end of its last turn."""
    text = rendered(calculator_messages(rng), tokenizer)
    ids: list[int] = tokenizer(text.removesuffix("\n"), add_special_tokens=False).input_ids
    return ids


def calculator_messages(rng: random.Random) -> list[Message]:
    """Messages of an episode: the question, perhaps a calculation, and an answer."""
    world = Calculator()
    question = world.reset(seed=rng.getrandbits(62))
    _, _, one, _, other = question.rstrip("?").split()
    expression = f"{one} + {other}"
    messages: list[Message] = [{"role": "user", "content": question}]
    value = world.calculate(expression)
    if rng.random() < ASKS:
        messages += call("calculate", {"expression": expression}, value)
    else:
        value = rng.choice((one, other))
    messages += call("answer", {"number": int(value)}, world.answer(int(value)))
    return [*messages, {"role": "assistant", "content": "Done."}]


def call(name: str, arguments: dict[str, object], result: str) -> list[Message]:
    """A call and its result."""
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": name, "content": result},
    ]


def rendered(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of a conversation with the calculator's tools."""
    world = Calculator()
    text = tokenizer.apply_chat_template(messages, tools=[world.answer, world.calculate], tokenize=False)
    assert isinstance(text, str)
    return text
