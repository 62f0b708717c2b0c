import inspect
import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.advantages import (
    decoupled_gae,
    gae,
    length_adaptive_gae,
    monte_carlo,
    n_step,
    reward_to_go,
    td,
    total_return,
)
from tokencredit.core.estimator_table import ESTIMATORS, Estimator
from tokencredit.core.estimators import FUNCTIONS, estimate

# --- worked by hand -------------------------------------------------------------------------------------------------

REWARDS, VALUES = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[12.5, 8.3, 5.1]])
TERMINATED = torch.tensor([[False, False, True]])


def test_gae_by_hand():
    # δ = (1 + 0.99·8.3 − 12.5, 1 + 0.99·5.1 − 8.3, 1 − 5.1) = (−3.283, −2.251, −4.1)
    # A₂ = −4.1;  A₁ = −2.251 + 0.9405·(−4.1) = −6.10705;  A₀ = −3.283 + 0.9405·(−6.10705) = −9.02668
    advantages, returns = gae(REWARDS, VALUES, gamma=0.99, lam=0.95, terminated=TERMINATED)
    torch.testing.assert_close(advantages, torch.tensor([[-9.02668, -6.10705, -4.1]]), atol=2e-6, rtol=0)
    torch.testing.assert_close(returns, advantages + VALUES)
    assert returns[0, 2] == 1.0


def test_td_and_monte_carlo_by_hand():
    advantages, _ = td(REWARDS, VALUES, gamma=0.99)
    torch.testing.assert_close(advantages, torch.tensor([[-3.283, -2.251, -4.1]]), atol=1e-6, rtol=0)
    # returns: 1;  1 + 0.99 = 1.99;  1 + 0.99·1.99 = 2.9701
    advantages, returns = monte_carlo(REWARDS, VALUES, gamma=0.99)
    torch.testing.assert_close(returns, torch.tensor([[2.9701, 1.99, 1.0]]))
    assert torch.equal(advantages, returns - VALUES)


def test_truncation_by_hand():
    # The next state is worth 10: δ₂ = 1 + 0.5·10 − 5.1 = 0.9, G₂ = 6, G₁ = 1 + 0.5·6 = 4, G₀ = 1 + 0.5·4 = 3
    flags = {"truncated": TERMINATED, "bootstrap": torch.tensor([[math.nan, math.inf, 10.0]])}
    advantages, returns = gae(REWARDS, VALUES, gamma=0.5, lam=1.0, **flags)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 6.0]]))
    torch.testing.assert_close(advantages[0, 2], torch.tensor(0.9))
    # Where both flags are set it terminated, and the bootstrap is not read.
    both = gae(REWARDS, VALUES, gamma=0.5, lam=1.0, terminated=TERMINATED, truncated=TERMINATED)
    assert torch.equal(both[1], gae(REWARDS, VALUES, gamma=0.5, lam=1.0)[1])


def test_gaps_and_episodes_by_hand():
    nan = math.nan
    # Two episodes, (1, 2) and (3), with steps nobody took before, between and after.
    mask = torch.tensor([[False, True, False, True, True, False]])
    rewards = torch.tensor([[nan, 1.0, nan, 2.0, 3.0, nan]])
    values = torch.tensor([[nan, 4.0, nan, 6.0, 5.0, nan]])
    # The flag at the unacted step 2 means nothing.
    terminated = torch.tensor([[False, False, True, True, False, False]])
    # G₃ = 2;  G₁ = 1 + 0.5 [0.5·6 + 0.5·2] = 3;  G₄ = 3
    advantages, returns = gae(rewards, values, gamma=0.5, lam=0.5, mask=mask, terminated=terminated)
    assert returns.tolist() == [[0.0, 3.0, 0.0, 2.0, 3.0, 0.0]]
    assert advantages.tolist() == [[0.0, -1.0, 0.0, -4.0, -2.0, 0.0]]


def test_n_step_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0]])
    # n = 2: 1 + 0.5·2 + 0.25·30 = 9.5;  2 + 0.5·3 + 0.25·40 = 13.5;  3 + 0.5·4 = 5;  4
    _, returns = n_step(rewards, values, gamma=0.5, n=2)
    assert returns.tolist() == [[9.5, 13.5, 5.0, 4.0]]
    # n = 3: 1 + 0.5·2 + 0.25·3 + 0.125·40 = 7.75;  2 + 0.5·3 + 0.25·4 = 4.5
    _, returns = n_step(rewards, values, gamma=0.5, n=3)
    assert returns.tolist() == [[7.75, 4.5, 5.0, 4.0]]


