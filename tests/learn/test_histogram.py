"""A value head with a histogram of returns: its support follows the returns, and keeps what was learned."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tokencredit.core.losses import histogram_loss, histogram_values
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience
from tokencredit.learn.histogram import MARGIN, HistogramHead, follow_returns, histogram_heads
from tokencredit.learn.state import load_trained_weights, trained_weights


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


def experience(returns, mask):
    returns = torch.tensor(returns)
    return Experience({}, torch.tensor(mask), torch.ones(len(mask)), returns, returns, returns, returns)


def test_only_finite_returns_of_acted_tokens_are_followed():
    model = nn.Sequential(nn.Linear(4, 4), head_of())
    (head,) = histogram_heads(model)
    nothing = experience([[math.nan, 7.0]], [[True, False]])
    follow_returns([head], nothing, Processes())
    assert head.support.tolist() == [0, 0]
    some = experience([[math.nan, 7.0], [0.0, math.inf], [2.0, 1.0]], [[True, False], [True, True], [True, True]])
    follow_returns([head], some, Processes())
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
