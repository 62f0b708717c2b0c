"""The audit of agents: against a grid whose values are known exactly, and in real environments."""

import json
import math
import random
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.configs import quiet_agent
from helpers.files import TIMES, drop_keys, read_metrics
from helpers.proofs import proofs
from tokencredit.audit.fresh_randomness import NotReplayed, generators, redraw
from tokencredit.audit.truth import generator
from tokencredit.cli import main
from tokencredit.control.agent import Agent
from tokencredit.control.agent_rollout import Collector
from tokencredit.control.audit.agent_auditor import AgentAuditor, PairedReturns, starts
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.vector_environments import make_envs
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.control import (
    AgentAdvantageConfig,
    AgentAuditConfig,
    AgentConfig,
    AgentCriticConfig,
    ControlConfig,
    EnvConfig,
    EpisodesConfig,
)
from tokencredit.tools.audit_run import audit_agent

SIDE, SLIP, GOAL, PIT, GAMMA = 3, 0.2, 8, 5, 0.9
STARTS, MOVES = (0, 1, 3, 6), ((-1, 0), (1, 0), (0, -1), (0, 1))
WITHOUT_CRITIC = {
    "critic": AgentCriticConfig(kind="none"),
    "advantage": AgentAdvantageConfig("reward_to_go", gamma=0.9),
}
CELLS = np.eye(SIDE * SIDE, dtype=np.float32)


def moved(cell, action):
    row, column = ((x + d) % SIDE for x, d in zip(divmod(cell, SIDE), MOVES[action], strict=True))
    return row * SIDE + column


def paid(cell):
    return {GOAL: 1.0, PIT: -1.0}.get(cell, 0.0) - 0.1


class Grid(gym.Env):
    """Nine cells, without edges: a move costs 0.1, the goal pays 1, the pit −1, both end the episode; some moves slip.

    Observations are one-hot.
    """

    observation_space = spaces.Box(0, 1, (SIDE * SIDE,), np.float32)
    action_space = spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = int(self.np_random.choice(STARTS))
        return self.observe(), {}

    def observe(self):
        return CELLS[self.cell]

    def step(self, action):
        if self.np_random.random() < SLIP:
            action = self.np_random.integers(len(MOVES))
        self.cell = moved(self.cell, int(action))
        return self.observe(), paid(self.cell), self.cell in (GOAL, PIT), False, {}


gym.register("Grid-v0", Grid, disable_env_checker=True)


def agent_of(args):
    """An agent with random weights that are not all alike, and its environments."""
    torch.manual_seed(3)
    envs = make_envs(args.env, 1, args.advantage.gamma, stack=args.agent.observations())
    agent = Agent(envs.single_observation_space, envs.single_action_space, args.agent, args.critic.kind)
    with torch.no_grad():
        agent.actor_head.weight.normal_(std=0.5)
        agent.actor_head.bias.copy_(torch.linspace(0, 1.5, len(agent.actor_head.bias)))  # so that episodes end soon
    return agent, envs


def config(env="Grid-v0", gamma=GAMMA, **changes):
    environment = env if isinstance(env, EnvConfig) else EnvConfig(env)
    groups = {"env": environment, "advantage": AgentAdvantageConfig(gamma=gamma), "agent": AgentConfig(hidden=[8])}
    return ControlConfig(**(groups | changes))


def small(folder, **changes):
    groups = {"steps": 32, "eval": EpisodesConfig(episodes=0), "run": quiet_agent(folder, 2)}
    return config(**(groups | changes))


@torch.no_grad()
def exact(agent):
    """V and Q of the grid's cells under the agent, by the Bellman equation."""
    policy = agent.outputs(torch.eye(SIDE * SIDE)).softmax(-1).double()
    cells = range(SIDE * SIDE)
    transitions = torch.zeros(SIDE * SIDE, len(MOVES), SIDE * SIDE, dtype=torch.float64)
    for cell in cells:
        for action in range(len(MOVES)):
            transitions[cell, action, moved(cell, action)] += 1 - SLIP
            for slip in range(len(MOVES)):
                transitions[cell, action, moved(cell, slip)] += SLIP / len(MOVES)
    rewards = transitions @ torch.tensor([paid(cell) for cell in cells], dtype=torch.float64)
    goes_on = torch.tensor([cell not in (GOAL, PIT) for cell in cells])
    step = (policy.unsqueeze(-1) * transitions).sum(1) * goes_on
    values = torch.linalg.solve(torch.eye(SIDE * SIDE, dtype=torch.float64) - GAMMA * step, (policy * rewards).sum(1))
    return values, rewards + GAMMA * transitions @ (values * goes_on)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [6, *proofs(25)])