def test_decoupled_and_length_adaptive_by_hand():
    advantages, returns = decoupled_gae(REWARDS, VALUES, gamma=0.99, lam=0.95)
    assert torch.equal(advantages, gae(REWARDS, VALUES, gamma=0.99, lam=0.95)[0])
    assert torch.equal(returns, monte_carlo(REWARDS, VALUES, gamma=0.99)[1])
    # Lengths 3 and 2 with α = 0.5: λ = 1 − 1/1.5 = 1/3, and 1 − 1/1 = 0
    rewards, values = REWARDS.expand(2, 3), VALUES.expand(2, 3)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, _ = length_adaptive_gae(rewards, values, gamma=0.99, alpha=0.5, mask=mask)
    torch.testing.assert_close(advantages[:1], gae(REWARDS, VALUES, gamma=0.99, lam=1 / 3)[0])
    torch.testing.assert_close(advantages[1:], td(rewards[1:], values[1:], gamma=0.99, mask=mask[1:])[0])
    # By default α = 0.05. Shorter than 1/α: λ is 0, not negative. With 40 steps it is 1 − 1/2.
    advantages, _ = length_adaptive_gae(REWARDS, VALUES, gamma=0.99)
    assert torch.equal(advantages, td(REWARDS, VALUES, gamma=0.99)[0])
    rewards, values = torch.randn(2, 1, 40, generator=torch.Generator().manual_seed(0))
    advantages, _ = length_adaptive_gae(rewards, values, gamma=1.0)
    torch.testing.assert_close(advantages, gae(rewards, values, gamma=1.0, lam=0.5)[0])


# --- against the definitions, in float64 ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    bootstrap: torch.Tensor

    @property
    def where(self):
        return {name: getattr(self, name) for name in ("mask", "terminated", "truncated", "bootstrap")}

    def episodes(self):
        """(row, its acted steps, what the state after the last of them is worth), for each episode."""
        for row in range(len(self.rewards)):
            steps = []
            acted = self.mask[row].nonzero().flatten().tolist()
            for t in acted:
                steps.append(t)
                terminated, truncated = bool(self.terminated[row, t]), bool(self.truncated[row, t])
                if terminated or truncated or t == acted[-1]:
                    worth = float(self.bootstrap[row, t]) if truncated and not terminated else 0.0
                    yield row, steps, worth
                    steps = []

    def returns_by(self, target):
        """Returns [batch, time] in float64, where target(rewards, values, worth, i, row) is the return of step i."""
        returns = torch.zeros(self.rewards.shape, dtype=torch.float64)
        for row, steps, worth in self.episodes():
            rewards = [float(self.rewards[row, t]) for t in steps]
            values = [float(self.values[row, t]) for t in steps]
            for i, t in enumerate(steps):
                returns[row, t] = target(rewards, values, worth, i, row)
        return returns

    def check(self, results, returns, advantages=None):
        """Compare results with expected returns, and with returns − values unless expected advantages are given."""
        if advantages is None:
            advantages = torch.where(self.mask, returns - self.values, 0.0)
        torch.testing.assert_close(results[0].double(), advantages, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1].double(), returns, rtol=1e-5, atol=1e-5)


def gae_definition(gamma, lam):
    """V + Σₖ (γλ)ᵏ δ, straight from equation 16 of the paper."""

    def target(rewards, values, worth, i, row):
        following = [*values[1:], worth]
        deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
        lam_row = lam(row) if callable(lam) else lam
        return values[i] + sum((gamma * lam_row) ** k * delta for k, delta in enumerate(deltas[i:]))

    return target


def n_step_definition(gamma, n):
    def target(rewards, values, worth, i, row):
        end = min(i + n, len(rewards))
        following = [*values, worth]
        return sum(gamma**k * r for k, r in enumerate(rewards[i:end])) + gamma ** (end - i) * following[end]

    return target


