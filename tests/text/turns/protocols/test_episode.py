import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.text.turns.protocols.episode import CUT, Reply, fit, shorten


def count(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_what_fits_is_left_alone(tokenizer):
    for reply in (Reply(), Reply("It was good."), Reply([{"role": "tool", "content": "It was good."}], 1.0, "done")):
        assert fit(reply, 64, tokenizer) is reply


def test_a_longer_text_is_cut_to_exactly_the_limit_and_says_so(tokenizer):
    text = " good" * 1000
    reply = fit(Reply(text, 0.5, None, ("failed",)), 20, tokenizer)
    assert reply.observation.endswith(CUT)
    assert text.startswith(reply.observation.removesuffix(CUT))
    assert count(tokenizer, reply.observation) == 20
    assert (reply.problems, reply.reward) == (("failed", "cut"), 0.5)


def test_messages_share_the_limit(tokenizer):
    sizes = [count(tokenizer, " good" * 30), count(tokenizer, CUT)]
    messages = [{"role": "tool", "name": str(i), "content": " good" * 30} for i in range(4)]
    reply = fit(Reply(messages), 2 * sizes[0] + sizes[1] + 1, tokenizer)
    contents = [message["content"] for message in reply.observation]
    assert contents[:2] == [" good" * 30] * 2
    assert contents[2] != CUT
    assert (" good" * 30).startswith(contents[2].removesuffix(CUT))
    assert count(tokenizer, contents[2]) <= sizes[1] + 1
    assert contents[3] == CUT
    assert [message["name"] for message in reply.observation] == ["0", "1", "2", "3"]
    assert reply.problems == ("cut",)


def test_a_text_that_was_cut_by_characters_is_marked_once(tokenizer):
    text, cut = shorten(" good" * 1000, 20)
    assert cut
    assert text == (" good" * 1000)[:320] + CUT
    reply = fit(Reply(text, problems=("cut",)), 20, tokenizer)
    assert reply.observation.count(CUT) == 1
    assert reply.problems == ("cut",)


@pytest.mark.slow
@given(st.text(max_size=300), st.integers(1, 40))
@settings(max_examples=30)
def test_no_text_is_longer_than_the_limit_or_than_its_mark(tokenizer, text, tokens):
    text, _ = shorten(text, tokens)
    reply = fit(Reply(text), tokens, tokenizer)
    assert count(tokenizer, reply.observation) <= max(tokens, count(tokenizer, CUT))
    assert text.startswith(reply.observation.removesuffix(CUT))
    assert ("cut" in reply.problems) == (reply.observation != text)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("\ud83d\ude00", "😀"),
        ("\ud800", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("é😀\0", "é😀\0"),
    ],
)
def test_halves_of_characters_are_replaced(text, clean):
    assert shorten(text, 9) == (clean, False)
