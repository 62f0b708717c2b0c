"""Whatever user code returns and the policy calls, a reply is text within bounds, and nothing is raised."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.turns import called, episode, said
from tokencredit.text.turns.protocols.episode import CUT

pytestmark = pytest.mark.slow

LIMIT = 4
ASKED = [{"role": "user", "content": "Go."}]
TEXTS = st.text(max_size=200) | st.text(st.characters(categories=["Cs", "Cc", "Lo"]), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=9) | st.decimals()
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "system", "assistant", None, 3])},
    optional={"content": TEXTS | st.none() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}))},
)
VALUES = st.recursive(
    PLAIN | MESSAGES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
RESULTS = VALUES | st.tuples(VALUES, VALUES, VALUES) | st.tuples(TEXTS | MESSAGES, st.floats(), st.booleans())
CALLS = st.lists(
    VALUES
    | st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["same", "later", "reset", "none"]) | VALUES},
                optional={"arguments": VALUES | st.fixed_dictionaries({"value": VALUES})},
            )
        },
        optional={"id": VALUES},
    ),
    max_size=4,
)


class Returning:
    """Its step returns what it is told."""

    def reset(self, row):
        return row["first"]

    def step(self, completion):
        return self.result


def same(value: dict | list | str) -> str:
    """Return a value.

    Args:
        value: the value
    """
    return value


async def later(value: int | None = None) -> str:
    """Return a value.

    Args:
        value: the value
    """
    return value


STEPS = {chat: episode(Returning, row={"first": ASKED if chat else "Go."}, observation_tokens=LIMIT) for chat in (0, 1)}
CALLED, _ = episode(None, [same, later], {"prompt": ASKED}, observation_tokens=LIMIT)


def check(text):
    assert type(text) is str
    assert len(text) <= 16 * LIMIT + len(CUT)
    text.encode()


@given(st.sampled_from([0, 1]), RESULTS)
def test_any_result_of_a_step_is_a_reply_within_bounds(chat, result):
    begun, _ = STEPS[chat]
    begun.environment.result = result
    reply = begun.reply(said(""))
    assert reply.ending in (None, "done", "error")
    assert math.isfinite(reply.reward)
    assert (reply.ending == "error") == ("failed" in reply.problems)
    if not chat:
        check(reply.observation)
        return
    assert len(reply.observation) <= LIMIT
    for message in reply.observation:
        assert message["role"] in ("user", "tool")
        check(message["content"])


@given(VALUES)
def test_any_result_of_a_tool_is_a_text_within_bounds(result):
    if not isinstance(result, dict | list | str):
        result = [result]
    reply = CALLED.reply(called(("same", {"value": result})))
    assert reply.ending is None
    assert "failed" not in reply.problems
    check(reply.observation[0]["content"])


@given(CALLS, st.none() | TEXTS)
def test_calls_of_any_form_are_answered(calls, malformed):
    turn = called(malformed=malformed)
    turn.message["tool_calls"].extend(calls)
    reply = CALLED.reply(turn)
    if not calls and malformed is None:
        assert reply.ending == "answer"
        return
    assert reply.ending is None
    roles = ["tool"] * len(calls) + ["user"] * (malformed is not None)
    assert [message["role"] for message in reply.observation] == roles
    for message in reply.observation:
        check(message["content"])
        json.dumps({key: value for key, value in message.items() if key != "content"}).encode()
        for value in message.values():
            assert isinstance(value, str)
            value.encode()