def test_grid_audits_agree_with_exact_values_within_standard_errors(seeds, covered):
    """Over many seeds; with 40 continuations ±1.96 standard errors cover about 93 %."""
    args = config()
    agent, envs = agent_of(args)
    values, actions = exact(agent)
    errors = {"values": [], "advantages": []}
    settings = AgentAuditConfig(episodes=2, continuations=40, states=2)
    auditor = AgentAuditor(args, agent, envs)
    with auditor._replays() as replays:
        for seed in range(seeds):
            random = generator(seed, 0)
            episodes = auditor.episodes(replays, settings.episodes, random)
            measured = PairedReturns(auditor.rollout(replays, episodes, random), choices=True)
            auditor.play(replays, measured, starts(episodes, settings, random, None))
            truth = measured.truth()
            for row, episode in enumerate(episodes):
                cells = torch.from_numpy(np.stack(episode.observations)).argmax(-1)
                for at in truth.values[row].isfinite().nonzero()[:, 0].tolist():
                    value, action = values[cells[at]], actions[cells[at], int(episode.actions[at])]
                    errors["values"].append((truth.values[row, at] - value) / truth.value_errors[row, at])
                    error = truth.advantages[row, at] - (action - value)
                    errors["advantages"].append(error / truth.advantage_errors[row, at])
    for found in errors.values():
        covered(found, share=0.93)


