"""benchmarks/beside_trl.py trains with TRL, and measures all methods by one function."""

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("trl")
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


def test_the_reward_of_an_example_is_its_function(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    world = World("few-words=examples/few-words/run.yaml")
    completions = [" good.", " good", " one two three four five six seven eight nine ten."]
    texts = world.padded(["The story was"] * 3, [world.tokenizer(text)["input_ids"] for text in completions])
    assert world.scores(*texts).tolist() == pytest.approx([1, 0, 0.8])
    assert texts[0].shape[1] == world.width + 32


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
    assert figures["kl"][1] > 0
    assert 0 < figures["clock"][0] <= figures["clock"][1]
    assert 0 < figures["final"]["reward"] < 1
