"""The planted-credit recipe: its rewards, the exact answer, and the share of a run's credit on the deciding word."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer

ROOT = Path(__file__).parents[1]
FILE = ROOT / "recipes" / "planted-credit" / "world.py"
SPEC = importlib.util.spec_from_file_location("planted_credit_world", FILE)
world = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(world)
RED, NOT, SKY = (world.IDS[word] for word in ("red", "not", "sky"))


@pytest.fixture
def lm():
    torch.manual_seed(3)
    shape = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": len(world.IDS)}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.6)).eval()


def after(lm, prompt, ids):
    """Probability of each word after a prompt and some words, from a pass over that text alone."""
    start = [world.IDS[word] for word in prompt.split()]
    return lm(input_ids=torch.tensor([[*start, *ids]])).logits[0, -1].double().softmax(-1)


def test_one_word_decides_each_reward():
    assert world.place([[SKY, SKY, RED, SKY], [RED, RED, SKY, RED]]) == [1.0, 0.0]
    assert world.kth(["word 2", "word 4"], [[SKY, RED, SKY, SKY], [RED, RED, RED, SKY]]) == [1.0, 0.0]
    assert world.falsify([[SKY, RED, SKY], [SKY, NOT, NOT]]) == [1.0, 0.0]
    assert world.deciding("place", "say", [SKY] * 8) == 2
    assert world.deciding("kth", "word 4", [SKY] * 8) == 3
    assert world.deciding("falsify", "say", [SKY, NOT, NOT]) == 1
    assert world.deciding("falsify", "say", [SKY, SKY, SKY]) is None


@pytest.mark.proof  # below: chances add up to the reward
@torch.no_grad()
def test_chances_are_sums_over_all_words_before_the_deciding_one(lm):
    start, one, two = world.chances(lm, "say", 2)
    assert [len(level.shape) for level in (start, one, two)] == [0, 1, 2]
    assert float(two[SKY, NOT]) == pytest.approx(float(after(lm, "say", [SKY, NOT])[RED]), rel=1e-5)
    words = range(len(world.IDS))
    by_hand = sum(float(after(lm, "say", [SKY])[w] * after(lm, "say", [SKY, w])[RED]) for w in words)
    assert float(one[SKY]) == pytest.approx(by_hand, rel=1e-5)
    first = after(lm, "say", [])
    by_hand = sum(
        float(first[v] * after(lm, "say", [v])[w] * after(lm, "say", [v, w])[RED])
        for v, w in itertools.product(words, words)
    )
    assert float(start) == pytest.approx(by_hand, rel=1e-5)


@torch.no_grad()
def test_true_advantages_add_up_to_the_reward_less_its_chance(lm):
    samples = [{"prompt": "word 3", "token_ids": [SKY, NOT, RED, SKY]}, {"prompt": "word 2", "token_ids": [SKY] * 4}]
    for sample, reward, at in zip(samples, (1.0, 0.0), (2, 1), strict=True):
        (advantages,) = world.true_advantages(lm, "kth", [sample])
        chances = world.chances(lm, sample["prompt"], at)
        assert len(advantages) == at + 1  # no word after the deciding one has any credit
        assert advantages[-1] == pytest.approx(reward - float(chances[at][tuple(sample["token_ids"][:at])]))
        assert sum(advantages) == pytest.approx(reward - float(chances[0]))


@torch.no_grad()
def test_a_first_not_takes_all_that_was_left_of_the_chance():
    lm = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=16, vocab_size=16))
    lm.transformer.wte.weight.zero_()  # each of 16 words has a chance of 1/16, whatever stands before
    samples = [{"prompt": "say", "token_ids": ids} for ids in ([SKY, NOT, NOT], [SKY, SKY, SKY])]
    value = [(15 / 16) ** (3 - t) for t in range(4)]
    false, true = world.true_advantages(lm, "falsify", samples)
    assert false == pytest.approx([value[1] - value[0], -value[1], 0.0])
    assert true == pytest.approx([value[t + 1] - value[t] for t in range(3)])


def test_shares_are_of_absolute_and_squared_advantages():
    samples = [
        {"prompt": "say", "token_ids": [SKY] * 4, "advantages": [0.0, 1.0, -3.0, 0.0]},
        {"prompt": "say", "token_ids": [SKY] * 4, "advantages": [2.0, 0.0, 1.0, 1.0]},
    ]
    assert world.share("place", samples, 1) == pytest.approx((3 + 1) / (4 + 4))
    assert world.share("place", samples, 2) == pytest.approx((9 + 1) / (10 + 6))


def test_the_shares_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "LENGTHS", (8,))
    world.build(tmp_path / "red", "red", world.OFTEN_RED)
    settings = {
        "model": {"name": str(tmp_path / "red"), "dtype": "float32"},
        "prompts.text": "say",
        "reward": [{"function": f"{FILE}:place"}],
        "rollout": {"batch_size": 8, "per_prompt": 8, "max_new_tokens": 5, "stop_at_eos": False},
        "advantage.estimator": "leave_one_out",
        "critic.kind": "none",
        "kl.coef": 0,
        "run": {"dir": str(tmp_path / "run"), "iterations": 1, "save_every": 1, "show_every": 0, "trackers": []},
    }
    PPOTrainer(args=PPOConfig.from_dict(settings)).train()
    shares = world.credit_shares(tmp_path / "run")
    assert shares["shown"] == pytest.approx(1 / 5)
    assert shares["shown_squared"] == pytest.approx(1 / 5)
    assert 0.5 < shares["true"] <= 1