class Drift(gym.Env):
    """Observes [steps, x]: a step adds noise and the action to x, which is the reward; ends after 6 steps, or at 3."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, source="np_random", by="termination", steps=6):
        self.source, self.by, self.steps = source, by, steps
        self.own = random.Random() if source == "unseeded" else random.Random(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None and self.source not in ("unseeded", "once"):
            self.own = {
                "Random": random.Random,
                "RandomState": np.random.RandomState,
                "torch": lambda x: torch.Generator().manual_seed(x),
            }.get(self.source, random.Random)(seed)
        self.count, self.x = 0, 0.0
        return self.observe(), {}

    def observe(self):
        return np.array([self.count, self.x])

    def draw(self):
        if self.source == "global":
            return np.random.random()
        if self.source == "torch":
            return float(torch.rand((), generator=self.own))
        return (self.np_random if self.source == "np_random" else self.own).random()

    def step(self, action):
        self.count, self.x = self.count + 1, self.x + float(action) + self.draw()
        over = self.count == self.steps
        ended, cut = over and self.by == "termination", over and self.by == "truncation"
        return self.observe(), self.x, bool(ended or self.x > 100), cut, {}


class Shaken(gym.ActionWrapper):
    """A wrapper with randomness of its own, behind a closure."""

    def __init__(self, env):
        super().__init__(env)
        generator = np.random.Generator(np.random.MT19937(3))
        self.shake = lambda: generator.random()
        self.set = lambda seed: setattr(generator.bit_generator, "state", np.random.MT19937(seed).state)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.set(seed)
        return super().reset(seed=seed, options=options)

    def action(self, action):
        return action if self.shake() < 0.5 else 1 - action


def shaken(**kwargs):
    return Shaken(Drift(**kwargs))


gym.register("Drift-v0", Drift, disable_env_checker=True)
gym.register("Shaken-v0", shaken, disable_env_checker=True)
gym.register("Cut-v0", Drift, max_episode_steps=4, disable_env_checker=True)


def replays_of(args):
    agent, envs = agent_of(args)
    auditor = AgentAuditor(args, agent, envs)
    return auditor, auditor._replays()


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        EnvConfig("Drift-v0"),
        EnvConfig("Drift-v0", kwargs={"source": "Random"}),
        EnvConfig("Drift-v0", kwargs={"source": "RandomState"}),
        EnvConfig("Drift-v0", kwargs={"source": "torch"}),
        EnvConfig("Shaken-v0", kwargs={"source": "Random"}),
        EnvConfig("CartPole-v1"),
        EnvConfig("FrozenLake-v1"),
        EnvConfig("Acrobot-v1", kwargs={"max_episode_steps": 30}),
        EnvConfig("Pendulum-v1", kwargs={"max_episode_steps": 30}),
        *proofs(EnvConfig("HalfCheetah-v5", kwargs={"max_episode_steps": 30})),
    ],
    ids=lambda env: "-".join([env.id, *map(str, env.kwargs.values())]),
)
def test_replays_are_exact_and_continuations_are_random(env):
    """A copy with the same generators takes the same course; one with new ones does not, where there is chance."""
    if "Cheetah" in env.id:
        pytest.importorskip("mujoco")
    auditor, opened = replays_of(config(env))
    with opened as replays:
        (episode,) = auditor.episodes(replays, 1, generator(0, 1))
        assert len(episode.observations) == len(episode.rewards) + 1 == len(episode.actions) + 1
        copy, other = replays.envs[3:5]
        replays.follow(copy, episode, len(episode.rewards))
        middle = len(episode.rewards) // 2
        for each in (copy, other):
            replays.follow(each, episode, middle)
        redraw(other, 5)
        rewards = [[float(each.step(action)[1]) for action in episode.env_actions[middle:]] for each in (copy, other)]
    assert rewards[0] == episode.rewards[middle:]
    if "Drift" in env.id or "Shaken" in env.id:
        assert all(one != two for one, two in zip(*rewards, strict=True)), "nothing of it is drawn again"


def test_generators_are_found_wherever_they_are():
    class Holder:
        pass

    holder = Holder()
    holder.deep = {"a": [{"b": (np.random.default_rng(0),)}], "partial": random.Random(1)}
    hidden = np.random.RandomState(2)
    holder.closure = lambda: hidden.random()
    holder.torch, holder.itself, holder.module = torch.Generator(), holder, np.random
    kinds = {np.random.Generator, random.Random, np.random.RandomState, torch.Generator}
    assert {type(x) for x in generators(holder)} == kinds
    assert len(generators(holder)) == 4, "no module's"


@pytest.mark.parametrize("source", ["unseeded", "global"])
def test_an_environment_that_no_seed_determines_is_refused_before_training(source, tmp_path):
    environment = EnvConfig("Drift-v0", kwargs={"source": source})
    args = small(tmp_path / "run", env=environment, audit=AgentAuditConfig(every=1))
    with pytest.raises(ConfigError, match=r"audit\.every is 1, and env\.id Drift-v0 cannot be audited: replayed"):
        ControlTrainer(args)
    agent, envs = agent_of(args)
    with pytest.raises(NotReplayed, match=r"that differs from the episode's"):
        AgentAuditor(replace(args, audit=AgentAuditConfig()), agent, envs).audit(1, AgentAuditConfig())


class Longer(Drift):
    """Ends later in each further episode, whatever the seed."""

    def reset(self, *, seed=None, options=None):
        self.steps += 1
        return super().reset(seed=seed, options=options)


gym.register("Longer-v0", Longer, disable_env_checker=True)


@pytest.mark.parametrize("env", [EnvConfig("Drift-v0", kwargs={"source": "once"}), EnvConfig("Longer-v0")])
def test_an_environment_that_later_cannot_be_replayed_skips_the_audit(env, tmp_path):
    """Fresh copies are alike, later ones are not; a long training is not given up for an audit."""
    folder = tmp_path / "run"
    ControlTrainer(small(folder, env=env, audit=AgentAuditConfig(every=2, episodes=40))).train()
    assert "audit/" not in (folder / "metrics.jsonl").read_text()
    assert f"an audit is skipped: env.id {env.id} cannot be audited" in (folder / "events.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Pendulum-v1", *proofs("CartPole-v1", "FrozenLake-v1")])
@pytest.mark.parametrize("agent", [AgentConfig(hidden=[8]), AgentConfig("transformer", [8], heads=2, context=3)])
def test_an_agent_sees_in_an_audit_what_it_sees_in_training(env, agent):
    """The same observations, and the same rewards, as the wrappers of the vector environment give, held still."""
    normalise = {} if env == "FrozenLake-v1" else {"normalize_observations": True, "normalize_rewards": True}
    args = config(EnvConfig(env, number=1, clip=2.0 if normalise else 10.0, **normalise), agent=agent)
    torch.manual_seed(0)
    envs = make_envs(args.env, 1, GAMMA, stack=agent.observations())
    policy = Agent(envs.single_observation_space, envs.single_action_space, agent)
    Collector(envs, policy, seed=1).collect(150)  # statistics stand somewhere
    auditor = AgentAuditor(args, policy, envs)
    with auditor._replays() as replays:
        (episode,) = auditor.episodes(replays, 1, generator(0, 1))
        seen, paid_ = replays.normalized(episode.observations), auditor._scaled(episode)
    layer = envs
    while layer is not None:  # the training's own wrappers, no longer learning
        if hasattr(layer, "update_running_mean"):
            layer.update_running_mean = False
        if hasattr(layer, "return_rms"):
            layer.return_rms.update = lambda _: None
        layer = getattr(layer, "env", None)
    observation, _ = envs.reset(seed=episode.seed)
    torch.testing.assert_close(torch.from_numpy(observation[0]), seen[0], rtol=1e-6, atol=1e-7)
    for step, action in enumerate(episode.env_actions):
        observation, reward, *_ = envs.step(np.asarray([action]))
        torch.testing.assert_close(torch.from_numpy(observation[0]), seen[step + 1], rtol=1e-6, atol=1e-7)
        assert reward[0] == pytest.approx(paid_[step], rel=1e-6)


def test_continuations_go_on_past_a_time_limit_until_what_is_left_weighs_little():
    """γ = 0.5: 5 steps leave 3 %; an episode cut at 4 goes on to there, and one that cuts itself does not."""
    for env in ("Cut-v0", "Drift-v0"):
        args = config(EnvConfig(env, kwargs={"by": "truncation", "steps": 6 if env == "Drift-v0" else 50}), gamma=0.5)
        auditor, opened = replays_of(args)
        assert auditor._min_steps() == 5
        with opened as replays:
            episodes = auditor.episodes(replays, 3, generator(0, 1))
            begin = list(starts(episodes, AgentAuditConfig(states=None, continuations=2), generator(0, 2), None))
            played = list(replays.play(iter(begin), auditor._min_steps()))
            lengths = {start.at: len(x.rewards) for start, x in played}
        steps = {len(x.rewards) for x in episodes}
        if env == "Cut-v0":
            assert steps == {4}
            assert set(lengths.values()) == {5}
        else:
            assert (steps, lengths) == ({6}, {at: 6 - at for at in range(6)})


@pytest.mark.parametrize(("limit", "limited"), [(None, 20 / 500), (20, 1), (-1, 0)])
def test_steps_past_a_time_limit_cost_only_episodes_that_reach_it(limit, limited):
    """Episodes of 20 steps, at a second per step; γ = 0.99 leaves 5 % after 299 steps."""
    args = config(EnvConfig("CartPole-v1", kwargs={"max_episode_steps": limit} if limit else {}), 0.99)
    auditor = AgentAuditor(args, *agent_of(args))
    seconds = auditor.cost([{"seconds/rollout": 8.0, "steps": 8, "train/average_length": 20.0}])
    assert seconds == pytest.approx(2 * 20 + 2 * 4 * 4 * (20 + limited * (299 - 10)))


def test_a_truncated_return_bootstraps_from_the_critic():
    args = config(EnvConfig("Drift-v0", kwargs={"by": "truncation", "steps": 3}), gamma=0.9)
    auditor, opened = replays_of(args)
    with opened as replays:
        (episode,) = auditor.episodes(replays, 1, generator(0, 1))
        total, weight = auditor._return(replays, episode)
        last = float(auditor.agent.values(replays.normalized(episode.observations[-1:])).detach())
    assert weight == pytest.approx(0.9**3)
    rewards = episode.rewards
    assert total == pytest.approx(rewards[0] + 0.9 * rewards[1] + 0.81 * rewards[2] + 0.729 * last)
    auditor, opened = replays_of(replace(args, **WITHOUT_CRITIC))
    with opened as replays:
        (episode,) = auditor.episodes(replays, 1, generator(0, 1))
        assert auditor._return(replays, episode)[1] == 0.0, "without a critic a cut is an end, as in training"
    limits_end = replace(args, advantage=AgentAdvantageConfig(gamma=0.9, bootstrap=False), whole_episodes=True, steps=2)
    auditor, opened = replays_of(limits_end)
    assert auditor._min_steps() == 0
    with opened as replays:
        (episode,) = auditor.episodes(replays, 1, generator(0, 1))
        assert auditor._return(replays, episode)[1] == 0.0, "a limit is an end, as in training"
        rollout = auditor.rollout(replays, [episode], generator(0, 2))
    assert rollout.terminated.tolist() == [[False, False, True]]
    assert not rollout.truncated.any(), "whole episodes are not cut"


def test_estimators_bootstrap_where_rollouts_of_the_run_end():
    """Episodes of 6 steps in rollouts of 4: the run's own λ-returns end at a cut, and bootstrap there."""
    args = config("Drift-v0", steps=4)
    auditor, opened = replays_of(args)
    with opened as replays:
        episodes = auditor.episodes(replays, 30, generator(0, 1))
        rollout = auditor.rollout(replays, episodes, generator(0, 2))
    assert rollout.terminated.nonzero()[:, 1].tolist() == [5] * 30
    cuts = {tuple(row.nonzero()[:, 0].tolist()) for row in rollout.truncated}
    assert cuts == {(0, 4), (1,), (2,), (3,)}
    estimates = dict(auditor.estimates(rollout))
    assert next(iter(estimates)) == "gae, λ = 0.95"
    for row, cut in enumerate(rollout.truncated):
        at = int(cut.nonzero()[0])
        td = rollout.rewards[row, at] + GAMMA * rollout.bootstrap[row, at] - rollout.values[row, at]
        for label in ("gae, λ = 0.95", "monte_carlo (gae, λ = 1)", "td (gae, λ = 0)"):
            assert float(estimates[label][row, at]) == pytest.approx(float(td), abs=1e-5)
        assert float(estimates["reward_to_go"][row, at]) == pytest.approx(float(rollout.rewards[row, at]), abs=1e-5)