@st.composite
def rollouts(draw):
    batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def flags(*chances):
        return torch.rand(batch, time, generator=generator) < draw(st.sampled_from(chances))

    mask = flags(0.0, 0.3, 0.9, 1.0)
    mask[torch.arange(batch), torch.randint(time, (batch,), generator=generator)] = True
    noise = torch.randn(3, batch, time, generator=generator)
    garbage = draw(st.sampled_from([0.0, 1e30, math.inf, math.nan]))
    rewards, values, bootstrap = torch.where(mask, noise, garbage)
    return Rollout(rewards, values, mask, flags(0.0, 0.1, 0.5), flags(0.0, 0.1, 0.5), bootstrap)


fractions = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)


@given(rollouts(), fractions, fractions)
def test_gae_by_definition(rollout, gamma, lam):
    results = gae(rollout.rewards, rollout.values, gamma=gamma, lam=lam, **rollout.where)
    rollout.check(results, rollout.returns_by(gae_definition(gamma, lam)))


@given(rollouts(), fractions, st.integers(1, 45))
def test_n_step_by_definition(rollout, gamma, n):
    results = n_step(rollout.rewards, rollout.values, gamma=gamma, n=n, **rollout.where)
    rollout.check(results, rollout.returns_by(n_step_definition(gamma, n)))


@given(rollouts(), fractions, fractions, fractions)
def test_decoupled_gae_by_definition(rollout, gamma, lam, lam_returns):
    factors = {"gamma": gamma, "lam": lam, "lam_returns": lam_returns}
    results = decoupled_gae(rollout.rewards, rollout.values, **factors, **rollout.where)
    target = rollout.returns_by(gae_definition(gamma, lam))
    advantages = torch.where(rollout.mask, target - rollout.values, 0.0)
    rollout.check(results, rollout.returns_by(gae_definition(gamma, lam_returns)), advantages)


@given(rollouts(), fractions, st.floats(0.01, 2.0))
def test_length_adaptive_gae_by_definition(rollout, gamma, alpha):
    results = length_adaptive_gae(rollout.rewards, rollout.values, gamma=gamma, alpha=alpha, **rollout.where)

    def lam(row):
        return max(0.0, 1 - 1 / (alpha * int(rollout.mask[row].sum())))

    advantages = torch.where(rollout.mask, rollout.returns_by(gae_definition(gamma, lam)) - rollout.values, 0.0)
    rollout.check(results, rollout.returns_by(gae_definition(gamma, 1.0)), advantages)


@given(rollouts(), fractions, st.booleans())
def test_reward_to_go_by_definition(rollout, gamma, critic):
    values = rollout.values if critic else None
    results = reward_to_go(rollout.rewards, values, gamma=gamma, **rollout.where)
    returns = rollout.returns_by(n_step_definition(gamma, 10**9))
    rollout.check(results, returns, None if critic else returns)


@given(rollouts(), fractions, st.booleans())
def test_total_return_by_definition(rollout, gamma, critic):
    values = rollout.values if critic else None
    results = total_return(rollout.rewards, values, gamma=gamma, **rollout.where)
    to_go = n_step_definition(gamma, 10**9)
    returns = rollout.returns_by(lambda rewards, values, worth, i, row: to_go(rewards, values, worth, 0, row))
    rollout.check(results, returns, None if critic else returns)


@given(rollouts(), st.sampled_from(sorted(ESTIMATORS)), st.sampled_from([math.nan, math.inf, -1e30, 7.0]))
def test_steps_outside_the_mask_do_not_change_any_estimator(rollout, name, garbage):
    if name in ("uniform", "group_relative", "leave_one_out"):
        rollout = replace(rollout, terminated=rollout.mask & False, truncated=rollout.mask & False)
    if name in ("group_relative", "leave_one_out"):
        rollout = Rollout(*(torch.cat([x, x]) for x in vars(rollout).values()))
    names = ("rewards", "values", "bootstrap")
    numbers = {key: torch.where(rollout.mask, getattr(rollout, key), garbage) for key in names}
    terminated, truncated = rollout.terminated | ~rollout.mask, rollout.truncated ^ ~rollout.mask
    spoilt = replace(rollout, **numbers, terminated=terminated, truncated=truncated)
    options = {"gamma": 0.9, "lam": 0.8, "n": 3, "group_size": 2, "alpha": 0.5}
    expected = estimate(name, rollout.rewards, rollout.values, options=options, **rollout.where)
    results = estimate(name, spoilt.rewards, spoilt.values, options=options, **spoilt.where)
    for result, untouched in zip(results, expected, strict=True):
        assert torch.equal(result, untouched)
        assert (result[~rollout.mask] == 0).all()


