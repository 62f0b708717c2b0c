"""Completions read as they stand after their prompts, with real tokenizers of each kind."""

import pytest
import torch
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from tokencredit.text.data.detokenizer import Detokenizer, StopSearch
from tokencredit.text.data.rollout import Rollout

KINDS = ["sentencepiece", "unigram", "wordpiece", "bytes"]


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def after(tokenizer, prompt):
    """A reader of completions, and what it reads of a whole text's tokens behind the prompt's."""
    reader = Detokenizer(tokenizer, ids(tokenizer, prompt))
    return reader, lambda whole: ids(tokenizer, whole)[len(ids(tokenizer, prompt)) :]


def rollout(tokenizer, prompts, completions):
    """Token ids of prompts and completions as an engine gives them, padded on the left and on the right."""

    def padded(rows, left):
        width = max(map(len, rows))
        fill = [[tokenizer.eos_token_id] * (width - len(row)) for row in rows]
        own = [[True] * len(row) for row in rows]
        gaps = [[False] * len(gap) for gap in fill]
        pairs = [(fill, rows, gaps, own), (rows, fill, own, gaps)][not left]
        joined = [[a + b for a, b in zip(x, y, strict=True)] for x, y in (pairs[:2], pairs[2:])]
        return torch.tensor(joined[0]), torch.tensor(joined[1])

    (prompt_ids, prompt_mask), (response_ids, mask) = padded(prompts, True), padded(completions, False)
    numbers = torch.zeros(mask.shape)
    return Rollout(prompt_ids, prompt_mask, response_ids, mask, numbers, torch.zeros(len(mask)).bool())


def test_the_space_after_the_prompt_belongs_to_the_completion(tokenizer):
    reader, rest = after(tokenizer, "The sky is")
    assert reader.text(rest("The sky is blue.")) == " blue."
    assert reader.text([*rest("The sky is blue."), tokenizer.eos_token_id]) == " blue."


def test_decoded_alone_it_is_lost(tokenizers):
    """What this module is for."""
    for kind, alone in {"sentencepiece": "blue", "unigram": "blue", "wordpiece": "blue", "bytes": " blue"}.items():
        _, rest = after(tokenizers[kind], "The sky is")
        assert tokenizers[kind].decode(rest("The sky is blue")) == alone


def test_at_the_beginning_of_a_text_stands_no_space(tokenizer):
    assert Detokenizer(tokenizer, []).text(ids(tokenizer, "The sky")) == "The sky"
    assert Detokenizer(tokenizer, [tokenizer.bos_token_id]).text(ids(tokenizer, "The sky")) == "The sky"


def test_a_word_that_the_prompt_began(tokenizer):
    """A completion without a space before it has none: the middle of each text, token by token."""
    whole = ids(tokenizer, "I was singing in the rain")
    for cut in range(1, len(whole)):
        prompt, rest = tokenizer.decode(whole[:cut]), Detokenizer(tokenizer, whole[:cut]).text(whole[cut:])
        assert prompt + rest == "I was singing in the rain"
    assert not all(tokenizer.decode(whole[cut]).startswith((" ", "I")) for cut in range(len(whole)))