NORMAL = {"normalize_observations": True, "normalize_rewards": True}
RUNS = {
    "discrete": {"env": EnvConfig("CartPole-v1", **NORMAL)},
    "continuous": {"env": EnvConfig("Pendulum-v1", kwargs={"max_episode_steps": 40}, **NORMAL)},
    "none": {"env": "CartPole-v1", **WITHOUT_CRITIC},
    "global": {"env": EnvConfig("Drift-v0", kwargs={"source": "Random"})},
}


@pytest.mark.parametrize("kind", ["discrete", "global", *proofs("continuous", "none")])
def test_a_run_with_audits_is_bit_for_bit_the_run_without(kind, tmp_path):
    runs = []
    settings = AgentAuditConfig(every=1, episodes=4, continuations=4, states=2)
    for name, audit in (("without", AgentAuditConfig()), ("with", settings)):
        trainer = ControlTrainer(small(tmp_path / name, **RUNS[kind], audit=audit))
        trainer.train()
        rows = read_metrics(tmp_path / name)
        assert ["seconds/audit" in row for row in rows] == [name == "with"] * 2
        runs.append((drop_keys(rows, *TIMES, "audit/"), [p.tolist() for p in trainer.agent.parameters()]))
    assert runs[0] == runs[1]
    written = json.loads((tmp_path / "with" / "audit.json").read_text())
    assert written["iteration"] == 2
    assert written["settings"] == {"episodes": 4, "continuations": 4, "states": 2}
    assert written["continuations"] == 4
    assert 0 <= written["bootstrapped"] < 1
    assert (written["critic"] is None) == (kind == "none")
    last = read_metrics(tmp_path / "with")[-1]
    assert {key: x for key, x in last.items() if key.startswith("audit/")} == written["metrics"]
    again = audit_agent(tmp_path / "with", trainer.args, settings)
    timeless = [{key: x for key, x in audit.items() if key != "seconds"} for audit in (written, again)]
    assert timeless[0] == timeless[1], "the command finds what the run found"
    assert audit_agent(tmp_path / "with", trainer.args, settings, 2)["iteration"] == 2
    with pytest.raises(ConfigError, match=r"has no checkpoint of iteration 1; there are: 2"):
        audit_agent(tmp_path / "with", trainer.args, settings, 1)


