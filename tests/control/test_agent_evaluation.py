import os
import signal
from multiprocessing import active_children

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.configs import control_config, quiet_agent
from helpers.files import TIMES, drop_keys, read_events, read_metrics
from tokencredit.cli import main
from tokencredit.control import environment_wrappers
from tokencredit.control.agent import Agent
from tokencredit.control.agent_evaluation import check_videos, load_agent, play
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.vector_environments import make_envs, statistics
from tokencredit.distributed import signals
from tokencredit.errors import ConfigError
from tokencredit.settings.control import HOMEWORK_TAGS, AgentConfig, EnvConfig, EpisodesConfig


@pytest.mark.slow
def test_a_solved_environment_is_played_well(tmp_path):
    """A hand-made policy: push the cart the way the pole falls."""
    envs = make_envs(EnvConfig("CartPole-v1"), 4, 0.99, training=False)
    agent = Agent(envs.single_observation_space, envs.single_action_space, AgentConfig(hidden=[]))
    with torch.no_grad():
        agent.actor_head.weight.copy_(torch.tensor([[0.0] * 4, [0.0, 0.5, 10.0, 3.0]]))
    episodes = play(envs, agent, 6, greedy=True, seed=1)
    assert episodes == [(500.0, 500)] * 6


class Endless(gym.Env):
    """Never ends; `interrupt` sends this process Ctrl-C in the step of this number."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, interrupt=None):
        self.interrupt, self.count = interrupt, 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        return np.zeros(1, np.float32), 1.0, False, False, {}


gym.register("Endless-v0", Endless)


def test_an_evaluation_of_an_environment_that_never_ends_is_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment_wrappers, "MAX_REPLAY_STEPS", 50)
    args = control_config(tmp_path / "run", env=EnvConfig("Endless-v0"))
    ControlTrainer(args).train()
    skipped = "an evaluation is skipped: an episode has not ended after 50 steps; set a limit, such as env.kwargs"
    assert any(skipped in event for event in read_events(tmp_path / "run"))
    assert "eval/average_return" not in read_metrics(tmp_path / "run")[-1]
    assert (tmp_path / "run" / "policy" / "agent.safetensors").exists()
    assert main(["play", str(tmp_path / "run")]) == 1
    assert "an episode has not ended after 50 steps" in capsys.readouterr().err
    limited = EnvConfig("Endless-v0", kwargs={"max_episode_steps": 20})
    ControlTrainer(control_config(tmp_path / "limited", env=limited)).train()
    assert read_metrics(tmp_path / "limited")[-1]["eval/average_length"] == 20


def test_ctrl_c_ends_an_evaluation_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE", 0.01)
    # Training takes 16 steps per iteration, so that step 40 is one of the evaluation.
    env = EnvConfig("Endless-v0", kwargs={"interrupt": 40})
    evaluation = EpisodesConfig(every=1, episodes=1)
    trainer = ControlTrainer(control_config(tmp_path / "run", env=env, eval=evaluation))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1]
    assert any("a signal came before its episodes had ended" in event for event in read_events(tmp_path / "run"))


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(AgentConfig(hidden=[8, 8]), id="mlp"),
        pytest.param(AgentConfig("transformer", [8, 8], heads=2, context=3), id="transformer", marks=pytest.mark.proof),
    ],
)
def test_a_saved_agent_plays_as_it_did(agent, tmp_path, capsys):
    args = control_config(
        tmp_path / "run",
        env=EnvConfig("Pendulum-v1", normalize_observations=True, normalize_rewards=True),
        agent=agent,
    )
    trainer = ControlTrainer(args)
    trainer.train()
    agent, envs = load_agent(tmp_path / "run" / "policy", args)
    observations = torch.randn(5, *envs.single_observation_space.shape)
    assert torch.equal(agent.outputs(observations), trainer.agent.outputs(observations))
    for name, seen in statistics(trainer.envs).items():
        assert statistics(envs)[name].var.tolist() == seen.var.tolist()
    settings = EpisodesConfig(episodes=3, greedy=True)
    expected = trainer.player.measure(settings, seed=5)
    capsys.readouterr()
    assert main(["play", str(tmp_path / "run"), "--episodes", "3", "--seed", "5"]) == 0
    assert f"return {expected['eval/average_return']:.1f} ±" in capsys.readouterr().out


def test_episodes_are_filmed(tmp_path, capsys):
    pytest.importorskip("moviepy")
    args = control_config(tmp_path / "run", 1, eval=EpisodesConfig(episodes=1, videos=1, every=1))
    ControlTrainer(args).train()
    films = sorted(path.name for path in (tmp_path / "run" / "videos").glob("*.mp4"))
    assert films == ["iteration-1-episode-0.mp4"]
    assert main(["play", str(tmp_path / "run"), "--episodes", "1", "--videos", "1"]) == 0
    film = tmp_path / "run" / "videos" / "play-1-episode-0.mp4"
    assert film.stat().st_size > 1000
    assert film.read_bytes()[4:8] == b"ftyp"


class Undrawn(gym.Env):
    """Takes a render mode, and has no `render`."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return 0, {}


