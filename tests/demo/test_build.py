import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertForSequenceClassification,
    GPT2LMHeadModel,
)

from demo import build as building
from demo.build import FOLDER, build, main
from demo.corpus import cut
from demo.grammar import reviews
from demo.measures import NEW_TOKENS, PROMPT, complete, load, negative_probability

pytestmark = pytest.mark.slow

FRESH = reviews(1_000, seed=2_026)
TEXTS = [review.text for review in FRESH]
BLAME = torch.tensor([not review.positive for review in FRESH])


@pytest.fixture(scope="module")
def policy():
    return load(FOLDER / "policy", AutoModelForCausalLM)


@pytest.fixture(scope="module")
def sentiment():
    return load(FOLDER / "sentiment", AutoModelForSequenceClassification)


@pytest.fixture(scope="module")
def samples(policy):
    return complete(*policy, PROMPT, count=300, seed=5)


def accuracy(sentiment, texts):
    return ((negative_probability(*sentiment, texts) > 0.5) == BLAME).float().mean().item()


def test_the_folders_hold_ordinary_models_without_pickle_in_six_megabytes():
    files = [file for file in FOLDER.glob("*/*") if file.is_file()]
    assert {file.name for file in files} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in files) <= 6e6


def test_the_policy_loads_like_any_other_model():
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "policy")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "policy")
    assert isinstance(model, GPT2LMHeadModel)
    assert 1e6 <= model.num_parameters() <= 3e6
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.config.bos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.n_positions
    assert tokenizer.decode(tokenizer("Café, naïve & new!").input_ids) == "Café, naïve & new!"


def test_the_classifier_loads_like_any_other_model():
    model = AutoModelForSequenceClassification.from_pretrained(FOLDER / "sentiment")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "sentiment")
    assert isinstance(model, DistilBertForSequenceClassification)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert set(tokenizer("GOOD film")) == {"input_ids", "attention_mask"}
    assert tokenizer.convert_ids_to_tokens(tokenizer("GOOD film").input_ids) == ["[CLS]", "good", "film", "[SEP]"]


@pytest.mark.proof
def test_the_classifier_is_right_on_reviews_it_has_not_read(sentiment):
    assert accuracy(sentiment, TEXTS) >= 0.97
    rng = random.Random(0)
    assert accuracy(sentiment, [cut(text, rng) for text in TEXTS]) >= 0.9


@pytest.mark.proof
def test_samples_are_mostly_positive_varied_and_sometimes_negative(sentiment, samples):
    completions, lengths = samples
    negative = negative_probability(*sentiment, [PROMPT + completion for completion in completions])
    assert 0.15 <= negative.mean() <= 0.33
    assert len(set(completions)) >= 0.97 * len(completions)
    assert lengths.float().mean() >= 0.75 * NEW_TOKENS
    assert 0.1 <= (negative > 0.9).float().mean() <= 0.4


def test_the_build_runs_and_repeats_itself(tmp_path):
    first, samples = build(tmp_path / "first", seed=7, count=40, held_out=8)
    build(tmp_path / "second", seed=7, count=40, held_out=8)
    assert len(samples) == 2
    assert first["policy parameters"] > 1e6
    for file in (tmp_path / "first").glob("*/*"):
        twin = tmp_path / "second" / file.relative_to(tmp_path / "first")
        assert file.read_bytes() == twin.read_bytes(), file.name


@pytest.mark.proof
def test_a_size_makes_a_policy_of_that_size_with_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "REVIEWS", 40)
    monkeypatch.setattr(building, "HELD_OUT", 8)
    main(["--size", "tiny", "--out", str(tmp_path / "tiny")])
    main(["--out", str(tmp_path / "medium")])
    tiny, medium = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "policy") for name in ("tiny", "medium"))
    assert (tiny.config.n_embd, medium.config.n_embd) == (64, 224)
    assert tiny.num_parameters() < medium.num_parameters() / 4
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / name / "policy") for name in ("tiny", "medium")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert "--seed 0 --size tiny`" in (tmp_path / "tiny" / "policy" / "README.md").read_text()
    assert not (tmp_path / "tiny" / "sentiment").exists()  # all sizes share the built-in classifier


def test_another_size_never_takes_the_place_of_the_built_in_world(capsys):
    with pytest.raises(SystemExit):
        main(["--size", "tiny"])
    assert "--size tiny needs --out" in capsys.readouterr().err
