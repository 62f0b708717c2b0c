"""Normalisation of rewards and observations, in environments whose every number is known."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tokencredit.control.environment_wrappers import EnvironmentRaised
from tokencredit.control.vector_environments import make_envs, restore_envs, save_envs, statistics
from tokencredit.settings.control import EnvConfig


class Steps(gym.Env):
    """Observes its step, and pays 1 for each, or the step's number; after five it ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, by, rising=False):
        self.by, self.rising = by, rising

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        over, reward = self.count == 5, float(self.count if self.rising else 1)
        return np.full(1, self.count, np.float32), reward, over and self.by == "end", over and self.by == "cut", {}


gym.register("Steps-v0", Steps)
RISING = [1, 2.99, 5.9601, 9.9005, 14.8015]
"""Discounted returns of the rewards 1, 2, 3, 4 and 5, with γ = 0.99."""


def make(by, number=1, rising=False, **changes):
    envs = make_envs(EnvConfig("Steps-v0", kwargs={"by": by, "rising": rising}, **changes), number, 0.99)
    envs.reset(seed=1)
    return envs


def rewards(envs, steps):
    return [envs.step(np.zeros(envs.num_envs, int))[1].tolist() for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["cut", "end"])
@pytest.mark.parametrize(("rising", "returns"), [(False, [1, 1.99, 2.9701, 3.9404, 4.901]), (True, RISING)])
def test_the_discounted_return_begins_anew_with_each_episode_however_the_last_one_ended(by, rising, returns):
    """Five rewards of 1 have returns whose deviation is 1.379."""
    envs = make(by, 2, rising, normalize_rewards=True)
    rewards(envs, 6 * 500 - 1)
    scale = np.sqrt(statistics(envs)["rewards"].var)
    assert scale == pytest.approx(np.std(returns), rel=1e-3)
    assert rising or scale == pytest.approx(1.379, abs=1e-3)
    after = rewards(envs, 6)
    assert after[0] == [0.0, 0.0], "the step that resets pays nothing"
    assert after[1] == pytest.approx([1 / scale, 1 / scale], rel=1e-3)


def test_the_first_rewards_by_hand():
    """A first return of 1 alone has no deviation but that of the prior; then 1 and 1.99 have one of 0.495."""
    first, second = rewards(make("cut", normalize_rewards=True), 2)
    assert first == [10.0], "clipped"
    assert second == pytest.approx([1 / 0.495], rel=0.02)


def test_copies_brought_elsewhere_go_on_with_the_same_scale():
    envs, others = make("cut", 2, normalize_rewards=True), make("cut", 2, normalize_rewards=True)
    rewards(envs, 9)
    assert restore_envs(others, deepcopy(save_envs(envs))) == []
    assert rewards(others, 20) == rewards(envs, 20)


def test_a_copy_that_cannot_be_brought_back_begins_a_new_return():
    envs, others = make("cut", normalize_rewards=True), make("cut", normalize_rewards=True)
    rewards(envs, 4)
    state = save_envs(envs)
    state["copies"][0]["observation"] = np.array([7.0])
    assert restore_envs(others, state) == [0]
    before = statistics(others)["rewards"].count
    assert rewards(others, 1) == [[0.0]]
    assert statistics(others)["rewards"].count == before
    rewards(others, 2)
    layer = others
    while not hasattr(type(layer), "normalize"):
        layer = layer.env
    assert layer.accumulated_reward.tolist() == pytest.approx([1.99])


@pytest.mark.parametrize("steps", [4, 5], ids=["in an episode", "at its end"])
def test_a_copy_restored_once_more_before_its_next_step_goes_on_where_it_was(steps):
    """At the end of an episode the environments here are another copy of the state, not yet reset."""
    envs, others, third = (make("cut", 2, normalize_rewards=True) for _ in range(3))
    rewards(envs, steps)
    assert restore_envs(others, deepcopy(save_envs(envs))) == []
    rewards(third, 5)  # Gymnasium would reset its copies in the next step
    assert restore_envs(third, deepcopy(save_envs(others))) == []
    assert rewards(third, 9) == rewards(envs, 9)


class InPlace(Steps):
    """Changes the arrays of its observation and of its action in place."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.observation, info = super().reset(seed=seed)
        return self.observation, info

    def step(self, action):
        action *= 0.5
        self.observation += action
        return self.observation, *super().step(action)[1:]


gym.register("InPlace-v0", InPlace)


@pytest.mark.filterwarnings("ignore:.*share an object:UserWarning")
def test_arrays_that_an_environment_changes_in_place_do_not_change_what_came_before():
    """A stack holds earlier observations, and a replay the actions as they were sampled."""
    config = EnvConfig("InPlace-v0", kwargs={"by": "end"})
    envs, others = make_envs(config, 1, 0.99, stack=3), make_envs(config, 1, 0.99, stack=3)
    envs.reset(seed=1)
    for _ in range(3):
        observation = envs.step(np.ones((1, 1), np.float32))[0]
    assert observation.tolist() == [[0.5, 1.0, 1.5]]
    assert restore_envs(others, deepcopy(save_envs(envs))) == []


class Outside(Steps):
    """Observes a category that its space lacks."""

    observation_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return -1, *super().step(action)[1:]


gym.register("Outside-v0", Outside)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("stack", [1, 3])
def test_an_observation_outside_its_space_is_refused_in_a_stack_too(stack):
    envs = make_envs(EnvConfig("Outside-v0", kwargs={"by": "end"}), 1, 0.99, stack=stack)
    envs.reset(seed=1)
    with pytest.raises(EnvironmentRaised, match="the observation -1 does not fit its space, Discrete"):
        envs.step(np.zeros(1, int))


class Lapse(Steps):
    """Its third reward and observation are not finite."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return (observation * np.nan, np.nan, *rest) if self.count == 3 else (observation, reward, *rest)


gym.register("Lapse-v0", Lapse)


def test_numbers_that_are_not_finite_stay_out_of_the_statistics():
    scaling = {"normalize_observations": True, "normalize_rewards": True}
    envs = make_envs(EnvConfig("Lapse-v0", kwargs={"by": "cut"}, **scaling), 1, 0.99)
    envs.reset(seed=1)
    paid = np.array(rewards(envs, 12))
    assert np.isnan(paid[2])
    assert np.isfinite(paid[6:8]).all(), "in the next episode"
    assert statistics(envs)["observations"].mean == pytest.approx([24 / 11], abs=1e-3)
    assert np.isfinite(statistics(envs)["rewards"].var)


@pytest.mark.parametrize("by", ["cut", "end"])
def test_each_observation_counts_once_the_first_and_the_last_of_an_episode_too(by):
    envs = make(by, normalize_observations=True)
    rewards(envs, 7)  # 0 to 5, then 0 and 1
    seen = statistics(envs)["observations"]
    assert seen.count == pytest.approx(8, abs=1e-3)
    assert seen.mean == pytest.approx([16 / 8], abs=1e-3)
