"""The episode that an evaluation writes for the page."""

import json
import math
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.configs import control_config, quiet_agent
from helpers.files import read_events, read_metrics
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.played_episode import FRAMES, PlayedEpisode
from tokencredit.distributed import signals
from tokencredit.errors import TooManyBadSteps
from tokencredit.report.agent_episode import STEPS, read_episode
from tokencredit.settings.control import AgentAdvantageConfig, AgentCriticConfig, EnvConfig, EpisodesConfig


class Torn(gym.Env):
    """Fails to draw from its fourth step on; with `blind` it fails as soon as it is to be drawn."""

    metadata: dict = {"render_modes": ["rgb_array"], "render_fps": 9}  # noqa: RUF012  (Gymnasium's form)
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def __init__(self, render_mode=None, reward=0.5, interrupt=False, blind=False):
        self.render_mode, self.reward, self.interrupt, self.blind = render_mode, reward, interrupt, blind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        if self.blind and self.render_mode:
            raise OSError("no screen")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.ones(1, np.float32), self.reward, False, self.time == 9, {}

    def render(self):
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        if self.time == 3:
            raise OSError("no screen")
        return np.zeros((8, 8, 3), np.uint8)


class Deep(Torn):
    """Draws depth images, as all of MuJoCo's environments; it has no other modes than these."""

    metadata: dict = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 9}  # noqa: RUF012

    def render(self):
        pytest.fail("it was drawn")


for each in (Torn, Deep):
    gym.register(f"{each.__name__}-v0", each)


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


@pytest.mark.parametrize(("name", "kwargs"), [("Torn", {}), ("Torn", {"blind": True}), ("Deep", {})])
def test_an_environment_that_fails_to_draw_has_credit_without_pictures(name, kwargs, tmp_path):
    critic, advantage = AgentCriticConfig(kind="none"), AgentAdvantageConfig(estimator="reward_to_go", gamma=1.0)
    env = EnvConfig(f"{name}-v0", kwargs=kwargs)
    episode = trained(tmp_path / "run", env=env, critic=critic, advantage=advantage)
    assert episode["frames"] == []
    assert episode["advantages"] == [0.5 * left for left in range(9, 0, -1)]
    assert "values" not in episode
    assert all(0 <= first < 2 and 0 <= second < 3 for first, second in episode["actions"])


@pytest.mark.filterwarnings("ignore")
def test_a_reward_that_is_not_finite_leaves_the_evaluation(tmp_path):
    envs = EnvConfig("Torn-v0", kwargs={"reward": math.inf})
    with pytest.raises(TooManyBadSteps):
        trained(tmp_path / "run", env=envs, eval=EpisodesConfig(episodes=1))
    assert read_metrics(tmp_path / "run")[-1]["eval/average_length"] == 9
    assert any("no episode for the page: the environment gave" in event for event in read_events(tmp_path / "run"))


def test_ctrl_c_while_an_episode_is_drawn_keeps_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", env=EnvConfig("Torn-v0", kwargs={"interrupt": True}))
    assert read_metrics(tmp_path / "run")[-1]["eval/average_length"] == 9
    [event] = (event for event in read_events(tmp_path / "run") if "signal" in event)
    assert event.startswith("no episode for the page: a signal came")


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


def test_numbers_are_finite_limited_and_rounded_in_their_units():
    many = 2 * STEPS
    values = [math.nan, 1e-9, 0.123456789, *[20.0] * (many - 3)]
    episode = PlayedEpisode([[0.0]] * many, [np.int64(1)] * many, [1e6] * many, values, [math.inf] * many, True)
    record = json.loads(json.dumps(episode.record(), allow_nan=False))
    assert record["values"][:4] == [None, 0.0, 0.1235, 20.0]
    assert (record["length"], record["return"], record["advantages"][0]) == (many, 1e6 * many, None)
    assert len(record["actions"]) == len(record["rewards"]) == STEPS
