"""The running fit of the prefix baseline."""

import json

import pytest
import torch

from helpers.in_step import in_two
from tokencredit.core.masked import explained_variance
from tokencredit.text.data.prefixes import FOLDS, Ended, PrefixFit


def alone(x):
    return x


def batch(rows=32, time=6, seed=0, noise=0.1, slope=2.0):
    """Scores, and returns that are affine in them, with noise."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, time, generator=generator)
    offsets = torch.linspace(-1, 1, time)
    return scores, slope * scores + offsets + noise * torch.randn(rows, time, generator=generator)


def values_of(fit, scores, *batch):
    """Values of a batch without a critic."""
    fitted, values = fit.values(scores, None, *batch)
    assert torch.equal(fitted, values)
    return values


def test_the_first_batch_is_explained_by_its_other_completions():
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    values = values_of(PrefixFit(9), scores, returns, mask, 0, alone)
    assert float(explained_variance(values, returns, mask)) > 0.95


def test_a_completions_values_do_not_depend_on_its_own_returns():
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    changed = returns.clone()
    changed[3] += 100
    before, after = (values_of(PrefixFit(9), scores, x, mask, 0, alone) for x in (returns, changed))
    assert torch.equal(before[3], after[3])
    assert not torch.equal(before[4], after[4])


def test_two_processes_fit_as_one():
    scores, returns = batch(rows=FOLDS * 2)
    mask = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[FOLDS:, 4:] = False  # the second process's completions are shorter, and so are its tensors
    whole = PrefixFit(9)
    expected = [values_of(whole, scores, returns, mask, 0, alone) for _ in range(2)][1]
    # The sums of two processes with half of the rows each, by running them in step.
    results = [None, None]

    def process(rank, reduce):
        rows = (slice(rank * FOLDS, (rank + 1) * FOLDS), slice(None, 4 if rank else None))
        fit = PrefixFit(9)
        for _ in range(2):
            results[rank] = values_of(fit, scores[rows], returns[rows], mask[rows], rank * FOLDS, reduce)

    in_two(process)
    torch.testing.assert_close(results[0], expected[:FOLDS], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[1], expected[FOLDS:, :4], rtol=1e-6, atol=1e-6)


def test_scores_that_say_nothing_are_left_out():
    scores, _ = batch(rows=64, seed=1)
    _, returns = batch(rows=64, seed=2, slope=0.0, noise=1.0)
    mask = torch.ones_like(scores, dtype=torch.bool)
    fit = PrefixFit(9)
    for _ in range(4):
        values = values_of(fit, scores, returns, mask, 0, alone)
    # Of returns with variance 1 about means from −1 to 1, the means are left to explain: 0.32.
    assert float(explained_variance(values, returns, mask)) > 0.25


def test_the_state_goes_through_json_and_longer_batches_follow():
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    fit, copy = PrefixFit(9), PrefixFit(9)
    values_of(fit, scores, returns, mask, 0, alone)
    copy.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    scores, returns = batch(time=9, seed=3)
    mask = torch.ones_like(scores, dtype=torch.bool)
    assert torch.equal(
        values_of(fit, scores, returns, mask, 0, alone), values_of(copy, scores, returns, mask, 0, alone)
    )


def test_completions_beyond_the_fit_have_its_last_coefficients():
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    short, whole = PrefixFit(4), PrefixFit(9)
    scores[:, 4:] = scores[:, 3:4]
    values = values_of(short, scores, returns, mask, 0, alone)
    assert torch.equal(values[:, 4:], values[:, 3:4].expand(-1, 2))
    values_of(whole, scores, returns, mask, 0, alone)
    torch.testing.assert_close(short.moments, whole.moments[:, :4])


@pytest.mark.parametrize(("noise", "kept"), [(0.5, [7]), (0.005, [])])
def test_an_end_is_kept_if_scores_with_it_tell_the_returns_clearly_better(noise, kept):
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    late = scores + noise * torch.randn(scores.shape, generator=torch.Generator().manual_seed(4))
    outputs = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5))  # of a saved critic
    given, fit, ended = (outputs, returns + 0.1 * outputs, mask, 0, alone), PrefixFit(9), PrefixFit(9)
    fit.values(late, *given)
    fit.try_end(Ended([7], scores), late, *given)
    assert fit.end == kept
    ended.values(scores if kept else late, *given)
    assert fit.share == ended.share > 0.05
    copy = PrefixFit(9)
    copy.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert copy.end == kept
    assert torch.equal(copy.values(scores, *given)[1], ended.values(scores, *given)[1])


def test_the_critic_adds_its_share_where_it_tells_what_is_left():
    scores, returns = batch(rows=64, noise=0.0)
    outputs = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5))
    mask, fit = torch.ones_like(scores, dtype=torch.bool), PrefixFit(9)
    assert fit.share == 0
    for _ in range(3):
        fitted, values = fit.values(scores, outputs, returns + 0.5 * outputs, mask, 0, alone)
    assert fit.share == pytest.approx(0.5, abs=0.05)
    share = fit.coefficients()[2][:6]
    torch.testing.assert_close(values, fitted + (share * outputs).float(), rtol=0.0, atol=0.1)
    assert float(explained_variance(values, returns + 0.5 * outputs, mask)) > 0.98
    copy = PrefixFit(9)
    copy.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert copy.share == fit.share


def test_a_fit_of_nothing_is_0_and_does_no_harm_later():
    scores, returns = batch()
    mask = torch.ones_like(scores, dtype=torch.bool)
    fit = PrefixFit(9)
    assert values_of(fit, scores, returns, ~mask, 0, alone).abs().max() == 0
    assert values_of(fit, scores[:1], returns[:1], mask[:1], 0, alone).abs().max() == 0
    assert float(explained_variance(values_of(fit, scores, returns, mask, 0, alone), returns, mask)) > 0.9


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e6])
def test_a_score_of_the_position_alone_has_no_slope(scale):
    """The variance of such scores within a position is rounding, once batches are weighted."""
    scores = scale * torch.arange(24.0).expand(32, -1)
    fit = PrefixFit(24)
    for seed in range(5):
        _, returns = batch(time=24, seed=seed, slope=0.0, noise=1.0)
        values = values_of(fit, scores, returns, torch.ones_like(returns, dtype=torch.bool), 0, alone)
        assert float((values.mean(0) - torch.linspace(-1, 1, 24)).abs().max()) < 1.0
