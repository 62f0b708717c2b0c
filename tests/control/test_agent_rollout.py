"""A rollout in an environment whose every step is known: it counts, and ends after a number of steps of its own."""

import json
import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.configs import quiet_agent
from helpers.files import read_metrics
from tokencredit.control.agent import Agent
from tokencredit.control.agent_rollout import Collector
from tokencredit.control.control_trainer import ControlTrainer, refuse_unsplit
from tokencredit.control.environment_wrappers import to_space
from tokencredit.control.vector_environments import make_envs
from tokencredit.core.advantages import gae
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.control import AgentAdvantageConfig, AgentConfig, ControlConfig, EnvConfig, EpisodesConfig


class Counter(gym.Env):
    """Observes [the number of its episode, steps in it]; the reward of a step is its number in the episode."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, ends=3, by="termination", bad=None):
        self.ends, self.by, self.bad, self.episode = ends, by, bad, 0

    def observe(self):
        broken = self.bad in ("observation", "later") and (self.episode, self.count) == (1, 2)
        return np.array([self.episode, np.nan if broken else self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.count = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        if self.bad == "later" and self.count == 3:
            raise ValueError(f"cannot take {action} after NaN")
        if self.bad == "moves":
            os.chdir("/")
            torch.set_default_dtype(torch.float64)
        if self.bad == "exits" and self.count == 2:
            sys.exit("no licence")
        if self.bad == "raises" and self.count == 2:
            raise ValueError("a wheel came off")
        if self.bad in ("shape", "none") and self.count == 2:
            return np.zeros(3 if self.bad == "shape" else 2, np.float32), None, False, False, {}
        reward = np.inf if self.bad == "reward" and self.count == 2 else float(self.count)
        over = self.count == self.ends
        return self.observe(), reward, over and self.by == "termination", over and self.by == "truncation", {}

    def close(self):
        if self.bad == "close":
            raise OSError("the simulator is gone")


gym.register("Counter-v0", Counter)


def collector_of(env, number=1):
    torch.manual_seed(0)
    envs = make_envs(env, number, 0.99)
    return Collector(envs, Agent(envs.single_observation_space, envs.single_action_space, AgentConfig(hidden=[8])), 1)


def collect(steps, number=1, **kwargs):
    collector = collector_of(EnvConfig("Counter-v0", kwargs=kwargs), number)
    return collector.agent, collector.collect(steps)


def test_the_step_that_resets_is_no_transition():
    _, rollout = collect(8)
    assert rollout.mask[0].tolist() == [True] * 3 + [False] + [True] * 3 + [False]
    assert rollout.observations[0].tolist() == [[1, 0], [1, 1], [1, 2], [1, 3], [2, 0], [2, 1], [2, 2], [2, 3]]
    assert rollout.rewards[0][rollout.mask[0]].tolist() == [1, 2, 3, 1, 2, 3]
    assert rollout.episodes == [(6.0, 3), (6.0, 3)]


def test_resets_are_not_counted_as_steps_of_the_environment(tmp_path):
    env = EnvConfig("Counter-v0", number=2, kwargs={"ends": 1})
    args = ControlConfig(env=env, steps=8, eval=EpisodesConfig(episodes=0), run=quiet_agent(tmp_path / "run", 2))
    ControlTrainer(args).train()
    rows = read_metrics(tmp_path / "run")
    assert [(row["steps"], row["total_steps"]) for row in rows] == [(8, 8), (8, 16)]


def test_termination_is_worth_nothing_and_truncation_its_true_last_observation():
    for by in ("termination", "truncation"):
        agent, rollout = collect(6, by=by)
        ended = rollout.terminated if by == "termination" else rollout.truncated
        assert ended[0].tolist() == [False, False, True, False, False, by == "truncation"]
        last = agent.values(torch.tensor([1.0, 3.0])).detach()
        torch.testing.assert_close(rollout.bootstrap[0, 2], last)
        flags = {"mask": rollout.mask, "terminated": rollout.terminated, "truncated": rollout.truncated}
        advantages, _ = gae(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, bootstrap=rollout.bootstrap, **flags)
        after = 0.0 if by == "termination" else 0.9 * last
        torch.testing.assert_close(advantages[0, 2], 3 + after - rollout.values[0, 2])


def test_a_time_limit_is_an_end_without_bootstrap_and_the_end_of_a_rollout_is_not():
    rollout = collector_of(EnvConfig("Counter-v0", kwargs={"by": "truncation"})).collect(6, bootstrap=False)
    assert rollout.terminated[0].tolist() == [False, False, True, False, False, False]
    assert rollout.truncated[0, -1]
    advantages, _ = rollout.credit(AgentAdvantageConfig(), collector_of(EnvConfig("Counter-v0")).agent)
    torch.testing.assert_close(advantages[0, 2], 3 - rollout.values[0, 2])


def test_a_batch_of_whole_episodes_has_no_cut_and_no_reset_inside_an_episode():
    collector = collector_of(EnvConfig("Counter-v0", kwargs={"ends": 4}), 5)
    for number in (1, 2):
        rollout = collector.collect(4, whole_episodes=True)
        assert collector.taken == 20, "episodes as long as `steps` take no more"
        assert rollout.mask.all()
        assert rollout.observations[:, 0].tolist() == [[number, 0]] * 5
    rollout = collector.collect(5, whole_episodes=True)
    assert rollout.mask[0].tolist() == [True] * 4 + [False] + [True] * 4
    assert rollout.terminated[0].nonzero().flatten().tolist() == [3, 8]
    assert not rollout.truncated.any()
    assert rollout.episodes == [(10.0, 4)] * 10


def test_copies_whose_episodes_are_over_wait_for_the_others():
    collector = collector_of(EnvConfig("CartPole-v1", normalize_observations=True, normalize_rewards=True), 4)
    for _ in range(2):
        rollout = collector.collect(20, whole_episodes=True)
        lengths = [length for _, length in rollout.episodes]
        assert collector.taken == int(rollout.mask.sum()) == sum(lengths)
        assert int(rollout.terminated.sum()) == len(lengths)
        for mask, ended in zip(rollout.mask, rollout.terminated, strict=True):
            *earlier, last = ended.nonzero().flatten().tolist()
            assert int(mask.sum()) >= 20 > sum(int(mask[: end + 1].sum()) for end in earlier[-1:])
            assert mask.nonzero()[-1] == last, "nothing after the last whole episode"


def test_whole_episodes_need_an_end_and_one_process(monkeypatch):
    monkeypatch.setattr("tokencredit.control.environment_wrappers.MAX_REPLAY_STEPS", 10)
    with pytest.raises(RunStopped, match=r"after 10 steps; set a limit, .*, or leave whole_episodes out$"):
        collector_of(EnvConfig("Counter-v0", kwargs={"ends": 100})).collect(5, whole_episodes=True)
    two = SimpleNamespace(count=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^whole_episodes is true; it needs one process, and there are 2$"):
        refuse_unsplit(ControlConfig(whole_episodes=True), two)


def test_an_episode_that_outlives_the_rollout_is_cut_off_there():
    agent, rollout = collect(5, ends=100)
    assert rollout.truncated[0].tolist() == [False] * 4 + [True]
    torch.testing.assert_close(rollout.bootstrap[0, 4], agent.values(torch.tensor([1.0, 5.0])).detach())


def test_the_next_rollout_goes_on_where_the_last_one_ended():
    torch.manual_seed(0)
    envs = make_envs(EnvConfig("Counter-v0"), 2, 0.99)
    agent = Agent(envs.single_observation_space, envs.single_action_space, AgentConfig(hidden=[8]))
    collector = Collector(envs, agent, seed=1)
    collector.collect(3)
    rollout = collector.collect(3)
    assert rollout.mask[0].tolist() == [False, True, True]
    assert rollout.observations[0, :, 1].tolist() == [3, 0, 1]


def test_log_probabilities_and_values_are_those_of_an_update():
    agent, rollout = collect(8, number=3)
    now = agent(rollout.observations, rollout.actions, lambda now, at: now.logprobs.sum())
    assert torch.equal(now.logprobs, rollout.logprobs)
    assert torch.equal(now.values.detach(), rollout.values)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("observation", r"environment 0 gave an observation that is not finite, at step 2"),
        ("reward", r"environment 0 gave a reward that is not finite, at step 1"),
        ("raises", r"the environment with seed 1 raised ValueError: a wheel came off, in step 2 of an episode\nTrace"),
        (
            "shape",
            r"raised ValueError: an observation has the shape \(3,\); its space has \(2,\), in step 2 of an epis",
        ),
        (
            "later",
            r"with seed 1 gave an observation that is not finite, and then raised ValueError: .*, in step 3 of an ep",
        ),
        ("none", r"raised TypeError: float\(\) argument must be .* not 'NoneType', in step 2 of an episode"),
    ],
)
def test_what_an_environment_does_wrong_is_named(bad, message):
    with pytest.raises(RunStopped, match=message):
        collect(8, bad=bad)


def test_an_environment_that_raises_in_its_process_is_named_with_its_line(tmp_path, recwarn):
    args = ControlConfig(
        env=EnvConfig("Counter-v0", number=2, processes=True, kwargs={"bad": "raises"}),
        steps=16,
        run=quiet_agent(tmp_path / "run"),
    )
    with pytest.raises(RunStopped) as caught:
        ControlTrainer(args).train()
    message = str(caught.value)
    assert message.startswith("stopped in iteration 1: the environment with seed ")
    assert 'raise ValueError("a wheel came off")' in message
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "an error"
    assert not [w for w in recwarn if "Worker" in str(w.message)], "it is said once"


def test_a_process_that_is_killed_is_named(tmp_path):
    agent, _ = collect(2)
    envs = make_envs(EnvConfig("Counter-v0", processes=True), 2, 0.99)
    collector = Collector(envs, agent, seed=1)
    envs.unwrapped.processes[1].kill()
    envs.unwrapped.processes[1].join()
    with pytest.raises(RunStopped, match="a process that ran an environment has ended"):
        collector.collect(4)


SQUARES = {
    "Discrete": (spaces.Discrete(4), 2, [0, 0, 1, 0]),
    "from one on": (spaces.Discrete(2, start=1), 2, [0, 1]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 2]), [1, 0], [0, 1, 1, 0]),
    "MultiBinary": (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
    "Tuple": (spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, ()))), (np.int64(1), 0.5), [0, 1, 0.5]),
    "Dict": (spaces.Dict(x=spaces.Discrete(2), y=spaces.Box(0, 1, (1,))), {"x": 1, "y": [0.0]}, [0, 1, 0]),
    "image": (spaces.Box(0, 255, (2, 2), np.uint8), [[0.0, 255.0], [1, 2]], [0, 255, 1, 2]),
}
"""Spaces, an observation of each in types that Gymnasium does not expect, and its flat form."""


class Square(gym.Env):
    """Observes the same square in one of several ways."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind):
        self.observation_space, self.square, _ = SQUARES[kind]

    def reset(self, *, seed=None, options=None):
        return deepcopy(self.square), {}

    def step(self, action):
        return deepcopy(self.square), 1.0, False, False, {}


