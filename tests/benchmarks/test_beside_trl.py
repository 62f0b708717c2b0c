"""benchmarks/beside_trl.py trains with TRL, and measures all methods by one function."""

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("trl")
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import beside_trl  # noqa: E402
from beside_trl import PADDING, World  # noqa: E402


@pytest.fixture(scope="module")
def world():
    return World("builtin")


def test_texts_are_padded_at_both_ends(world):
    end = world.tokenizer.eos_token_id
    ids, mask = world.padded(["This movie was really", "This"], [[5, 6, end], list(range(1, 25))])
    long, short = (len(world.tokenizer(text)["input_ids"]) for text in ("This movie was really", "This"))
    assert ids.shape == mask.shape == (2, long + 24)
    assert mask.sum(1).tolist() == [long + 3, short + 24]
    assert ids[0, long : long + 3].tolist() == [5, 6, end]
    assert (ids[~mask] == PADDING).all()


@torch.no_grad()
def test_the_reward_of_the_built_in_world_is_the_classifiers_probability_in_float32(world):
    prompt, completion = world.prompts[0], " terrible and boring."
    found = world.scores(*world.padded([prompt], [world.tokenizer(completion)["input_ids"]]))
    folder = beside_trl.BUILTIN["reward"][0]["classifier"]
    judge = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    read = AutoTokenizer.from_pretrained(folder)(prompt + completion, return_tensors="pt")
    assert found.tolist() == pytest.approx(
        [float(judge(**read).logits.softmax(-1)[0, judge.config.label2id["NEGATIVE"]])]
    )


def test_the_reward_of_an_example_is_its_weighted_terms_with_the_columns_of_each_prompt(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    few = World("few-words=examples/few-words/run.yaml")
    completions = [" good.", " good", " one two three four five six seven eight nine ten."]
    texts = few.padded(["The story was"] * 3, [few.tokenizer(text)["input_ids"] for text in completions])
    assert few.scores(*texts).tolist() == pytest.approx([1, 0, 0.8])
    assert texts[0].shape[1] == few.width + 32

    verdicts = World("no-repetition=examples/no-repetition/run.yaml")
    prompts = ["Thumbs up. The film was", "Thumbs down. The film was"]
    completions = [" good.", " good.", " good good good good."]
    ids = [verdicts.tokenizer(text)["input_ids"] for text in completions]
    up, down, repeated = verdicts.scores(*verdicts.padded([*prompts, prompts[0]], ids)).tolist()
    assert up > 0.5 > down
    assert up + down == pytest.approx(1)
    assert repeated < up - 1  # the penalty has a weight of -2


@torch.no_grad()
def test_the_kl_is_of_the_distributions_at_a_completions_tokens(world):
    policy, reference = world.model(), world.model()
    policy.transformer.ln_f.weight.mul_(1.5)  # a sharper policy
    ids, mask = world.padded(["This movie was really", "This"], [[300, 301], [302]])
    total = 0.0
    for row in range(2):
        own = ids[row][mask[row]][None]
        p, q = (model(own).logits[0].log_softmax(-1) for model in (policy, reference))
        at = slice(-3, -1) if row == 0 else slice(-2, -1)  # the places before the completion's tokens
        total += float((p.exp() * (p - q)).sum(-1)[at].sum())
    assert world.divergence(policy, reference, ids, mask) == pytest.approx(total / 2, rel=1e-4)
    assert world.divergence(reference, reference, ids, mask) == 0
    shorter = world.divergence(policy, reference, ids[:, :-5], mask[:, :-5])  # TRL cuts where all texts have ended
    assert shorter == pytest.approx(total / 2, rel=1e-4)


@pytest.mark.filterwarnings("default")  # TRL's
@pytest.mark.parametrize("method", ["ours", "grpo", "rloo"])
def test_a_run_keeps_the_metrics_of_its_iterations(method, monkeypatch):
    for name, value in {"ITERATIONS": 2, "EPOCHS": 1, "MINIBATCHES": 1, "FRESH": 8}.items():
        monkeypatch.setattr(beside_trl, name, value)
    figures = beside_trl.run("builtin", method, 1)
    assert {name: len(values) for name, values in figures.items()} == {
        "reward": 2,
        "kl": 2,
        "clock": 2,
        "cpu": 2,
        "final": 2,
    }
    assert figures["kl"][0] == pytest.approx(0, abs=1e-6)
    assert abs(figures["kl"][1]) > 1e-5, "an estimate by samples, which may be below 0"
    assert 0 < figures["clock"][0] <= figures["clock"][1]
    assert 0 < figures["final"]["reward"] < 1
