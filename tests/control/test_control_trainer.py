import json
import math
import re
import signal
import sys
from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from safetensors.torch import load_file

from helpers.configs import control_config, quiet_agent
from helpers.files import read_metrics
from helpers.proofs import proofs
from tokencredit.cli import main
from tokencredit.control.agent import Agent
from tokencredit.control.agent_rollout import Collector
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.control.vector_environments import make_envs, statistics
from tokencredit.core.masked import explained_variance
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.report.meanings import meaning
from tokencredit.settings.control import (
    AgentAdvantageConfig,
    AgentConfig,
    AgentCriticConfig,
    AgentRunConfig,
    AgentStopConfig,
    AgentUpdateConfig,
    EnvConfig,
    EpisodesConfig,
)
from tokencredit.settings.training import OptimConfig, RunConfig

small = partial(control_config, iterations=3)


def test_a_run_leaves_its_files(tmp_path):
    summary = ControlTrainer(small(tmp_path / "run")).train()
    folder = tmp_path / "run"
    assert summary["stopped_by"] == "iterations"
    assert json.loads((folder / "summary.json").read_text()) == summary
    metrics = read_metrics(folder)
    # 64 steps per iteration, less those in which a copy was reset.
    assert all(0 < steps <= 64 for steps in np.diff([0, *(m["total_steps"] for m in metrics)]))
    assert "eval/average_return" in metrics[-1]
    assert all(map(meaning, metrics[-1].keys() - {"iteration"})), "each has its sentence on the page"
    assert load_file(folder / "policy" / "agent.safetensors")


@pytest.mark.parametrize(
    ("env", "critic", "algorithm"),
    [
        ("CartPole-v1", "separate", "ppo"),
        ("Pendulum-v1", "shared", "ppo"),
        ("CartPole-v1", "none", "ppo"),
        ("Pendulum-v1", "separate", "policy_gradient"),
        ("CartPole-v1", "shared", "policy_gradient"),
        ("Pendulum-v1", "none", "policy_gradient"),
    ],
)
def test_every_form_trains(env, critic, algorithm, tmp_path):
    estimator = "reward_to_go" if critic == "none" else "gae"
    args = small(
        tmp_path / "run",
        env=EnvConfig(env, normalize_observations=True, normalize_rewards=True),
        agent=AgentConfig(hidden=[8], activation="relu"),
        critic=AgentCriticConfig(kind=critic),
        algorithm=algorithm,
        advantage=AgentAdvantageConfig(estimator=estimator, gamma=0.99),
    )
    trainer = ControlTrainer(args)
    before = {name: x.clone() for name, x in trainer.agent.state_dict().items()}
    trainer.train()
    assert all(not torch.equal(x, before[name]) for name, x in trainer.agent.state_dict().items())
    metrics = read_metrics(tmp_path / "run")
    of_a_critic = {"value_loss", "explained_variance"}
    assert of_a_critic & set(metrics[-1]) == (set() if critic == "none" else of_a_critic)
    if algorithm == "policy_gradient":
        assert metrics[-1]["ratio_max"] == metrics[-1]["ratio_min"] == 1.0


def test_a_policy_gradient_step_is_the_gradient_of_log_probability_times_advantage(tmp_path):
    args = small(
        tmp_path / "run",
        algorithm="policy_gradient",
        agent=AgentConfig(hidden=[8]),
        critic=AgentCriticConfig(kind="none"),
        advantage=AgentAdvantageConfig(estimator="reward_to_go", gamma=0.9, whiten="none"),
        ppo=AgentUpdateConfig(entropy_coef=0.0),
        optim=OptimConfig(lr=0.1, warmup=0, schedule="constant", max_grad_norm=None),
    )
    trainer = ControlTrainer(args)
    rollout = trainer.collector.collect(16)
    advantages, returns = rollout.credit(trainer.args.advantage, trainer.agent)
    logprobs = trainer.agent.distribution.logprobs(trainer.agent.outputs(rollout.observations), rollout.actions)
    loss = -(logprobs * advantages)[rollout.mask].mean()
    expected = torch.autograd.grad(loss, list(trainer.agent.parameters()))
    norm = math.sqrt(sum(g.square().sum() for g in expected))
    metrics = trainer.update(1, rollout.experience(advantages, returns))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # Adam's first step has the size of the learning rate and the sign of the gradient.
    same = {"agent": args.agent, "critic": args.critic, "advantage": args.advantage}
    again = ControlTrainer(small(tmp_path / "other", **same)).agent
    for new, old, gradient in zip(trainer.agent.parameters(), again.parameters(), expected, strict=True):
        large = gradient.abs() > 1e-5
        torch.testing.assert_close((new - old)[large], -0.1 * gradient.sign()[large], atol=1e-3, rtol=0)