gym.register("Square-v0", Square)


def unmade():
    raise ValueError("no track")


gym.register("Unmade-v0", unmade)


@pytest.mark.filterwarnings("ignore:.*obs")
@pytest.mark.filterwarnings("ignore:.*Casting input")
@pytest.mark.parametrize(("kind", "processes"), [*((kind, False) for kind in SQUARES), ("Tuple", True)])
def test_observations_of_other_kinds_are_flattened(kind, processes):
    envs = make_envs(EnvConfig("Square-v0", kwargs={"kind": kind}, processes=processes), 2, 0.99)
    agent = Agent(envs.single_observation_space, envs.single_action_space, AgentConfig(hidden=[4]))
    assert Collector(envs, agent, seed=1).collect(3).observations.tolist() == [[SQUARES[kind][2]] * 3] * 2
    envs.close()


def test_spaces_without_a_form_of_numbers_are_refused_inside_others_too(monkeypatch):
    monkeypatch.setitem(SQUARES, "texts", (spaces.Dict(mission=spaces.Text(5)), {"mission": "go"}, []))
    with pytest.raises(ConfigError, match=r"^env\.id: its observations are Dict\('mission': Text.* by a wrapper"):
        make_envs(EnvConfig("Square-v0", kwargs={"kind": "texts"}), 1, 0.99)


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (spaces.Box(-1, 1, (3,)), [0.0, 0.0], r"has the shape \(2,\); its space has \(3,\)"),
        (spaces.Box(-1, 1, (3,)), None, r"has the shape \(\)"),
        (spaces.Box(-1, 1, (2,)), ["a", "b"], "could not convert string to float"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1]), r"\[300   1\] does not fit its space, Box"),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([0.5]), "does not fit its space"),
        (spaces.Discrete(5), 7, r"7 does not fit its space, Discrete\(5\)"),
        (spaces.Discrete(5), -1, "does not fit"),
        (spaces.Discrete(5), np.array([2]), r"has the shape \(1,\)"),
        (spaces.Tuple((spaces.Discrete(2),)), (1, 1), "argument 2 is longer"),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_refused(space, observation, words):
    with pytest.raises((ValueError, TypeError), match=words):
        to_space(space, observation)


