import inspect
import math
import sys

import pytest
import torch

from tokencredit.errors import ConfigError
from tokencredit.text.models.model_loading import resolve
from tokencredit.text.rewards.calls import Term, check_columns
from tokencredit.text.rewards.ready_made import (
    READY_MADE,
    count,
    distinct,
    length,
    lexicon_sentiment,
    reference_fluency,
    regex,
    repetition,
    similarity,
    words,
)


def rated(function, *completions, **columns):
    return function(prompts=["Say:"] * len(completions), completions=list(completions), **columns)


def test_words():
    assert words("Don't – it's a well-made FILM, 10/10!") == ["don't", "it's", "a", "well-made", "film", "10", "10"]
    assert words("") == []


def test_length():
    texts = ["Good film. Good!", ""]
    assert rated(length(), *texts) == [3.0, 0.0]
    assert rated(length("characters"), *texts) == [16.0, 0.0]
    assert rated(length("tokens"), *texts, completion_ids=[[5, 6, 7, 8, 0], [0]]) == [5.0, 1.0]
    turns = {"completion_ids": [[5, 6, 7, 8, 0], [0]], "completion_mask": [[1, 0, 0, 1, 1], [1]]}
    assert rated(length("tokens"), *texts, **turns) == [3.0, 1.0], "sampled ones"


def test_count():
    assert rated(count("."), "One. Two. Three", "...", "") == [2.0, 3.0, 0.0]
    assert rated(count("aa"), "aaaa", "AA") == [2.0, 0.0]


def test_regex():
    assert rated(regex(r"\d+ stars?"), "I give it 3 stars.", "No stars.") == [1.0, 0.0]
    assert rated(regex(r"(?i)^good"), "Good", "so good") == [1.0, 0.0]


def test_repetition():
    # a b c a b c: abc bca cab abc, so 3 of 4 differ
    assert rated(repetition(), "a b c a b c", "a b c d", "a b", "") == [0.25, 0.0, 0.0, 0.0]
    assert rated(repetition(1), "no no no yes") == [0.5]


def test_distinct():
    # no no, no no, no yes: 2 of 3
    assert rated(distinct(), "no no no yes", "a b c", "alone", "") == [pytest.approx(2 / 3), 1.0, None, None]


def test_lexicon_sentiment_by_hand():
    """VADER gives "good" the valence 1.9 and normalises a sum s to s / √(s² + 15); "not" multiplies by −0.74."""
    good, not_good, nothing = rated(lexicon_sentiment(), "good", "not good", "A film.")
    assert good == pytest.approx(1.9 / math.sqrt(1.9**2 + 15), abs=1e-4)
    assert not_good == pytest.approx(-1.406 / math.sqrt(1.406**2 + 15), abs=1e-4)
    assert nothing == 0.0


def test_lexicon_sentiment_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ConfigError, match=r"pip install 'tokencredit\[lexicon\]'"):
        lexicon_sentiment()


def test_reference_fluency():
    assert rated(reference_fluency(), "a", "b", ref_logprobs=[[-1.0, -2.0], []]) == [-1.5, None]


def test_reference_fluency_without_a_reference_says_what_to_set():
    terms = [Term("fluency", 1.0, reference_fluency())]
    with pytest.raises(ConfigError, match=r"'fluency' needs ref_logprobs, .* set kl\.coef above 0"):
        check_columns(terms, ["prompts", "completions", "completion_ids"])
    check_columns(terms, ["prompts", "completions", "ref_logprobs"])


def test_messages_are_read_by_their_contents():
    assert rated(count("o"), [{"role": "assistant", "content": "Good"}]) == [2.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: length("lines"), r"unit is 'lines'; it must be one of words, characters, tokens"),
        (lambda: count(""), r"text is ''"),
        (lambda: regex("(a"), r"pattern is '\(a', which is not a valid regular expression: missing \)"),
        (lambda: regex("a{99999999999999999999}"), r"is not a valid regular expression: the repetition"),
        (lambda: repetition(0), r"n is 0; it must be a whole number of at least 1"),
        (lambda: distinct(1.5), r"n is 1\.5"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_all_have_their_name_and_take_everything_by_name():
    """So that they can be handed to TRL's trainers too."""
    settings = {"count": {"text": "a"}, "regex": {"pattern": "a"}}
    for name, make in READY_MADE.items():
        if name != "similarity":  # needs a model; its own test below
            function = make(**settings.get(name, {}))
            assert function.__name__ == name
            assert [*inspect.signature(function).parameters][:2] == ["prompts", "completions"]
            assert "columns" in inspect.signature(function).parameters


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A Sentence Transformers model on the built-in classifier's DistilBERT: its vectors mean little, but are real."""
    library = pytest.importorskip("sentence_transformers")
    trunk = resolve("builtin:reviews", "sentiment")  # without pooling of its own, it gets the usual one: the mean
    model = library.SentenceTransformer(trunk, device="cpu", model_kwargs={"dtype": torch.float32})
    folder = tmp_path_factory.mktemp("embedder")
    model.save(str(folder))
    return str(folder), model


def test_similarity_is_the_mean_cosine_to_the_others(embedder):
    folder, model = embedder
    texts = ["a great film", "a great film", "dull and far too long"]
    vectors = torch.tensor(model.encode(texts))
    same, apart = 1.0, float(torch.nn.functional.cosine_similarity(vectors[0], vectors[2], dim=0))
    expected = [(same + apart) / 2, (same + apart) / 2, apart]
    assert rated(similarity(folder, batch_size=2), *texts) == pytest.approx(expected, abs=1e-5)
    assert apart < 0.99


def test_one_completion_has_nothing_to_be_similar_to(embedder):
    assert rated(similarity(embedder[0]), "alone") == [None]


def test_similarity_without_its_model_or_library(monkeypatch, tmp_path):
    if "sentence_transformers" in sys.modules:
        with pytest.raises(ConfigError, match="cannot load a sentence embedding model from"):
            similarity(str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'tokencredit\[similarity\]'"):
        similarity()