@pytest.mark.parametrize("env", ["CartPole-v1", *proofs("HalfCheetah-v5")])
def test_an_update_is_that_of_stable_baselines3(env, tmp_path):
    """From the same weights and the same rollout: the same losses, the same new weights."""
    sb3 = pytest.importorskip("stable_baselines3")
    if "Cheetah" in env:
        pytest.importorskip("mujoco")
    epochs, steps = 3, 64
    args = small(
        tmp_path / "run",
        env=EnvConfig(env, number=1),
        steps=steps,
        advantage=AgentAdvantageConfig(gamma=0.99, lam=0.95, whiten="none"),
        critic=AgentCriticConfig(lr=1e-3, coef=1.0, clip=None),
        ppo=AgentUpdateConfig(epochs=epochs, minibatches=1, entropy_coef=0.01),
        optim=OptimConfig(lr=1e-3, eps=1e-5, schedule="constant", warmup=0, max_grad_norm=0.5),
    )
    trainer = ControlTrainer(args)
    theirs = sb3.PPO(
        "MlpPolicy",
        gym.make(env),
        learning_rate=1e-3,
        n_steps=steps,
        batch_size=steps,
        n_epochs=epochs,
        gamma=0.99,
        gae_lambda=0.95,
        ent_coef=0.01,
        vf_coef=0.5,  # on the squared error; ours halves it
        max_grad_norm=0.5,
        normalize_advantage=False,
        device="cpu",
    )
    pairs = [
        *zip(trainer.agent.actor_body.layers, theirs.policy.mlp_extractor.policy_net[::2], strict=True),
        *zip(trainer.agent.critic_body.layers, theirs.policy.mlp_extractor.value_net[::2], strict=True),
        (trainer.agent.actor_head, theirs.policy.action_net),
        (trainer.agent.critic_head, theirs.policy.value_net),
    ]
    for ours, other in pairs:
        other.load_state_dict(ours.state_dict())

    rollout = trainer.collector.collect(steps)
    acted = rollout.mask[0]
    advantages, returns = rollout.credit(trainer.args.advantage, trainer.agent)
    buffer = theirs.rollout_buffer
    buffer.buffer_size = int(acted.sum())  # the steps that reset are none of theirs
    buffer.reset()
    for name in ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns"):
        source = {"log_probs": rollout.logprobs, "advantages": advantages, "returns": returns}.get(name)
        source = getattr(rollout, name) if source is None else source
        target = getattr(buffer, name)
        target[:] = source[0][acted].numpy().reshape(target.shape)
    buffer.full = True
    theirs.batch_size = buffer.buffer_size
    theirs.set_logger(sb3.common.logger.configure(None, []))
    theirs.train()
    metrics = trainer.update(1, rollout.experience(advantages, returns))

    said = theirs.logger.name_to_value
    assert metrics["policy_loss"] == pytest.approx(said["train/policy_gradient_loss"], abs=1e-5)
    assert 2 * metrics["value_loss"] == pytest.approx(said["train/value_loss"], rel=1e-5)
    assert metrics["entropy_in_update"] == pytest.approx(-said["train/entropy_loss"], abs=1e-5)
    assert metrics["approx_kl_k3"] > 0
    for ours, other in pairs:
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_observations_are_normalised_with_what_training_saw(tmp_path):
    trainer = ControlTrainer(small(tmp_path / "run", env=EnvConfig("Pendulum-v1", normalize_observations=True)))
    trainer.train()
    seen = statistics(trainer.envs)["observations"]
    saved = load_file(tmp_path / "run" / "policy" / "agent.safetensors")
    assert saved["observations.mean"].tolist() == pytest.approx(seen.mean.tolist())
    count = seen.count
    assert count > 3 * 64
    trainer.evaluate(1)
    assert statistics(trainer.envs)["observations"].count == count, "evaluation changes nothing"


