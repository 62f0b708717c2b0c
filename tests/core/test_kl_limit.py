"""The best that any policy can reach at a KL price."""

import math
from itertools import product

import pytest
import torch

from helpers.proofs import proofs
from tokencredit.core.rewards import FEW, GROUP, attainable


def test_a_worked_optimum():
    # β = 1 and rewards 0 and ln 3, equally likely: exp(R) is 1 and 3, so J* = ln 2, π* has them at 1/4 and 3/4, with a
    # reward of 3/4 ln 3 and a KL of 3/4 ln 3 − ln 2; of 20 samples 1 / (10 (1/40)² + 10 (3/40)²) = 16 are effective.
    best = attainable(torch.tensor([0.0, math.log(3)] * 10), 1.0)
    assert best.objective == pytest.approx(math.log(2))
    assert best.reward == pytest.approx(0.75 * math.log(3))
    assert best.kl == pytest.approx(0.75 * math.log(3) - math.log(2))
    assert best.start == pytest.approx(math.log(3) / 2)
    assert best.effective == pytest.approx(16)
    assert (best.samples, best.prompts, best.pooled, best.few) == (20, 1, False, False)
    assert best.share(best.start) == 0
    assert best.share(best.objective) == 1


def texts():
    """Log-probs of all texts of four tokens under a reference whose tokens depend on the one before, and rewards."""
    table = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double).log_softmax(-1)
    found = [
        (sum(table[place, before, token] for place, (before, token) in enumerate(zip((0, *text), text, strict=False))),
         float(text.count(2)) - 0.5 * text.count(1))
        for text in product(range(3), repeat=4)
    ]  # fmt: skip
    return torch.stack([logprob for logprob, _ in found]), torch.tensor([r for _, r in found], dtype=torch.double)


@pytest.mark.slow
@pytest.mark.parametrize("coef", [1.0, *proofs(0.3)])
def test_samples_estimate_the_optimum_that_enumeration_gives(coef):
    logprobs, rewards = texts()
    exact = coef * torch.logsumexp(logprobs + rewards / coef, 0)
    optimum = (logprobs + (rewards - exact) / coef).exp()
    kl = (optimum * (optimum.log() - logprobs)).sum()
    assert float((optimum * rewards).sum() - coef * kl) == pytest.approx(float(exact))  # it reaches J*
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(logprobs.exp(), 40_000, replacement=True, generator=generator)
    best = attainable(rewards[drawn], coef, generator=generator)
    assert best.low < float(exact) < best.high
    assert best.objective == pytest.approx(float(exact), abs=0.05)
    assert best.reward == pytest.approx(float((optimum * rewards).sum()), abs=0.1)
    assert best.kl == pytest.approx(float(kl), abs=0.1)


def test_a_policy_cannot_choose_its_prompt():
    prompts = torch.tensor([5, 9]).repeat_interleave(GROUP)
    rewards = 10.0 * (prompts == 9)
    assert attainable(rewards, 0.5, prompts).objective == pytest.approx(5)
    assert attainable(rewards, 0.5).objective == pytest.approx(10 - 0.5 * math.log(2))


def test_prompts_with_few_samples_count_as_one_and_give_an_upper_bound():
    rewards = torch.rand(4 * GROUP, generator=torch.Generator().manual_seed(0))
    common, rare = torch.zeros(2 * GROUP, dtype=torch.long), torch.arange(1, 2 * GROUP + 1)
    best = attainable(rewards, 0.1, torch.cat([common, rare]))
    halves = [attainable(half, 0.1).objective for half in rewards.chunk(2)]
    assert best.objective == pytest.approx(sum(halves) / 2)
    assert (best.prompts, best.pooled) == (2 * GROUP + 1, True)


def test_the_interval_is_that_of_the_delta_method():
    rewards = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    best = attainable(rewards, 1.0, generator=torch.Generator().manual_seed(0))
    error = float(rewards.exp().std() / rewards.exp().mean()) / math.sqrt(len(rewards))
    assert best.high - best.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert best.low < best.objective < best.high


def test_a_single_best_sample_is_no_more_than_a_lower_bound():
    best = attainable(torch.tensor([1000.0] + [0.0] * 99), 0.01)
    assert best.objective == pytest.approx(1000 - 0.01 * math.log(100))
    assert best.effective == pytest.approx(1)
    assert best.effective < FEW
    assert best.few


def test_equal_rewards_leave_no_room():
    best = attainable(torch.full((7,), 0.1), 0.05)
    assert best.kl == pytest.approx(0, abs=1e-9)
    assert math.isnan(best.share(0.1))


@pytest.mark.parametrize(
    ("rewards", "coef", "prompts", "message"),
    [
        (torch.ones(2, 2), 1.0, None, r"rewards has shape \(2, 2\)"),
        (torch.ones(0), 1.0, None, "at least one"),
        (torch.tensor([1.0, math.nan]), 1.0, None, "finite"),
        (torch.ones(2), 0.0, None, "coef is 0"),
        (torch.ones(2), 1.0, torch.ones(3), "prompts has shape"),
    ],
)
def test_wrong_arguments_are_named(rewards, coef, prompts, message):
    with pytest.raises(ValueError, match=message):
        attainable(rewards, coef, prompts)