gym.register("Undrawn-v0", Undrawn, disable_env_checker=True)


@pytest.mark.filterwarnings("ignore:.*possible render_modes")
@pytest.mark.parametrize(("key", "arguments"), [("eval.videos", ()), ("--videos", ("--videos",))])
def test_an_environment_without_pictures_is_refused_with_what_to_do(key, arguments, tmp_path):
    pytest.importorskip("moviepy")
    with pytest.raises(ConfigError, match=f"{key}: Undrawn-v0 draws no pictures in the mode rgb_array; give it render"):
        check_videos(control_config(tmp_path / "run", env=EnvConfig("Undrawn-v0")), *arguments)


def test_what_cannot_be_filmed_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.videos: Memory-v0 could not be drawn"):
        ControlTrainer(control_config(tmp_path / "run", env=EnvConfig("Memory-v0"), eval=EpisodesConfig(videos=1)))


def test_evaluation_during_training_changes_no_training(tmp_path):
    runs = []
    for every in (0, 1):
        env = EnvConfig("Pendulum-v1", normalize_observations=True, normalize_rewards=True)
        run = quiet_agent(tmp_path / str(every), 2)
        settings = EpisodesConfig(every, episodes=3, greedy=False, homework_tags=every == 1)
        trainer = ControlTrainer(control_config(tmp_path, env=env, eval=settings, run=run))
        trainer.train()
        rows = read_metrics(tmp_path / str(every))
        assert ["eval/average_return" in row for row in rows] == [every == 1, True]
        if every:  # as its readers pair them
            tags = ("Train_EnvstepsSoFar", "Eval_AverageReturn")
            pairs = [[row[tag] for tag in tags] for row in rows]
            assert pairs == [[row["total_steps"], row["eval/average_return"]] for row in rows]
        runs.append(
            (drop_keys(rows, *TIMES, "eval/", *HOMEWORK_TAGS), [p.tolist() for p in trainer.agent.parameters()])
        )
    assert runs[0] == runs[1]


def test_a_folder_without_an_agent_is_refused(tmp_path, capsys):
    assert main(["play", str(tmp_path)]) == 2
    assert "is not a run's folder: it has no config.yaml" in capsys.readouterr().err
    args = control_config(tmp_path / "run")
    ControlTrainer(args).train()
    (tmp_path / "run" / "policy" / "agent.safetensors").write_bytes(b"no weights")
    assert main(["play", str(tmp_path / "run")]) == 2
    assert "cannot load an agent from" in capsys.readouterr().err


def test_an_agent_of_another_shape_is_refused(tmp_path):
    args = control_config(tmp_path / "run")
    ControlTrainer(args).train()
    args.agent, args.env.processes, before = AgentConfig(hidden=[8]), True, active_children()
    with pytest.raises(ConfigError, match=r"safetensors holds another agent than the configuration describes") as error:
        load_agent(tmp_path / "run" / "policy", args)
    assert active_children() == before, f"left by: {error.value}"