def test_more_copies_are_stepped_in_processes(tmp_path):
    trainer = ControlTrainer(small(tmp_path / "run", env=EnvConfig("CartPole-v1", number=2, processes=True)))
    rollout = trainer.collector.collect(16)
    trainer.envs.close()
    alone = Collector(make_envs(EnvConfig("CartPole-v1", number=2), 2, 0.99), trainer.agent, seed=1).collect(16)
    assert torch.equal(rollout.observations, alone.observations)


def test_estimators_that_compare_scores_of_texts_are_not_for_agents():
    with pytest.raises(
        ConfigError, match=r"estimator is 'group_relative'; it must be one of gae, td, .*, reward_to_go or your own"
    ):
        AgentAdvantageConfig(estimator="group_relative")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo": AgentUpdateConfig(minibatches=65)}, r"ppo\.minibatches is 65, .* at most env\.number × steps, 64"),
        (
            {"ppo": AgentUpdateConfig(minibatches=33)},
            r"^ppo\.minibatches is 33, and advantage\.whiten is minibatch; .* at most 32, .* advantage\.whiten: batch$",
        ),
        ({"critic": AgentCriticConfig(kind="none")}, r"advantage\.estimator is gae, which needs a critic"),
        ({"run": RunConfig()}, r"^run is RunConfig\(.*; it must be an AgentRunConfig$"),
        (
            {"agent": AgentConfig("transformer", [64, 32])},
            r"agent\.hidden is .* agent\.heads is 4; .* a multiple of its heads",
        ),
        ({"agent": AgentConfig(hidden=[8, 0])}, r"^agent\.hidden is \[8, 0\]; each width must be at least 1$"),
    ],
)
def test_what_cannot_work_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        small(tmp_path, **changes)


