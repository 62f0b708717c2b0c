import json
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from demo.turns import FOLDER, WORLDS, build, play

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_folders_hold_ordinary_models_without_pickle_in_three_megabytes():
    files = [file for world in WORLDS for file in (FOLDER / world).iterdir()]
    assert {file.name for file in files} == FILES | {"chat_template.jinja"}
    assert {file.name for file in (FOLDER / "grid").iterdir()} == FILES
    assert sum(file.stat().st_size for file in files) <= 3e6


@pytest.mark.parametrize(("world", "end"), [("grid", "<|endoftext|>"), ("calculator", "<|im_end|>")])
def test_the_policies_load_like_any_other_model(world, end):
    model = AutoModelForCausalLM.from_pretrained(FOLDER / world)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / world)
    assert isinstance(model, GPT2LMHeadModel)
    assert tokenizer.eos_token == end
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.n_positions


@pytest.mark.proof
def test_the_committed_tokenizers_are_those_of_the_builder(tmp_path):
    for world, parts in WORLDS.items():
        parts.tokenizer(random.Random(0)).save_pretrained(tmp_path / world)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            built, committed = (json.loads((folder / world / name).read_text()) for folder in (tmp_path, FOLDER))
            assert built == committed


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.proof
def test_the_policies_solve_between_8_and_35_percent(world):
    solved, texts = play(world, FOLDER / world, seed=5, episodes=200)
    assert 0.08 <= solved <= 0.35
    assert len(set(texts)) > 190


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.proof  # test_build.py: so does the one of the reviews
def test_the_build_runs_and_repeats_itself(world, tmp_path):
    figures = build(world, tmp_path / "first", seed=7, episodes=40, held_out=4)
    build(world, tmp_path / "second", seed=7, episodes=40, held_out=4)
    assert 3e5 < figures["parameters"] < 7e5
    files = list((tmp_path / "first" / world).iterdir())
    assert {file.name for file in files} - {"chat_template.jinja"} == FILES
    for file in files:
        assert file.read_bytes() == (tmp_path / "second" / world / file.name).read_bytes(), file.name
    card = (tmp_path / "first" / world / "README.md").read_text()
    assert "`python -m demo.turns --seed 7` from 40 episodes" in card
    assert "| share of 4 episodes solved | " in card
