from math import log

import pytest
import torch

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.question import (
    Text,
    choose,
    gains,
    most_changed,
    predict,
    refuse_overlap,
    token_ids,
)
from tokencredit.tools.inspect.recording import record

# Two positions, four tokens. At the second, training moves half of the first token's probability to the second's.
BASE = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.1, 0.2, 0.2]]).log()
TUNED = torch.tensor([[0.25, 0.25, 0.3, 0.2], [0.25, 0.35, 0.2, 0.2]]).log()
SEEN = (BASE, TUNED)
TEXT = Text(torch.arange(5), 3)


def test_positions_predict_the_completion():
    assert TEXT.positions == [2, 3]


def test_apart_counts_a_common_beginning_as_prompt():
    text = Text(torch.tensor([1, 2, 3, 4, 5]), 2)
    # After 1 and 2 both have the same past; position 2 is the first with one of its own.
    assert text.apart(Text(torch.tensor([1, 2, 9]), 2)).positions == [2, 3]
    assert text.apart(Text(torch.tensor([1, 2, 3, 9]), 2)).positions == [3]
    assert text.apart(Text(torch.tensor([1, 9]), 1)).positions == [1, 2, 3]
    assert text.apart(text).positions == []


def test_gains_by_hand():
    expected = [(0.5 + 0.25) / 2 * log(0.5), (0.1 + 0.35) / 2 * log(3.5), 0, 0]
    assert gains(BASE[1], TUNED[1]).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_position_with_the_largest_kl():
    assert most_changed(SEEN, [], []) == 1


def test_the_position_where_chosen_tokens_moved_most():
    assert most_changed(SEEN, [2], [3]) == 0
    assert most_changed(SEEN, [], [3]) == 0
    assert most_changed(SEEN, [1], []) == 1


def test_tokens_that_moved_most():
    question = choose(SEEN, TEXT, [], [])
    assert (question.position, question.up.tolist(), question.down.tolist()) == (3, [1], [0])
    assert question.source == (
        "the position of the completion where KL(tuned ‖ base) is largest; up: the tokens that gained most; "
        "down: the tokens that lost most"
    )


def test_chosen_tokens():
    question = choose(SEEN, TEXT, [2], [3])
    assert (question.position, question.up.tolist(), question.down.tolist()) == (2, [2], [3])
    assert question.source == (
        "the position of the completion where the chosen words moved most; up: chosen; down: chosen"
    )


def test_a_token_is_not_in_both_sets():
    assert choose(SEEN, TEXT, [0], []).down.tolist() != [0]
    assert choose(SEEN, TEXT, [], [1]).up.tolist() != [1]


def test_at_most_five_tokens_each():
    base = torch.full((1, 20), 1 / 20).log()
    tuned = (base + torch.linspace(-1, 1, 20)).log_softmax(-1)
    question = choose((base, tuned), Text(torch.arange(2), 1), [], [])
    assert question.up.tolist() == [19, 18, 17, 16, 15]
    assert len(question.down) == 5


def test_models_that_are_the_same_are_asked_about_likely_tokens():
    question = choose((BASE, BASE), Text(torch.arange(5), 3), [], [])
    assert len({*question.up.tolist(), *question.down.tolist()}) == 2
    assert "no probability moved" in question.source


def test_predictions_are_those_of_the_model(gpt2, ids):
    text = Text(ids, 4)
    seen = predict(gpt2, [record("it", parts, ids) for parts in gpt2], text)
    assert seen[1].shape[0] == 8
    for parts, logprobs in zip(gpt2, seen, strict=True):
        assert torch.allclose(logprobs, parts.lm(input_ids=ids[None]).logits[0, 3:-1].log_softmax(-1), atol=1e-4)


def test_a_word_is_tried_with_a_space_first(tokenizer):
    (bad, comma) = token_ids(tokenizer, "--up", ["bad", ","])
    assert (tokenizer.decode([bad]), tokenizer.decode([comma])) == (" bad", ",")
    assert token_ids(tokenizer, "--up", [" bad"]) == [bad]


def test_words_of_several_tokens_are_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"--down 'unbelievable' is \d tokens \(' un', .*\); give words of one token each"
    ):
        token_ids(tokenizer, "--down", ["unbelievable"])
    with pytest.raises(ConfigError, match="--up '' is 0 tokens"):
        token_ids(tokenizer, "--up", [""])


def test_a_word_in_both_sets_is_refused(tokenizer):
    bad = token_ids(tokenizer, "--up", ["bad"])
    with pytest.raises(ConfigError, match="' bad' is in both --up and --down"):
        refuse_overlap(bad, bad, tokenizer)