@pytest.mark.parametrize("bad", ["exits", "moves", "close"])
def test_what_an_environment_does_to_the_process_is_undone(bad, tmp_path, monkeypatch):
    """It moves to another folder and sets a dtype, as simulators do; it exits, or cannot be closed."""
    monkeypatch.chdir(tmp_path)
    env = EnvConfig("Counter-v0", number=2, kwargs={"bad": bad})
    trainer = ControlTrainer(ControlConfig(env=env, steps=8, eval=EpisodesConfig(episodes=0), run=quiet_agent("run")))
    if bad == "exits":
        with pytest.raises(RunStopped, match=r"the environment with seed 1 raised SystemExit: no licence, in step 2"):
            trainer.train()
    else:
        trainer.train()
    assert Path.cwd() == tmp_path
    assert torch.get_default_dtype() == torch.float32
    assert (tmp_path / "run" / "policy" / "agent.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:.*is out of date")
def test_an_environment_that_does_not_exist():
    with pytest.raises(
        ConfigError, match=r"'CartPoel-v1', which is not registered; did you mean CartPole.*\? For one of your own give"
    ):
        make_envs(EnvConfig("CartPoel-v1"), 1, 0.99)
    with pytest.raises(ConfigError, match=r"env\.id is 'no_such_module:Env-v0': No module named 'no_such_module'"):
        make_envs(EnvConfig("no_such_module:Env-v0"), 1, 0.99)
    with pytest.raises(ConfigError, match=r"cannot be made with env\.kwargs \{'colour': 'red'\}"):
        make_envs(EnvConfig("CartPole-v1", kwargs={"colour": "red"}), 1, 0.99)
    with pytest.raises(
        ConfigError, match=r"'HalfCheetah-v2': The mujoco v2 and v3 based .* its newest version is HalfCheetah-v5"
    ):
        make_envs(EnvConfig("HalfCheetah-v2"), 1, 0.99)
    with pytest.raises(
        ConfigError, match=r"is of the package ale-py: pip install ale-py, and give env\.id ale_py:ALE/Po"
    ):
        make_envs(EnvConfig("ALE/Pong-v5"), 1, 0.99)
    with pytest.raises(ConfigError, match=r"which is not registered; give env\.id module:ID, so that the module"):
        make_envs(EnvConfig("Nowhere/Unheard-v0"), 1, 0.99)
    with pytest.raises(
        ConfigError,
        match=r"importing gymnasium registers no such id; did you mean gymnasium:CartPole-v1",
    ):
        make_envs(EnvConfig("gymnasium:Cartpole-v1"), 1, 0.99)
    with pytest.raises(ConfigError, match=r"it names a module, not a file: give envs\.maze:Maze-v0$"):
        make_envs(EnvConfig("./envs/maze.py:Maze-v0"), 1, 0.99)