def test_estimators_give_float32_without_gradients():
    rewards, values = REWARDS.clone().requires_grad_(), VALUES.clone().requires_grad_()
    for name in ESTIMATORS:
        options = {"gamma": 0.9, "lam": 0.8, "n": 2, "group_size": 2}
        results = estimate(name, rewards.expand(2, 3).bfloat16(), values.expand(2, 3).half(), options=options)
        for result in results:
            assert not result.requires_grad
            assert result.dtype == torch.float32
        doubles = estimate(name, rewards.expand(2, 3).double(), values.expand(2, 3).double(), options=options)
        assert doubles[0].dtype == torch.float64


def options_of(name):
    """Keyword arguments of an estimator other than tensors."""
    spec = ESTIMATORS[name]
    return {*spec.settings, *["group_size"] * spec.group, *["baseline"] * spec.baseline}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_table_says_what_each_estimator_takes(name):
    assert ESTIMATORS[name] == Estimator.of(FUNCTIONS[name])
    parameters = set(inspect.signature(FUNCTIONS[name]).parameters)
    where = {"mask", "terminated", "truncated", "bootstrap"}
    assert "where" in parameters or where <= parameters
    assert parameters - where - {"rewards", "values", "where"} == options_of(name)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_values_matter_exactly_where_the_table_says_so(name):
    options = {"gamma": 0.9, "lam": 0.8, "n": 2, "group_size": 2, "baseline": 0.3}
    rewards, values = REWARDS.repeat(2, 1), VALUES.repeat(2, 1)
    rewards[1] += 1
    (one, _), (two, _) = (estimate(name, rewards, v, options=options) for v in (values, values + 1))
    assert torch.equal(one, two) == (ESTIMATORS[name].critic == "unused")


def test_estimate_leaves_out_what_an_estimator_does_not_take():
    options = {"gamma": 0.99, "lam": 0.95, "n": 5, "group_size": 4, "baseline": 0.5}
    advantages, _ = estimate("td", REWARDS, VALUES, options=options)
    assert torch.equal(advantages, td(REWARDS, VALUES, gamma=0.99)[0])
    advantages, _ = estimate("uniform", REWARDS, options=options, mask=REWARDS > 0)
    assert advantages.tolist() == [[2.5, 2.5, 2.5]]


def test_estimate_refuses():
    with pytest.raises(ValueError, match="estimator is 'gea'; it may be gae, td"):
        estimate("gea", REWARDS, VALUES, options={})
    with pytest.raises(ValueError, match="option is 'lamda'"):
        estimate("gae", REWARDS, VALUES, options={"gamma": 1.0, "lamda": 1.0})
    with pytest.raises(ValueError, match="n is missing"):
        estimate("n_step", REWARDS, VALUES, options={"gamma": 1.0})
    with pytest.raises(ValueError, match="needs a critic"):
        estimate("gae", REWARDS, options={"gamma": 1.0, "lam": 1.0})


