"""Value heads that follow the returns, by a scale or the support of a histogram, and keep what was learned."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tokencredit.core.losses import histogram_loss, histogram_values, value_loss
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience
from tokencredit.learn.state import load_trained_weights, trained_weights
from tokencredit.learn.value_heads import MARGIN, HistogramHead, ScaledHead, adapt_heads, adaptive_heads


def head_of(bins=51, width=4, mlp=False):
    torch.manual_seed(0)
    if mlp:
        return HistogramHead(nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, bins)))
    return HistogramHead(nn.Linear(width, bins))


def values(head, states):
    with torch.no_grad():
        return head(states).squeeze(-1)


def test_without_a_support_every_value_is_0():
    assert torch.equal(values(head_of(), torch.randn(3, 4)), torch.zeros(3))


def test_the_first_support_by_hand():
    """Returns from 0 to 2, a quarter of that in reserve on each side, and three bins more: 20 bins of 0.15."""
    head = head_of(bins=26)
    head.follow(0.0, 2.0)
    width = 3.0 / 20
    torch.testing.assert_close(head.support, torch.tensor([-0.5 - 3 * width, 2.5 + 3 * width]))
    torch.testing.assert_close(head.edges().diff(), torch.full((26,), width))
    nn.init.zeros_(head.last.weight)
    nn.init.zeros_(head.last.bias)
    torch.testing.assert_close(values(head, torch.randn(2, 4)), torch.ones(2))  # even bins: their middle


def test_returns_that_fit_change_nothing_and_others_widen_one_side():
    head = head_of(bins=26)
    head.follow(0.0, 2.0)
    before = {name: x.clone() for name, x in head.state_dict().items()}
    head.follow(-0.49, 2.49)
    head.follow(0.7, 0.7)
    assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())
    head.follow(0.0, 4.0)
    # From −0.5 to 4 and a quarter of 4.5 above: 5.625 in 20 bins.
    width = 5.625 / 20
    torch.testing.assert_close(head.support, torch.tensor([-0.5 - 3 * width, 5.125 + 3 * width]))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5e4])
def test_equal_returns_get_a_support_around_them(value):
    head = head_of()
    head.follow(value, value)
    low, high = head.support.tolist()
    assert low < value < high
    assert high - low < 4e-3 * max(1, abs(value))
    loss = histogram_loss(torch.zeros(1, 51), torch.tensor([value]), head.edges())
    assert loss.item() == pytest.approx(math.log(51), rel=1e-4)
    nn.init.zeros_(head.last.weight)
    nn.init.zeros_(head.last.bias)
    torch.testing.assert_close(values(head, torch.randn(1, 4)), torch.tensor([value]), atol=1e-5, rtol=1e-5)


@given(
    targets=st.lists(st.floats(-1, 1), min_size=4, max_size=4),
    spread=st.floats(0.02, 0.3),
    low=st.floats(-20, 1),
    high=st.floats(1, 20),
    mlp=st.booleans(),
)
@example(targets=[0.0, 0.0, 0.0, -0.78125], spread=0.0234375, low=-17.8125, high=3.921875, mlp=False)
def test_a_wider_support_keeps_the_values(targets, spread, low, high, mlp):
    """Of states whose returns are spread by a normal distribution, to half of a new bin's width and an old one's.

    An old bin's, since the old logits are read in straight lines between its centre and the next.
    """
    head = head_of(mlp=mlp)
    head.follow(-1.0, 1.0)
    old = float(head.edges()[1] - head.edges()[0])
    states = torch.eye(4)
    centres = (head.edges()[1:] + head.edges()[:-1]) / 2
    logits = -0.5 * ((centres - torch.tensor(targets).unsqueeze(1)) / spread).square()
    with torch.no_grad():
        hidden = states if not mlp else head.layers[:2](states)
        head.last.bias.zero_()
        head.last.weight.copy_((torch.linalg.pinv(hidden) @ logits).T)
        before = values(head, states)
    torch.testing.assert_close(before, histogram_values(logits, head.edges()), atol=1e-3, rtol=0)
    head.follow(low, high)
    width = float(head.edges()[1] - head.edges()[0])
    assert head.support[0] <= low - MARGIN * width * 0.999
    assert head.support[1] >= high + MARGIN * width * 0.999
    torch.testing.assert_close(values(head, states), before, atol=0.5 * width + old, rtol=0)


def test_a_support_far_wider_than_the_first_stays_finite_and_can_be_learned():
    head = head_of()
    head.follow(0.0, 0.0)
    head.follow(-100.0, 50.0)
    states = torch.ones(1, 4)
    width = float(head.edges()[1] - head.edges()[0])
    assert abs(values(head, states).item()) < 0.1 * 150
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        histogram_loss(head.layers(states), torch.tensor([20.0]), head.edges()).sum().backward()
        optimizer.step()
    assert values(head, states).item() == pytest.approx(20.0, abs=0.1 * width)


def test_one_large_return_moves_no_learned_value_by_a_bin():
    """All bins beyond the old support together weigh little, not each alone: at e⁻⁵ each, values moved by 4 bins."""
    head, states, targets = head_of(), torch.eye(4), torch.tensor([0.0, 0.3, 0.6, 1.0])
    head.follow(0.0, 1.0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        histogram_loss(head.layers(states), targets, head.edges()).sum().backward()
        optimizer.step()
    before = values(head, states)
    head.follow(0.0, 1000.0)
    width = float(head.edges()[1] - head.edges()[0])
    torch.testing.assert_close(values(head, states), before, atol=width, rtol=0)


def experience(returns, mask):
    returns = torch.tensor(returns)
    return Experience({}, torch.tensor(mask), torch.ones(len(mask)), returns, returns, returns, returns)


def test_only_finite_returns_of_acted_tokens_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), head_of())
    (head,) = adaptive_heads(model)
    nothing = experience([[math.nan, 7.0]], [[True, False]])
    adapt_heads([head], nothing, Processes())
    assert head.support.tolist() == [0, 0]
    some = experience([[math.nan, 7.0], [0.0, math.inf], [2.0, 1.0]], [[True, False], [True, True], [True, True]])
    adapt_heads([head], some, Processes())
    expected = head_of()
    expected.follow(0.0, 2.0)
    assert torch.equal(head.support, expected.support)


def test_a_support_is_a_part_of_what_was_trained():
    model, other = nn.Sequential(head_of()), nn.Sequential(head_of())
    model[0].follow(0.0, 2.0)
    weights = trained_weights(model)
    assert set(weights) == {"0.layers.weight", "0.layers.bias", "0.support"}
    load_trained_weights(other, weights)
    states = torch.randn(5, 4)
    assert torch.equal(values(other[0], states), values(model[0], states))


# --- scaled heads ---------------------------------------------------------------------------------------------------


def scaled_head(*batches):
    """A head that has seen these returns, in this order, with other weights after each."""
    torch.manual_seed(0)
    head = ScaledHead(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    for returns in batches:
        follow(head, returns)
    return head


def follow(head, returns, processes=None):
    returns = torch.tensor([returns])
    head.adapt(returns, torch.ones_like(returns, dtype=torch.bool), processes or Processes())


def test_scale_and_centre_by_hand():
    """Mean 12 and deviation 2: scaled by 2 around 11. Then two returns of 16 beside two that weigh 0.9."""
    head = scaled_head([10.0, 14.0])
    assert (head.scale().item(), head.center().item()) == (2.0, 11.0)
    follow(head, [16.0, 16.0])
    mean = (1.8 * 12 + 2 * 16) / 3.8
    variance = (1.8 * (4 + (12 - mean) ** 2) + 2 * (16 - mean) ** 2) / 3.8
    assert (head.scale().item(), head.center().item()) == pytest.approx((variance**0.5, mean - 1))


def test_returns_around_1_and_smaller_change_no_weight_and_no_value():
    head, plain = scaled_head([-1.0, 1.0], [0.3, 0.9], [0.0, 0.01]), scaled_head()
    states = torch.randn(5, 4)
    assert torch.equal(values(head, states), values(plain, states))
    assert torch.equal(values(plain, states), plain[2](plain[1](plain[0](states))).squeeze(-1))
    assert all(torch.equal(x, y) for x, y in zip(head.parameters(), plain.parameters(), strict=True))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(1e-3, 1e4))
def test_values_stay_where_they_are_when_the_scale_moves(returns, spread):
    head, states = scaled_head([60.0, 70.0]), torch.randn(5, 4)
    before = values(head, states)
    follow(head, [x * spread / 1e4 for x in returns])
    size = float(head.scale() + head.center().abs()) + 100
    torch.testing.assert_close(values(head, states), before, rtol=1e-4, atol=1e-5 * size)


def test_an_untrained_critic_begins_at_the_centre_of_the_first_returns():
    head = ScaledHead(nn.Linear(4, 1))
    nn.init.zeros_(head[-1].weight)
    nn.init.zeros_(head[-1].bias)
    follow(head, [60.0, 70.0])
    assert values(head, torch.randn(2, 4)).tolist() == [64.0, 64.0]


def test_the_outputs_of_a_rollout_move_with_those_of_an_untrained_critic():
    """Else the value clip holds the critic at values of before, far from all returns, and it learns nothing."""
    head, states = scaled_head(), torch.randn(2, 2, 4)
    rollout = replace(experience([[60.0, 70.0], [64.0, 90.0]], [[True, True]] * 2), values=values(head, states))
    moved = adapt_heads([head], rollout, Processes())
    torch.testing.assert_close(moved.critic_outputs, values(head, states))
    again = adapt_heads([head], replace(moved, critic_targets=moved.returns + 30), Processes())
    assert head.support[1] > 80
    assert torch.equal(again.critic_outputs, moved.critic_outputs)
    torch.testing.assert_close(again.critic_outputs, values(head, states))
    assert torch.equal(again.values, rollout.values), "what the advantages were computed with"


@pytest.mark.parametrize(("factor", "offset"), [(10.0, 0.0), (1.0, 1000.0), (1e4, -1e6)])
def test_the_gradient_of_the_value_loss_does_not_depend_on_the_unit_of_large_returns(factor, offset):
    def gradient(returns):
        head, states = scaled_head(), torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        follow(head, returns)
        now = head(states).squeeze(-1)
        scaled = (now / head.scale(), now.detach() / head.scale(), torch.tensor(returns) / head.scale())
        return torch.autograd.grad(value_loss(*scaled).sum(), states)[0]

    returns = [60.0, 70.0, 64.0, 80.0]
    # The centre is 1 below the mean, or above it: the same distance in units of the deviation where factor is 1.
    other = gradient([factor * x + offset for x in returns])
    assert torch.nn.functional.cosine_similarity(other.flatten(), gradient(returns).flatten(), 0) > 0.9
    assert 0.5 < float(other.norm() / gradient(returns).norm()) < 2


class TwoProcesses(Processes):
    """Two processes with the same rows."""

    def sum(self, tensor):
        return 2 * tensor


def test_the_scale_is_that_of_the_returns_of_all_processes():
    one, two = ScaledHead(nn.Linear(4, 1)), ScaledHead(nn.Linear(4, 1))
    for returns in ([60.0, 70.0], [80.0, 90.0]):
        follow(one, returns * 2)
        follow(two, returns, TwoProcesses())
    torch.testing.assert_close(one.support, two.support)


def test_returns_that_are_not_finite_move_no_scale():
    head = scaled_head([60.0, 70.0])
    before = {name: x.clone() for name, x in head.state_dict().items()}
    adapt_heads([head], experience([[math.nan, 7.0]], [[True, False]]), Processes())
    for name, x in head.state_dict().items():
        if name != "support":  # the number of returns decays
            torch.testing.assert_close(x, before[name])
    fresh = scaled_head()
    adapt_heads([fresh], experience([[math.nan, 7.0]], [[True, False]]), Processes())
    assert (fresh.scale().item(), fresh.center().item()) == (1.0, 0.0)


def test_a_scale_is_a_part_of_what_was_trained():
    model, other = nn.Sequential(scaled_head([60.0, 70.0])), nn.Sequential(scaled_head())
    load_trained_weights(other, trained_weights(model))
    assert torch.equal(other[0].support, model[0].support)
    assert torch.equal(values(other[0], torch.ones(1, 4)), values(model[0], torch.ones(1, 4)))