def test_special_tokens_of_a_chat_change_nothing(tokenizer):
    """A prompt as a template writes it: special tokens at its beginning, within and at its end."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    blue = ids(tokenizer, "The sky is blue")[len(ids(tokenizer, "The sky is")) :]
    for prompt in ([bos, *ids(tokenizer, "The sky is")], [bos, *ids(tokenizer, "The sky is"), eos, bos]):
        assert Detokenizer(tokenizer, prompt).text([*blue, eos]) == " blue"
        assert Detokenizer(tokenizer, prompt).text([eos]) == ""


def test_a_prompt_that_was_cut_changes_nothing(tokenizer):
    """Its beginning is gone, within a word or not; at least its last word is there."""
    prompt = ids(tokenizer, "The sky is")
    blue = ids(tokenizer, "The sky is blue")[len(prompt) :]
    last = len(ids(tokenizer, "The sky"))
    for cut in range(last + 1):
        assert Detokenizer(tokenizer, prompt[cut:]).text(blue) == " blue"


def test_the_texts_of_tokens_are_the_completion(tokenizer):
    whole = "The sky is not green. A good café"
    prompt = ids(tokenizer, "The sky is")
    rest = ids(tokenizer, whole)[len(prompt) :]
    reader = Detokenizer(tokenizer, prompt)
    tokens = reader.tokens([*rest, tokenizer.eos_token_id])
    assert len(tokens) == len(rest) + 1
    assert "".join(tokens[:-1]) == reader.text(rest) == whole.removeprefix("The sky is")
    assert tokens[-1].strip() == "</s>"
    assert reader.tokens([]) == []


def test_texts_of_tokens_by_hand(tokenizers):
    hand = {
        "unigram": [" ", "w", "a", "s", " ", "s", "ing", "ing"],  # ▁ w a s ▁ s ing ing
        "wordpiece": [" was", " sing", "ing"],  # was sing ##ing
        "bytes": [" was", " s", "ing", "ing"],  # Ġwas Ġs ing ing
    }
    for kind, expected in hand.items():
        reader, rest = after(tokenizers[kind], "I")
        assert reader.tokens(rest("I was singing")) == expected


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_a_character_of_several_tokens(kind, tokenizers):
    """It stands at its last token, and belongs to the completion where the prompt has its first bytes."""
    tokenizer = tokenizers[kind]
    word = ids(tokenizer, "é🙃x")
    parts = [tokenizer.decode(word[:count]) for count in range(1, len(word) + 1)]
    assert any("\ufffd" in part for part in parts), "the tokenizer splits a character"
    for cut in range(len(word)):
        reader = Detokenizer(tokenizer, word[:cut])
        kept = reader.prompt.rstrip("\ufffd")
        assert kept + reader.text(word[cut:]) == "é🙃x"
        assert kept + "".join(reader.tokens(word[cut:])) == "é🙃x"
    tokens = Detokenizer(tokenizer, []).tokens(word)
    assert [token for token in tokens if token] == ["é", "🙃", "x"]


def test_bytes_that_make_no_character_are_shown(tokenizers):
    tokenizer = tokenizers["bytes"]
    half = ids(tokenizer, "🙃")[0]
    reader = Detokenizer(tokenizer, ids(tokenizer, "The sky"))
    for row in ([half] * 3, [half, *ids(tokenizer, " is")], [half] * 20, [half, tokenizer.eos_token_id]):
        assert "".join(reader.tokens(row)).replace("</s>", "") == reader.text(row)


def test_a_decoder_that_reads_the_prompt_anew_decodes_the_completion_alone(tokenizers):
    """Here "is" before a word becomes "was": nothing of what is decoded then belongs to the completion for sure."""
    backend = type(tokenizers["bytes"].backend_tokenizer).from_str(tokenizers["bytes"].backend_tokenizer.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Replace("is b", "was b")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    reader, rest = after(tokenizer, "The sky is")
    assert tokenizer.decode(ids(tokenizer, "The sky is blue")) == "The sky was blue"
    assert reader.text(rest("The sky is blue")) == " blue"
    assert reader.text(rest("The sky is not")) == " not"


def test_spaces_that_are_cleaned_up(tokenizers):
    """A tokenizer that takes spaces away before punctuation does so in the completion, and not in the prompt."""
    backend = tokenizers["unigram"].backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    prompt = ids(tokenizer, "The sky ")
    assert tokenizer.decode(prompt) == "The sky "
    whole = [*prompt, *ids(tokenizer, "The .")[-1:]]
    assert tokenizer.decode(whole) == "The sky."
    assert Detokenizer(tokenizer, prompt).text(whole[len(prompt) :]) == "."


def test_byte_level_completions_are_what_they_are_alone(tokenizers):
    """Token ids at random: with tokenizers like GPT-2's nothing changes."""
    tokenizer = tokenizers["bytes"]
    letters = [i for i in range(len(tokenizer)) if "\ufffd" not in tokenizer.decode([i])]
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(letters)[torch.randint(len(letters), (40, 12), generator=generator)].tolist()
    for row in rows:
        alone = tokenizer.decode(row[5:], skip_special_tokens=True)
        assert Detokenizer(tokenizer, row[:5]).text(row[5:]) == alone
        assert Detokenizer(tokenizer, row[:5]).tokens(row[5:]) == [tokenizer.decode([token]) for token in row[5:]]


def test_rows_of_a_rollout_whatever_pads_them(tokenizer):
    prompts = [ids(tokenizer, text) for text in ("The sky is", "I was singing in")]
    wholes = [ids(tokenizer, text) for text in ("The sky is blue", "I was singing in the rain")]
    completions = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes, strict=True)]
    made = rollout(tokenizer, prompts, [completions[0], [*completions[1], tokenizer.eos_token_id]])
    assert made.texts(tokenizer) == [" blue", " the rain"]
    assert "".join(made.tokens(0, tokenizer)) == " blue"


def test_stop_strings_see_the_space_and_special_tokens(tokenizer):
    prompt = ids(tokenizer, "The sky is")
    blue = ids(tokenizer, "The sky is blue")[len(prompt) :]
    row = [*blue, tokenizer.eos_token_id]
    for stop, found in {" blue": True, "</s>": True, "is": False, "is blue": False, "green": False}.items():
        assert (StopSearch([stop], tokenizer, prompt).end(row) is not None) is found