T, F, CUT = True, False, torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.zeros(3)}, "rewards has shape"),
        ({"rewards": torch.zeros(2, 0), "values": torch.zeros(2, 0)}, "rewards has shape"),
        ({"values": torch.zeros(2, 4)}, r"one more than the steps; it must be \(2, 3\): give values\[:, :-1\]"),
        ({"mask": torch.ones(3, 2, dtype=torch.bool)}, "mask has shape"),
        ({"mask": torch.ones(2, 3, dtype=torch.int64)}, "mask has dtype"),
        ({"mask": torch.tensor([[T, F, F], [F, F, F]])}, "mask has no acted step in row 1"),
        ({"terminated": torch.ones(2, 3)}, "terminated has dtype"),
        ({"truncated": CUT}, "bootstrap is None"),
        ({"truncated": CUT, "bootstrap": torch.zeros(2)}, "bootstrap has shape"),
        ({"truncated": CUT, "bootstrap": torch.full((2, 3), math.nan)}, r"bootstrap is nan at \(0, 0\)"),
        ({"rewards": torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]])}, r"rewards is nan at \(1, 1\)"),
        ({"values": torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]])}, r"values is -inf at \(0, 2\)"),
        ({"gamma": 1.01}, "gamma is 1.01"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"lam": -1e-9}, "lam is -1e-09"),
    ],
)
def test_gae_refuses(changes, message):
    arguments = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), "gamma": 0.9, "lam": 0.9, **changes}
    with pytest.raises(ValueError, match=message):
        gae(**arguments)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_bootstrap_that_no_step_would_read_is_refused(name):
    options = {"gamma": 0.9, "lam": 0.8, "n": 2, "group_size": 2, "baseline": 0.0}
    rows, flags = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for bootstrap in (torch.ones(2, 3), torch.ones(2)):
        with pytest.raises(ValueError, match="bootstrap is given without truncated"):
            estimate(name, rows, rows, options=options, bootstrap=bootstrap, terminated=flags)
    estimate(name, rows, rows, options=options, bootstrap=torch.ones(2, 3), truncated=flags)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_arguments_of_other_libraries_are_answered_by_name(name):
    options = {key: 2 if key in ("n", "group_size") else 0.5 for key in options_of(name)}
    rows = torch.zeros(2, 3)
    known = {"rewards": rows} | ({} if ESTIMATORS[name].critic == "unused" else {"values": rows})
    with pytest.raises(TypeError, match="dones is not an argument of the estimators; give terminated="):
        FUNCTIONS[name](**known, **options, dones=CUT)
    with pytest.raises(TypeError, match="last_value is not an argument of the estimators; give truncated="):
        FUNCTIONS[name](**known, **options, last_value=rows)


def test_buffers_with_time_first_are_refused_where_a_length_shows_it():
    rows, flags = torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.bool)
    cut = {"gamma": 1.0, "lam": 1.0, "truncated": flags}
    for bootstrap in (torch.zeros(3), torch.zeros(1, 3)):
        message = rf"^bootstrap has shape {re.escape(str(tuple(bootstrap.shape)))} and rewards \(5, 3\), which looks li"
        with pytest.raises(ValueError, match=message):
            gae(rows, rows, bootstrap=bootstrap, **cut)
    with pytest.raises(ValueError, match=r"^values has shape \(6, 3\) and rewards .* give rewards\.T, and the others"):
        gae(rows, torch.zeros(6, 3), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"^terminated has shape \(6, 3\) and rewards"):
        gae(rows, rows, gamma=1.0, lam=1.0, terminated=torch.zeros(6, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^bootstrap has shape \(3,\); it must be \(3, 3\)$"):  # either may be time
        gae(rows[:3], rows[:3], bootstrap=torch.zeros(3), gamma=1.0, lam=1.0, truncated=flags[:3])


def test_large_finite_numbers_are_not_refused():
    # Their sum overflows float32, but none of them is infinite.
    rewards, mask = torch.full((1, 3), 3e38), torch.tensor([[T, T, T]])
    advantages, _ = gae(rewards, torch.zeros(1, 3), gamma=0.0, lam=0.0, mask=mask)
    assert torch.equal(advantages, rewards)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: n_step(REWARDS, VALUES, gamma=1.0, n=0), "n is 0"),
        (lambda: n_step(REWARDS, VALUES, gamma=2.0, n=1), "gamma is 2.0"),
        (lambda: decoupled_gae(REWARDS, VALUES, gamma=1.0, lam=2.0), "lam is 2.0"),
        (lambda: decoupled_gae(REWARDS, VALUES, gamma=1.0, lam=1.0, lam_returns=-1.0), "lam_returns is -1.0"),
        (lambda: length_adaptive_gae(REWARDS, VALUES, gamma=1.0, alpha=0.0), "alpha is 0.0"),
        (lambda: length_adaptive_gae(REWARDS, VALUES, gamma=1.0, lam_returns=2.0), "lam_returns is 2.0"),
        (lambda: reward_to_go(REWARDS, VALUES, gamma=2.0), "gamma is 2.0"),
        (lambda: total_return(REWARDS, VALUES, gamma=-2.0), "gamma is -2.0"),
    ],
)
def test_the_others_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