@pytest.mark.parametrize("spoiled", ["reward", "gradient"])
def test_a_batch_that_is_not_finite_is_skipped_and_kept(spoiled, tmp_path):
    args = small(tmp_path / "run", run=AgentRunConfig(dir=str(tmp_path / "run"), iterations=3, trackers=[]))
    trainer = ControlTrainer(args)
    seen = []

    def spoil(gradient):
        seen.append(1)
        return gradient * math.nan if len(seen) == 3 else gradient

    if spoiled == "gradient":
        trainer.agent.critic_head.weight.register_hook(spoil)
    else:
        step = trainer.envs.step

        def odd(actions):
            observation, reward, *rest = step(actions)
            seen.append(1)
            return observation, reward * (math.nan if len(seen) == args.steps + 2 else 1.0), *rest

        trainer.envs.step = odd
    before = [p.detach().clone() for p in trainer.agent.parameters()]
    trainer.train()
    rows = read_metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert all(row["episodes"] for row in rows), "they count without an update"
    assert [row["bad_steps"] for row in rows] == ([1, 0, 0] if spoiled == "gradient" else [0, 1, 0])
    (kept,) = (tmp_path / "run" / "bad_steps").iterdir()
    reason = json.loads((kept / "about.json").read_text())["reason"]
    assert spoiled in reason
    assert load_file(kept / "batch.safetensors")["observations"].numel()
    assert all(bool(p.isfinite().all()) for p in trainer.agent.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(trainer.agent.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("env", "observation", "action"),
    [("CartPole-v1", "of length 4", "one of 2"), ("Pendulum-v1", "of length 3", "of length 1")],
)
def test_the_overview_has_environment_shapes_and_folder(env, observation, action, tmp_path):
    args = small(tmp_path / "run", env=EnvConfig(id=env, number=2), agent=AgentConfig(policy="transformer", context=3))
    trainer = ControlTrainer(args)
    told = dict(trainer.overview())
    assert (told["environment"], told["observation"], told["action"]) == (f"{env}, 2 copies", observation, action)
    assert told["agent"] == f"transformer, {sum(p.numel() for p in trainer.agent.parameters()):,} parameters"
    assert told["run"] == f"{tmp_path / 'run'}, 3 iterations of 32 steps"
    assert list(told) == ["environment", "observation", "action", "agent", "device", "run"]


@pytest.mark.proof  # learn/test_learner.py
def test_steps_of_the_critic_alone_fit_the_returns_and_leave_the_actor_bit_for_bit(tmp_path):
    """A policy gradient of one step, then many of its baseline on the same batch."""
    agents, fits = [], []
    for steps in ({"epochs": 0}, {"epochs": 500, "lr": 1e-2, "clip": None}):
        epochs, critic = steps["epochs"], AgentCriticConfig(coef=0.0, **steps)
        changes = {"env": EnvConfig(normalize_observations=True), "optim": OptimConfig(warmup=0)}
        args = small(tmp_path / str(epochs), algorithm="policy_gradient", critic=critic, **changes)
        trainer = ControlTrainer(args)
        rollout = trainer.collector.collect(16)
        advantages, returns = rollout.credit(trainer.args.advantage, trainer.agent)
        metrics = trainer.update(1, rollout.experience(advantages, returns))
        assert metrics["steps"] == 1
        assert metrics.get("critic_steps", 0) == epochs
        agents.append(trainer.agent.actor_parts().state_dict())
        with torch.no_grad():
            fits.append(explained_variance(trainer.agent.values(rollout.observations), returns, rollout.mask).item())
    assert all(torch.equal(x, agents[1][name]) for name, x in agents[0].items())
    assert fits[0] < 0.3 < 0.95 < fits[1]


def test_a_critic_without_weight_in_the_loss_learns_in_its_own_steps_alone(tmp_path):
    """Its momentum from those must not move it in joint steps."""
    critic = AgentCriticConfig(coef=0.0, epochs=2)
    trainer = ControlTrainer(small(tmp_path / "run", critic=critic, optim=OptimConfig(warmup=0, weight_decay=0.1)))
    before = trainer.agent.critic_head.weight.detach().clone()
    trainer.iteration(1)
    learned = {name: x.clone() for name, x in trainer.agent.critic_parts().state_dict().items()}
    assert not torch.equal(learned["1.weight"], before)
    trainer.learner.settings = replace(trainer.learner.settings, critic_epochs=0)
    trainer.iteration(2)
    assert all(torch.equal(x, learned[name]) for name, x in trainer.agent.critic_parts().state_dict().items())


def test_returns_are_counted_before_normalisation(tmp_path):
    args = small(tmp_path / "run", env=EnvConfig("CartPole-v1", normalize_rewards=True), steps=64)
    trainer = ControlTrainer(args)
    metrics, _ = trainer.iteration(1)
    assert metrics["train/average_return"] == pytest.approx(metrics["train/average_length"])
    assert np.isfinite(metrics["train/average_return"])


@pytest.mark.proof  # below: what it reads
def test_a_transformer_learns_what_one_observation_does_not_tell(tmp_path):
    """The reward is for repeating what was seen two steps ago."""
    args = small(
        tmp_path / "run",
        env=EnvConfig("Memory-v0", number=8),
        steps=32,
        agent=AgentConfig(policy="transformer", hidden=[16], context=4, heads=2, activation="gelu"),
        critic=AgentCriticConfig(lr=1e-2),
        optim=OptimConfig(lr=1e-2, warmup=0, schedule="constant"),
        run=quiet_agent(tmp_path / "run", 30),
    )
    ControlTrainer(args).train()
    metrics = read_metrics(tmp_path / "run")
    assert metrics[0]["ratio_min"] < 1 < metrics[0]["ratio_max"]
    assert metrics[0]["train/average_return"] < 13  # chance is 10 of 20
    assert metrics[-1]["train/average_return"] > 16


def test_a_transformer_reads_nothing_of_what_comes_later():
    args = AgentConfig("transformer", [8, 8], context=4, heads=2)
    agent = Agent(spaces.Box(-1, 1, (12,)), spaces.Discrete(2), args)
    states = []
    agent.actor_body.blocks[-1].register_forward_hook(lambda module, inputs, output: states.append(output))
    one = torch.randn(5, 12)
    other = one.clone()
    other[:, -3:] += 1
    assert agent.outputs(one).shape == (5, 2)
    agent.outputs(other)
    assert torch.equal(states[0][:, :-1], states[1][:, :-1])
    assert not torch.equal(states[0][:, -1], states[1][:, -1])


def test_a_stack_of_observations_starts_with_the_first_one():
    envs = make_envs(EnvConfig("Memory-v0"), 1, 0.99, stack=3)
    first = envs.reset(seed=1)[0][0].tolist()
    assert first == [first[0]] * 3
    second = envs.step(np.array([0]))[0][0].tolist()
    assert second[:2] == first[1:]


@pytest.mark.parametrize(("key", "value"), [("log_std", -1.0), ("actions", "scale")])
def test_settings_of_continuous_actions_are_refused_for_discrete_ones(key, value, tmp_path):
    args = small(tmp_path / "run", agent=AgentConfig(**{key: value}))
    with pytest.raises(ConfigError) as caught:
        ControlTrainer(args)
    assert str(caught.value) == f"agent.{key} is {value!r}, which has no effect with discrete actions; leave it out"
    ControlTrainer(small(tmp_path / "run", agent=AgentConfig(**{key: value}), env=EnvConfig("Pendulum-v1")))


def test_a_transformers_ratio_starts_at_1_in_every_update(tmp_path):
    """PyTorch's encoder layers compute another way in evaluation mode."""
    agent = AgentConfig(policy="transformer", hidden=[16, 16], activation="gelu", context=4)
    trainer = ControlTrainer(small(tmp_path / "run", agent=agent))
    assert [trainer.iteration(number)[0]["first_ratio_error"] for number in (1, 2)] == [0.0, 0.0]


def test_an_interrupted_run_of_a_notebook_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    whole, trainer = (ControlTrainer(control_config(tmp_path / name, 3)) for name in ("whole", "cut"))
    expected = whole.train()
    with monkeypatch.context() as context:
        context.setattr(trainer, "evaluate", lambda number: {})
        context.setattr(trainer, "give_credit", lambda rollout: signal.raise_signal(signal.SIGINT) or credit(rollout))
        credit = type(trainer).give_credit.__get__(trainer)
        summary = trainer.train()
    assert (summary.stopped_by, summary.iterations) == ("interrupt", 1)
    assert trainer.summary is summary
    again = trainer.train()
    assert (again.stopped_by, again.iterations, again.last) == ("iterations", 3, expected.last)
    kept = [read_metrics(tmp_path / name) for name in ("whole", "cut")]
    for name in ("loss", "train/average_return", "eval/average_return"):
        assert kept[0][-1][name] == kept[1][-1][name]


class Faulty(CartPoleEnv):
    """Raises once all copies of a process have taken `limit` steps."""

    limit, taken = 10**9, 0

    def step(self, action):
        Faulty.taken += 1
        if Faulty.taken > self.limit:
            raise ValueError("a wheel came off")
        return super().step(action)


class Kinder(Faulty):
    """Forgives the first step."""

    forgiven = 1


gym.register("Faulty-v0", Faulty, max_episode_steps=10)


@pytest.mark.parametrize("processes", [False, True])
def test_an_iteration_whose_environment_raises_is_repeated_bit_for_bit(processes, tmp_path, monkeypatch):
    options = {"normalize_observations": True, "normalize_rewards": True, "processes": processes}
    args = partial(
        small, iterations=2, env=EnvConfig("Faulty-v0", number=2, **options), eval=EpisodesConfig(episodes=0)
    )
    ControlTrainer(args(tmp_path / "whole")).train()
    monkeypatch.setattr(Faulty, "taken", 0)
    monkeypatch.setattr(Faulty, "limit", 23 if processes else 46)  # in the second iteration of 16 steps a copy
    with pytest.raises(
        RunStopped, match=r"^stopped in iteration 2: .*wheel(.|\n)*; mend it, then run your script again"
    ) as caught:
        ControlTrainer(args(tmp_path / "run")).train()
    assert 'args.run.allow_changed = ["env.id"]' in str(caught.value), "no command knows an id that a script registers"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["000001"]
    monkeypatch.setattr(Faulty, "limit", 10**9)
    mended = args(tmp_path / "run")
    mended.run.allow_changed = ["env.id"]
    ControlTrainer(mended).train(resume_from_checkpoint=True)
    whole, again = (load_file(tmp_path / run / "policy" / "agent.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_an_environment_of_the_user_is_a_part_of_the_run(tmp_path, monkeypatch, capsys):
    args = partial(small, tmp_path / "run", env=EnvConfig("Faulty-v0"), eval=EpisodesConfig(episodes=0))
    ControlTrainer(args()).train()
    assert "tokencredit play" not in capsys.readouterr().out, "which does not know its id"
    assert json.loads((tmp_path / "run" / "parts.json").read_text())["env.id"]["name"] == "Faulty"
    monkeypatch.setattr(gym.spec("Faulty-v0"), "entry_point", partial(Kinder, render_mode=None))
    with pytest.raises(ConfigError, match=r"^env\.id is Kinder\(.*, and this run was begun with Faulty \("):
        ControlTrainer(args(iterations=4)).train(resume_from_checkpoint=True)
    assert main(["play", str(tmp_path / "run"), "--episodes", "1"]) == 0
    assert re.search(r"the environment is Kinder\(.*; the agent was trained in Faulty \(", capsys.readouterr().out)
    assert "env.id" not in ControlTrainer(small(tmp_path / "other")).record.parts, "CartPole is Gymnasium's"


def test_a_trainer_keeps_its_settings_and_its_run_ends_once(tmp_path):
    args = small(tmp_path / "first")
    trainer = ControlTrainer(args)
    args.optim.lr, args.env.kwargs["max_episode_steps"] = 0.5, 7
    args.run.dir = str(tmp_path / "second")
    trainer.train()
    assert "max_episode_steps" not in (tmp_path / "first" / "config.yaml").read_text()
    assert read_metrics(tmp_path / "first")[0]["lr"] < 0.01
    trainer.args.run.iterations = 5
    with pytest.raises(ConfigError, match=r"first', has ended; make a new trainer to continue it, or to begin one$"):
        trainer.train(resume_from_checkpoint=True)


class Drawing(CartPoleEnv):
    """Draws from NumPy's global generator."""

    def reset(self, *, seed=None, options=None):
        state, info = super().reset(seed=seed, options=options)
        return state + np.random.normal(0, 0.01, 4).astype(np.float32), info


gym.register("Drawing-v0", Drawing, max_episode_steps=20)


def test_evaluations_draw_nothing_from_the_runs_generators(tmp_path):
    def trained(name, every):
        args = small(tmp_path / name, env=EnvConfig("Drawing-v0", 2), eval=EpisodesConfig(every, episodes=2))
        np.random.seed(len(name))
        ControlTrainer(args).train()
        return [m["policy_loss"] for m in read_metrics(tmp_path / name)]

    assert trained("evaluated", 1) == trained("not", 0), "nor does the caller's NumPy matter"


def test_the_check_of_videos_draws_nothing_from_the_runs_generators(tmp_path):
    pytest.importorskip("moviepy")
    groups = [{"env": EnvConfig("Drawing-v0"), "eval": EpisodesConfig(videos=videos)} for videos in (0, 1)]
    first, other = (ControlTrainer(small(tmp_path, **group)).collector.observation for group in groups)
    assert np.array_equal(first, other)


def test_a_run_that_its_reward_stops_is_evaluated(tmp_path):
    summary = ControlTrainer(small(tmp_path / "run", stop=AgentStopConfig(reward=5.0, patience=2))).train()
    metrics = read_metrics(tmp_path / "run")
    assert (summary.stopped_by, len(metrics)) == ("stop.reward", 2)
    assert ["eval/average_return" in m for m in metrics] == [False, True]


def test_a_script_gets_the_interrupt_and_the_summary_stays(tmp_path, monkeypatch):
    monkeypatch.delattr(sys, "ps1", raising=False)
    trainer = ControlTrainer(control_config(tmp_path / "run", 3))
    monkeypatch.setattr(trainer, "update", lambda *_: signal.raise_signal(signal.SIGINT) or {"loss": 0.0})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.summary.stopped_by == "interrupt"
