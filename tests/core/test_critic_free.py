import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.advantages import group_relative, leave_one_out, reward_to_go, total_return, uniform

T, F = True, False
# Scores 1, 3, 2 and 6: the rewards of each row added up, wherever they stand.
REWARDS = torch.tensor([[0.0, 1.0, math.nan], [1.0, 1.0, 1.0], [2.0, math.nan, math.nan], [-1.0, 7.0, math.inf]])
MASK = torch.tensor([[T, T, F], [T, T, T], [T, F, F], [T, T, F]])
SCORES = torch.tensor([[1.0, 1.0, 0.0], [3.0, 3.0, 3.0], [2.0, 0.0, 0.0], [6.0, 6.0, 0.0]])


def spread(credit):
    return torch.tensor(credit)[:, None] * MASK


def test_sums_of_rewards_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    # γ = 0.5: 1 + 0.5·2 + 0.25·4 = 3;  2 + 0.5·4 = 4;  4
    assert reward_to_go(rewards, gamma=0.5)[0].tolist() == [[3.0, 4.0, 4.0]]
    assert total_return(rewards, gamma=0.5)[0].tolist() == [[3.0, 3.0, 3.0]]
    values = torch.tensor([[1.0, 1.0, 2.0]])
    assert reward_to_go(rewards, values, gamma=0.5)[0].tolist() == [[2.0, 3.0, 2.0]]
    assert total_return(rewards, values, gamma=0.5)[0].tolist() == [[2.0, 2.0, 1.0]]


def test_total_return_is_that_of_the_step_s_own_episode():
    ends = torch.tensor([[F, T, F, F]])
    advantages, returns = total_return(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), gamma=1.0, terminated=ends)
    assert advantages.tolist() == returns.tolist() == [[3.0, 3.0, 12.0, 12.0]]


def test_what_was_cut_off_needs_no_bootstrap_without_a_critic():
    cut = torch.tensor([[F, T]])
    assert reward_to_go(torch.ones(1, 2), gamma=1.0, truncated=cut)[0].tolist() == [[2.0, 1.0]]
    worth = torch.tensor([[0.0, 10.0]])
    assert reward_to_go(torch.ones(1, 2), gamma=1.0, truncated=cut, bootstrap=worth)[0].tolist() == [[12.0, 11.0]]
    with pytest.raises(ValueError, match="bootstrap is None"):
        reward_to_go(torch.ones(1, 2), torch.ones(1, 2), gamma=1.0, truncated=cut)


def test_uniform_by_hand():
    advantages, returns = uniform(REWARDS, baseline=2.5, mask=MASK)
    assert torch.equal(advantages, spread([-1.5, 0.5, -0.5, 3.5]))
    assert torch.equal(returns, SCORES)


def test_group_relative_by_hand():
    # Groups (1, 3) and (2, 6): means 2 and 4; sample deviations √2 and √8
    advantages, returns = group_relative(REWARDS, group_size=2, mask=MASK)
    one, other = 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)
    torch.testing.assert_close(advantages, spread([-one, one, -other, other]))
    assert one == pytest.approx(0.5**0.5, rel=1e-4)
    assert torch.equal(returns, SCORES)
    advantages, _ = group_relative(REWARDS, group_size=2, scale=False, mask=MASK)
    assert torch.equal(advantages, spread([-1.0, 1.0, -2.0, 2.0]))


def test_leave_one_out_by_hand():
    # One group (1, 3, 2, 6): the others' means are 11/3, 3, 10/3 and 2
    advantages, returns = leave_one_out(REWARDS, group_size=4, mask=MASK)
    torch.testing.assert_close(advantages, spread([1 - 11 / 3, 0.0, 2 - 10 / 3, 4.0]))
    assert torch.equal(returns, SCORES)


def test_a_group_that_agrees_gets_no_credit():
    # 0.1 is not a float32: the mean of three of them is off by a rounding, and that must not be blown up.
    advantages, _ = group_relative(torch.full((3, 1), 0.1), group_size=3)
    assert advantages.abs().max() == 0


def test_a_group_that_differs_by_noise_gets_hardly_any_credit():
    def credit(distance):
        return group_relative(torch.tensor([[0.0], [distance]]), group_size=2)[0][1].item()

    # half the distance, over a sample deviation of distance / √2 and the guard
    assert credit(1e-7) == pytest.approx(5e-4, rel=1e-3)
    assert credit(1e-4) == pytest.approx(0.5 / (0.5**0.5 + 1), rel=1e-3)
    assert credit(1.0) == pytest.approx(0.5**0.5, rel=1e-3)


@given(st.integers(1, 4), st.integers(2, 8), st.integers(0, 2**32))
def test_groups_by_definition(groups, size, seed):
    scores = torch.randn(groups, size, generator=torch.Generator().manual_seed(seed))
    rewards = scores.view(-1, 1)
    relative = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)  # TRL's GRPOTrainer
    torch.testing.assert_close(group_relative(rewards, group_size=size)[0], relative.view(-1, 1))
    others = (scores.sum(1, keepdim=True) - scores) / (size - 1)
    expected = (scores - others).view(-1, 1)
    torch.testing.assert_close(leave_one_out(rewards, group_size=size)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_size", [0, 1, 3, 5])
@pytest.mark.parametrize("estimator", [group_relative, leave_one_out])
def test_groups_refuse(estimator, group_size):
    with pytest.raises(
        ValueError, match=f"group_size is {group_size}; it must be at least 2 and divide the batch of 4"
    ):
        estimator(REWARDS, group_size=group_size, mask=MASK)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_scores_refuse_several_episodes_in_a_row(flag):
    flags = torch.tensor([[F, F, F], [F, T, F], [F, F, F], [F, F, F]])
    with pytest.raises(ValueError, match="row 1 holds several episodes"):
        uniform(REWARDS, mask=MASK, **{flag: flags})
    last = torch.tensor([[F, T, T], [F, F, T], [T, T, F], [F, F, F]])
    assert torch.equal(uniform(REWARDS, mask=MASK, **{flag: last})[0], SCORES)


def test_scores_refuse_nan():
    with pytest.raises(ValueError, match=r"rewards is nan at \(0, 2\)"):
        uniform(REWARDS)
    with pytest.raises(ValueError, match="baseline is nan"):
        uniform(REWARDS, baseline=math.nan, mask=MASK)