@pytest.mark.parametrize(
    ("wrapper", "key"),
    [(gym.wrappers.NormalizeObservation, "observations"), (gym.wrappers.NormalizeReward, "rewards")],
)
def test_statistics_of_one_copy_are_refused(wrapper, key, monkeypatch):
    """An evaluation would play with statistics that have seen nothing."""
    monkeypatch.setitem(SQUARES, "floats", (spaces.Box(0, 1, (1,)), [0.5], [0.5]))
    gym.register("Wrapped-v0", lambda: gym.wrappers.TimeLimit(wrapper(Square("floats")), 5))
    with pytest.raises(ConfigError, match=rf"^env\.id: .*{wrapper.__name__}, whose .* env\.normalize_{key}: true$"):
        make_envs(EnvConfig("Wrapped-v0", processes=True), 2, 0.99)
    del gym.registry["Wrapped-v0"]


@pytest.mark.parametrize("processes", [False, True])
def test_an_environment_that_cannot_be_made_is_answered_in_a_line(processes):
    with pytest.raises(
        ConfigError, match=r"^env\.id 'Unmade-v0' cannot .* it raised ValueError: no track at .*\.py:\d+$"
    ):
        make_envs(EnvConfig("Unmade-v0", processes=processes), 2, 0.99)


def test_an_environment_of_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    source = "import gymnasium as gym\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
    (tmp_path / "garage.py").write_text(source + "gym.register('Garage-v0', CartPoleEnv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])  # as the command has it; python -m adds the folder
    before = list(sys.path)
    envs = make_envs(EnvConfig("garage:Garage-v0", processes=True), 2, 0.99)
    assert envs.reset(seed=1)[0].shape == (2, 4)
    envs.close()
    assert sys.path == before
