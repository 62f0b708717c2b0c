"""Each example runs through the real command, for a small iteration."""

import contextlib
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from helpers import warm
from helpers.configs import as_flags
from helpers.files import read_jsonl, read_metrics
from tokencredit.cli import main
from tokencredit.text.models.model_loading import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = {
    "run.iterations": 1,
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 8,
    "ppo.epochs": 1,
    "run.show_every": 0,
}


def python(*arguments):
    """Run Python from the repository's root, as the examples are run."""
    done = warm.python(*arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(name, tmp_path, config=None, **more):
    """Run an example, small; returns its metrics."""
    settings = {**SMALL, "run.dir": tmp_path / "run", **more}
    with contextlib.chdir(ROOT):
        assert main(["train", "--config", str(config or f"examples/{name}/run.yaml"), *as_flags(settings)]) == 0
    (metrics,) = read_metrics(tmp_path / "run")
    return metrics


def load(name):
    """The names in an example's reward file."""
    return runpy.run_path(str(ROOT / "examples" / name / "reward.py"))


def test_few_words(tmp_path):
    metrics = train("few-words", tmp_path)
    assert metrics["reward"] == pytest.approx(metrics["reward/few_words"]), "length is watched, not paid"


def test_few_words_pays_for_an_end_within_the_limit():
    few_words = load("few-words")["few_words"]
    texts = [" good.", " a b c d.", " a b c d e f.", " good and"]
    assert few_words(["It was"] * 4, texts, limit=4) == pytest.approx([1.0, 1.0, 0.8, 0.0])
    assert few_words(["It was"], [" a" * 100 + "."], limit=4) == [0.0]


def test_json(tmp_path):
    python("examples/json/make_model.py", "--steps", 2, "--out", tmp_path / "model")
    metrics = train("json", tmp_path, **{"model.name": tmp_path / "model"})
    assert metrics["reward"] == pytest.approx(metrics["reward/graded"])


def test_json_pays_by_how_far_the_parser_came():
    names, prompt = load("json"), '{"film":'
    good = ' "drama", "verdict": "decent", "stars": 3}'
    texts = [good, good[:-1], good.replace("film", ""), ' "drama"}', " drama", good.replace(",", "", 1)]
    graded = names["graded"]([prompt] * len(texts), texts)
    assert names["parses"]([prompt] * len(texts), texts) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert graded[0] == 1.0
    assert graded[3] == 0.5, "it parses, with other keys"
    assert graded[1] == 0.5, "all of it was read before the end was missed"
    assert 0 < graded[5] < graded[4] < 0.5, "a missing comma early on, no quote at the end"


def test_no_repetition(tmp_path):
    metrics = train("no-repetition", tmp_path)
    paid = metrics["reward/wanted_verdict"] - 2 * metrics["reward/repetition"]
    assert metrics["reward"] == pytest.approx(paid, abs=1e-5)


def test_no_repetition_reads_the_wanted_column():
    wanted = load("no-repetition")["wanted_verdict"]
    text = " wonderful. I loved every minute of it."
    good, bad = wanted(["The film was"] * 2, [text] * 2, ["POSITIVE", "NEGATIVE"])
    assert good > 0.5 > bad
    assert good + bad == pytest.approx(1, abs=1e-5)


@pytest.fixture
def reward_model(tmp_path):
    """A folder as TRL's RewardTrainer leaves it, with a head that has learnt nothing."""
    folder = resolve("builtin:reviews", "policy")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path / "reward-model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "reward-model")
    return tmp_path / "reward-model"


def test_preference(tmp_path, reward_model):
    config = (ROOT / "examples" / "preference" / "run.yaml").read_text(encoding="utf-8")
    assert "./examples/preference/reward-model" in config
    (tmp_path / "run.yaml").write_text(
        config.replace("./examples/preference/reward-model", str(reward_model)), encoding="utf-8"
    )
    metrics = train("preference", tmp_path, config=tmp_path / "run.yaml")
    assert metrics["reward"] == pytest.approx(metrics["reward/reward-model"], abs=1e-5)


def test_preference_pairs_differ_in_what_is_preferred(tmp_path):
    python("examples/preference/make_pairs.py", "--count", 20, "--out", tmp_path / "pairs.jsonl")
    pairs = read_jsonl(tmp_path / "pairs.jsonl")
    assert len(pairs) == 20
    assert all(pair.keys() == {"chosen", "rejected"} for pair in pairs)
    assert not any(" cast " in pair["rejected"] or " acting " in pair["rejected"] for pair in pairs)