def test_the_command_audits_an_agent(tmp_path, capsys):
    run = tmp_path / "run"
    ControlTrainer(small(run)).train()
    before = (run / "metrics.jsonl").read_text()
    options = ["--completions", "3", "--continuations", "4"]
    assert main(["audit", str(run), *options]) == 0
    written = json.loads((run / "audit.json").read_text())
    assert written["settings"] == {"episodes": 3, "continuations": 4, "states": 4}
    out = capsys.readouterr().out
    assert "steps of 3 episodes at iteration 2, 4 continuations per state" in out
    assert "This audit is too small" in out
    assert f"{written['credit']['tokens']} steps of 3 episodes at iteration 2" in (run / "report.html").read_text()
    assert main(["audit", str(run), *options, "--states", "all"]) == 0
    assert json.loads((run / "audit.json").read_text())["settings"]["states"] is None
    assert main(["audit", str(run), "--states", "0"]) == 2
    assert "--states is 0; it must be all" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_time_limit_leaves_fewer_but_whole_pairs(tmp_path):
    args = config()
    settings = AgentAuditConfig(episodes=4, continuations=400, states=None, seconds=1e-6)
    audit = AgentAuditor(args, *agent_of(args)).audit(1, settings)
    assert (audit["continuations"], audit["limits"]) == (4, {"seconds": 1e-6})


