import pytest

from tokencredit.runs.errors import ConfigError
from tokencredit.text.prompts import Prompts


def test_batches_go_through_the_prompts_in_turn(tokenizer):
    prompts = Prompts(["One", "Two words", "Three words here"], tokenizer)
    assert prompts.batch(0, 4)[0] == ["One", "Two words", "Three words here", "One"]
    assert prompts.batch(4, 2)[0] == ["Two words", "Three words here"]


def test_padding_is_on_the_left_and_masked(tokenizer):
    texts, ids, mask = Prompts(["One", "This movie was really"], tokenizer).batch(0, 2)
    for text, row, kept in zip(texts, ids, mask, strict=True):
        assert tokenizer.decode(row[kept]) == text
        assert kept.tolist() == sorted(kept.tolist())


def test_the_beginning_of_sequence_token_is_an_option(tokenizer):
    plain = Prompts("This movie", tokenizer).ids[0]
    assert Prompts("This movie", tokenizer, add_bos=True).ids[0] == [tokenizer.bos_token_id, *plain]
    assert Prompts("This movie", tokenizer, add_bos=False).ids[0] == plain


def test_a_prompt_longer_than_the_context_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"prompts\.text\[1\] has \d+ tokens, .* has room for 3; shorten"):
        Prompts(["A film", "This movie was really not what I had expected"], tokenizer, max_length=3)


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"prompts\.text\[0\] is '', which has no token"):
        Prompts("", tokenizer)
    assert Prompts("", tokenizer, add_bos=True).ids == [[tokenizer.bos_token_id]]


def test_a_tokenizer_without_the_token_to_add_is_refused(tokenizer):
    from copy import deepcopy

    bare = deepcopy(tokenizer)
    bare.bos_token = None
    with pytest.raises(ConfigError, match=r"prompts\.add_bos is true, but the tokenizer has no beginning-of-sequence"):
        Prompts("This", bare, add_bos=True)
