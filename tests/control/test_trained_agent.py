"""A trained agent from Python acts as `tokencredit play` does."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import tokencredit as tc
from helpers.configs import control_config, quiet_agent
from helpers.proofs import proofs
from tokencredit.control.agent_evaluation import Player, load_agent
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.vector_environments import scaled_rewards
from tokencredit.errors import ConfigError
from tokencredit.settings.control import AgentAdvantageConfig, AgentConfig, EnvConfig, EpisodesConfig


class Parts(gym.Env):
    """Observations with named parts of other scales, the second of which says which action is rewarded."""

    observation_space = spaces.Dict({"far": spaces.Box(-1e3, 1e3, (2, 2)), "which": spaces.Discrete(3)})
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def look(self):
        self.which = int(self.np_random.integers(3))
        far = self.np_random.normal(100.0 * self.which, 30.0, (2, 2)).astype(np.float32)
        return {"far": far, "which": self.which}

    def step(self, action):
        self.count += 1
        reward = float(action[0] == self.which) + 0.1 * float(action[1])
        return self.look(), reward, self.count == 20, False, {}


gym.register("Parts-v0", Parts)
TRANSFORMER = AgentConfig(policy="transformer", hidden=[16], context=4)
CASES = {
    "discrete": (EnvConfig("CartPole-v1", number=2), AgentConfig()),
    "continuous and normalised": (EnvConfig("Pendulum-v1", number=2, normalize_observations=True), AgentConfig()),
    "parts": (EnvConfig("Parts-v0", number=2, normalize_observations=True), AgentConfig()),
    "parts, of several steps": (EnvConfig("Parts-v0", number=2, normalize_observations=True), TRANSFORMER),
    "of several steps": (EnvConfig("CartPole-v1", number=2), TRANSFORMER),
}


DAILY = ("continuous and normalised", "parts, of several steps")


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("case", [*DAILY, *proofs(*(case for case in CASES if case not in DAILY))])
def test_its_episodes_are_those_of_play(case, greedy, tmp_path):
    env, agent = CASES[case]
    args = control_config(
        tmp_path, env=env, agent=agent, steps=64, eval=EpisodesConfig(episodes=0), run=quiet_agent(tmp_path / "run", 1)
    )
    ControlTrainer(args).train()
    made, envs = load_agent(tmp_path / "run" / "policy", args)
    played = Player(args, made, envs).measure(EpisodesConfig(episodes=1, greedy=greedy), seed=5)
    acting, single = tc.load(tmp_path / "run"), gym.make(env.id)
    acting.generator.manual_seed(5)
    for _ in range(2 if greedy else 1):  # again, after a reset
        observation, _ = single.reset(seed=5)
        acting.reset()
        ended, total, length = False, 0.0, 0
        while not ended:
            action = acting.act(observation, greedy=greedy)
            assert single.action_space.contains(action)
            observation, reward, terminated, truncated, _ = single.step(action)
            ended, total, length = terminated or truncated, total + reward, length + 1
        assert length == played["eval/average_length"]
        assert total == pytest.approx(played["eval/average_return"], rel=1e-5)
    again = acting.play(seed=5, greedy=greedy)
    assert len(again.rewards) == len(again.advantages) == len(again.actions) == length
    assert sum(again.rewards) == pytest.approx(total, rel=1e-5)
    assert (
        repr(acting)
        == f"<TrainedAgent {tmp_path / 'run'}: {env.id}, {sum(p.numel() for p in made.parameters()):,} parameters>"
    )
    assert again._repr_html_().count("<svg") == 3
    assert 'aria-label="reward of each step"' in again._repr_html_()
    assert again._repr_html_().count("<img") == len(again.frames)
    assert bool(again.frames) == (env.id != "Parts-v0")  # which draws nothing
    with pytest.raises(ConfigError, match=rf"the observation does not fit {env.id}, which has (Box|Dict)"):
        acting.act(np.zeros(7, np.float32))
    with pytest.raises(ConfigError, match="which is 'best'; the run of an agent has only its 'policy'"):
        tc.load(tmp_path / "run", "best")


@pytest.mark.parametrize(("scaled", "bootstrap"), [(False, True), (True, False)])
def test_the_credit_of_a_played_episode_is_gae_by_hand(scaled, bootstrap, tmp_path):
    args = control_config(
        tmp_path,
        env=EnvConfig("CartPole-v1", number=2, normalize_rewards=scaled, kwargs={"max_episode_steps": 12}),
        steps=32,
        advantage=AgentAdvantageConfig(bootstrap=bootstrap),
        eval=EpisodesConfig(episodes=0),
        run=quiet_agent(tmp_path / "run", 1),
    )
    ControlTrainer(args).train()
    agent = tc.load(tmp_path / "run")
    for seed in range(6):  # some of them fall, some reach the time limit
        episode = agent.play(seed=seed, greedy=False)
        last = torch.tensor(episode.observations[-1])
        state = gym.make("CartPole-v1").unwrapped
        state.reset()
        state.state = last.numpy()
        after, *_ = state.step(episode.actions[-1])
        value = agent.agent.values(torch.tensor(after)).item()
        values = [*episode.values, value if bootstrap and not episode.terminated else 0.0]
        scale = scaled_rewards([1.0], agent.training, args.env.clip).item()
        assert (scale == 1) == (not scaled)
        expected, gamma, lam = 0.0, args.advantage.gamma, args.advantage.lam
        for t in reversed(range(len(episode.rewards))):
            expected = scale + gamma * values[t + 1] - values[t] + gamma * lam * expected
            assert episode.advantages[t] == pytest.approx(expected, abs=1e-4)