class Bad(Drift):
    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, np.nan if self.count == 3 else 0.0, terminated, truncated, info


gym.register("Bad-v0", Bad, disable_env_checker=True)


@pytest.mark.slow
def test_nonfinite_rewards_and_endless_episodes_stop_an_audit(monkeypatch):
    args = config("Bad-v0")
    with pytest.raises(RunStopped, match=r"env\.id Bad-v0 gave a reward that is not finite, in step 3"):
        AgentAuditor(args, *agent_of(args)).audit(1, AgentAuditConfig())
    monkeypatch.setattr("tokencredit.control.environment_wrappers.MAX_REPLAY_STEPS", 20)
    args = config(EnvConfig("Drift-v0", kwargs={"steps": 50}))
    with pytest.raises(RunStopped, match=r"has not ended after 20 steps; .*; an audit needs episodes that end$"):
        AgentAuditor(args, *agent_of(args)).audit(1, AgentAuditConfig())
    args = config(EnvConfig("Drift-v0", kwargs={"steps": 50, "max_episode_steps": 10}), gamma=0.5)
    assert AgentAuditor(args, *agent_of(args)).audit(1, AgentAuditConfig(continuations=2))["credit"]["tokens"] > 0


def test_an_action_that_is_certain_has_no_advantage():
    """p q + (1 − p) v and (1 − p) (q − v), with p = 1."""
    args = config()
    agent, envs = agent_of(args)
    with torch.no_grad():
        agent.actor_head.weight.zero_()
        agent.actor_head.bias.copy_(torch.tensor([0.0, 60.0, 0.0, 0.0]))
    auditor = AgentAuditor(args, agent, envs)
    with auditor._replays() as replays:
        random_ = generator(0, 1)
        episodes = auditor.episodes(replays, 3, random_)
        assert all(int(action) == 1 for episode in episodes for action in episode.actions)
        measured = PairedReturns(auditor.rollout(replays, episodes, random_), choices=True)
        played = []
        for start, trajectory in replays.play(starts(episodes, AgentAuditConfig(states=1), random_, None)):
            played.append((start.keeps_action, int(trajectory.actions[0])))
            measured.add(start, *auditor._return(replays, trajectory))
    assert {own for own, action in played if action == 1} == {True}
    assert {action for own, action in played if not own} == {0, 2, 3}, "another action is drawn"
    truth = measured.truth()
    known = truth.values.isfinite()
    assert truth.advantages[known].abs().max() < 1e-20
    assert math.isclose(float(truth.advantage_errors[known].max()), 0, abs_tol=1e-20)
