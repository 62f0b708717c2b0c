"""The episode that an evaluation writes for the page."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.configs import control_config, quiet_agent
from helpers.files import read_metrics
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.played_episode import FRAMES, PlayedEpisode
from tokencredit.report.agent_episode import STEPS, read_episode
from tokencredit.settings.control import AgentAdvantageConfig, AgentCriticConfig, EnvConfig, EpisodesConfig


class Torn(gym.Env):
    """Fails to draw from its fourth step on."""

    metadata: dict = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (Gymnasium's form)
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.ones(1, np.float32), 0.5, False, self.time == 9, {}

    def render(self):
        if self.time == 3:
            raise OSError("no screen")
        return np.zeros((8, 8, 3), np.uint8)


gym.register("Torn-v0", Torn)


def trained(folder, **groups):
    ControlTrainer(control_config(folder, 1, **groups)).train()
    return read_episode(folder / "episode.json")


def test_it_is_the_first_of_the_evaluation_with_its_credit_and_pictures(tmp_path):
    env = EnvConfig(kwargs={"max_episode_steps": 12})
    episode = trained(tmp_path / "run", env=env, eval=EpisodesConfig(episodes=1))
    row = read_metrics(tmp_path / "run")[-1]
    assert (episode["iteration"], episode["greedy"], episode["terminated"]) == (1, True, episode["length"] < 12)
    assert episode["length"] == row["eval/average_length"] == len(episode["actions"]) == len(episode["values"])
    assert episode["return"] == row["eval/average_return"] == sum(episode["rewards"])
    steps = [frame["step"] for frame in episode["frames"]]
    assert steps == list(range(episode["length"] + 1))


def test_pictures_of_a_long_episode_are_evenly_spaced_and_few(tmp_path):
    env = EnvConfig("Pendulum-v1")
    episode = trained(tmp_path / "run", env=env, eval=EpisodesConfig(episodes=1, greedy=False))
    steps = [frame["step"] for frame in episode["frames"]]
    assert steps == [*range(0, 200, 8), 200]
    assert FRAMES <= len(steps) <= 2 * FRAMES + 1
    assert (episode["terminated"], episode["greedy"]) == (False, False)
    assert len((tmp_path / "run" / "episode.json").read_bytes()) < 100_000


def test_an_environment_that_fails_to_draw_has_credit_without_pictures(tmp_path):
    critic, advantage = AgentCriticConfig(kind="none"), AgentAdvantageConfig(estimator="reward_to_go", gamma=1.0)
    episode = trained(tmp_path / "run", env=EnvConfig("Torn-v0"), critic=critic, advantage=advantage)
    assert episode["frames"] == []
    assert episode["advantages"] == [0.5 * left for left in range(9, 0, -1)]
    assert "values" not in episode
    assert all(0 <= first < 2 and 0 <= second < 3 for first, second in episode["actions"])


def test_without_evaluation_episodes_none_is_played(tmp_path):
    assert trained(tmp_path / "run", eval=EpisodesConfig(episodes=0)) is None


def test_a_later_episode_goes_when_a_run_goes_back(tmp_path):
    options = {"eval": EpisodesConfig(episodes=1, every=1)}
    run = quiet_agent(tmp_path / "run", 1, save_every=1)
    ControlTrainer(control_config(tmp_path, run=run, **options)).train()
    file = tmp_path / "run" / "episode.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"iteration": 2}))  # of an iteration that is lost
    run = quiet_agent(tmp_path / "run", 2, save_every=1)
    trainer = ControlTrainer(control_config(tmp_path, run=run, **options))
    begun = trainer.iteration
    trainer.iteration = lambda number: begun(number) if not file.exists() else pytest.fail("it is still there")
    trainer.train(resume_from_checkpoint=True)
    assert read_episode(file)["iteration"] == 2


def test_numbers_are_finite_rounded_and_limited():
    many = 2 * STEPS
    values = [math.nan, 1e-9, 0.123456789, *[20.0] * (many - 3)]
    episode = PlayedEpisode([[0.0]] * many, [np.int64(1)] * many, [1.0] * many, values, [math.inf] * many, True)
    record = json.loads(json.dumps(episode.record(), allow_nan=False))
    assert record["values"][:4] == [None, 0.0, 0.1235, 20.0]
    assert (record["length"], record["return"], record["advantages"][0]) == (many, many, None)
    assert len(record["actions"]) == len(record["rewards"]) == STEPS
