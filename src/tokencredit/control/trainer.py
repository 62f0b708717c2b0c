"""Policy gradients for Gymnasium environments: one iteration, and the run around it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokencredit.control.agent import Agent
from tokencredit.control.environments import make_envs
from tokencredit.control.evaluation import Player, check_videos, episode_metrics, save_agent
from tokencredit.control.rollout import Collector, NonFiniteReward, Rollout
from tokencredit.core.advantages import estimate
from tokencredit.core.masked import explained_variance, moments, whiten
from tokencredit.core.projection import TokenLoss
from tokencredit.errors import ConfigError
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule, set_rates
from tokencredit.learn.rng import from_text, random_state, set_random_state, to_text
from tokencredit.learn.state import load_optimizer_state, load_trained_weights, optimizer_state, trained_weights
from tokencredit.learn.stopping import EarlyStopping
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, ppo_update
from tokencredit.report.page import LARGEST, write_report
from tokencredit.runs.loop import State, run
from tokencredit.runs.recorder import RunRecord
from tokencredit.settings.control import ControlConfig

EPISODES = 100
"""How many of the last training episodes train/average_return is the mean of."""
EVALUATION_SEED = 10_000
"""Added to the run's seed, so that evaluations meet other episodes than training."""


class ControlTrainer:
    """Trains an agent in an environment; `ControlTrainer().train()` is what `tokencredit control` does."""

    def __init__(self, args: ControlConfig | None = None):
        """Make environments, agent and optimiser; the run's folder is made by `train`.

        Raises:
            ConfigError: a setting, environment or folder that cannot be used.
        """
        self.args = args = args or ControlConfig()
        self.record = RunRecord(args.run, "no", headline="train/average_return", unit="steps")
        self.accelerator = self.record.accelerator
        if self.accelerator.num_processes > 1:
            raise ConfigError("agents are trained by one process; env.processes gives each environment one of its own")
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.envs = make_envs(args.env, args.env.number, args.advantage.gamma, stack=args.agent.observations())
        self.agent = Agent(self.envs.single_observation_space, self.envs.single_action_space, args.agent)
        if args.eval.videos:
            check_videos(args)
        self.player = Player(args, self.agent, self.envs)
        critic = list(self.agent.critic_parts().parameters())
        self.actor = [p for p in self.agent.parameters() if all(p is not q for q in critic)]
        optim = args.optim
        parts = [(self.actor, optim.lr), (critic, optim.value_lr)]
        if optim.lr == optim.value_lr:  # one group takes half the time of two
            parts = [(self.actor + critic, optim.lr)]
        optimizer = build_optimizer(
            [{"params": p, "lr": lr, "weight_decay": optim.weight_decay} for p, lr in parts if p],
            optim.name,
            hidden=hidden_matrices(self.agent),
            eps=optim.eps,
        )
        total = max(args.run.iterations, optim.warmup + 1)
        self.lr_factor = schedule(optim.schedule, warmup=optim.warmup, total=total, final_scale=optim.final_scale)
        # In one process nothing wraps them, and Accelerate's own step looks for packages on the disk each time.
        self.model, self.optimizer = self.agent, optimizer
        self.shuffling = torch.Generator().manual_seed(args.seed + 1)
        self.collector = Collector(self.envs, self.agent, args.seed)
        self.stopping = EarlyStopping(reward=args.stop.reward, patience=args.stop.patience)
        self.episodes: deque[tuple[float, int]] = deque(maxlen=EPISODES)
        self.steps = 0

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Run all iterations, leave the run's folder behind, and return its summary.

        Args:
            resume_from_checkpoint: go on in `run.dir` where a run was cut short; docs/resuming.md says how.

        Raises:
            ConfigError: `run.dir` is in use, or holds nothing that can go on with these settings.
            RunStopped: numbers were not finite several times in a row, or an environment raised. What was trained
                until then is kept.
            KeyboardInterrupt: likewise kept, then passed on; after a second Ctrl-C nothing more is written.
        """
        weights = sum(p.numel() * p.element_size() for p in self.agent.parameters())
        return run(self, resume=resume_from_checkpoint, reserve=weights + LARGEST + 2**20, weights=weights)

    def iteration(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Step the environments, give credit, update, evaluate if it is time to: returns metrics, and no samples."""
        started = time.perf_counter()
        args = self.args
        metrics: dict[str, float] = {"iteration": number}
        metrics["lr"] = set_rates(self.optimizer, self.lr_factor(number - 1))[0]
        try:
            rollout = self.collector.collect(args.steps)
            collected, episodes = time.perf_counter(), rollout.episodes
            metrics |= self._learn(number, rollout)
        except NonFiniteReward as bad:
            collected, episodes = time.perf_counter(), []
            tensors = {"observations": torch.from_numpy(bad.observations), "rewards": torch.from_numpy(bad.rewards)}
            self.record.bad_step(number, str(bad), tensors)
            metrics |= {"steps": 0, "bad_steps": 1}
        self.episodes.extend(episodes)
        seconds = time.perf_counter() - started
        taken = args.env.number * args.steps
        self.steps += taken
        metrics |= {
            **episode_metrics("train", list(self.episodes)),
            "episodes": len(episodes),
            "steps": taken,
            "total_steps": self.steps,
            "seconds": seconds,
            "seconds/rollout": collected - started,
            "seconds/update": seconds - (collected - started),
            "steps_per_second": taken / seconds,
        }
        if number == args.run.iterations or (args.eval.every and number % args.eval.every == 0):
            metrics |= self.evaluate(number)
        return metrics, []

    def _learn(self, number: int, rollout: Rollout) -> dict[str, float]:
        """Give credit and update; returns what there is to say of both."""
        advantages, returns = self.credit(rollout)
        _, mean, variance = moments(advantages, rollout.mask)
        return {
            "advantage_mean": float(mean),
            "advantage_std": float(variance.sqrt()),
            "explained_variance": float(explained_variance(rollout.values, returns, rollout.mask)),
            **self.update(number, rollout, advantages, returns),
        }

    def credit(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages and returns, `[copies, time]`; what was cut off is worth its bootstrap, what ended is worth 0."""
        args = self.args.advantage
        return estimate(
            args.estimator,
            rollout.rewards,
            None if self.args.agent.critic == "none" else rollout.values,
            options=args.options(),
            mask=rollout.mask,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            bootstrap=rollout.bootstrap,
        )

    def update(self, number: int, rollout: Rollout, advantages: Tensor, returns: Tensor) -> dict[str, float]:
        """Train on a rollout, a transition a row, the critic alone while it warms up; returns the update's metrics."""
        ppo, optim = self.args.ppo, self.args.optim
        plain = self.args.algorithm == "policy_gradient"
        if self.args.advantage.whitened_over("batch"):
            advantages = whiten(advantages, rollout.mask)
        options = ppo.objective()
        if self.args.agent.critic == "none":
            options["value_coef"] = 0.0
        return ppo_update(
            transitions(rollout, advantages, returns),
            self._evaluate,
            Objective(**options),
            self.model,
            self.optimizer,
            self.accelerator,
            self.shuffling,
            epochs=1 if plain else ppo.epochs,
            minibatches=1 if plain else ppo.minibatches,
            micro_batch_tokens=ppo.micro_batch_tokens,
            whiten_minibatches=self.args.advantage.whitened_over("minibatch"),
            target_kl=ppo.target_kl,
            max_grad_norm=optim.max_grad_norm,
            grad_norm_type=optim.norm_order(),
            frozen=self.actor if number <= ppo.critic_warmup else (),
            on_step=partial(self._on_step, number),
        )

    def _on_step(self, number: int, minibatch: Experience, error: NonFiniteUpdate | None) -> None:
        """Count the steps in a row that could not be taken, and keep their minibatches."""
        if error is None:
            self.record.bad_in_a_row = 0
        else:
            self.record.bad_step(number, str(error), minibatch.tensors())

    def state(self) -> tuple[State, State]:
        """Everything that the next iteration depends on; agents are trained by one process."""
        shared = {
            "weights": trained_weights(self.agent),
            "optimizer": optimizer_state(self.optimizer),
            "collector": self.collector.state(),
            "episodes": list(self.episodes),
            "steps": self.steps,
        }
        return shared, {"shuffling": to_text(self.shuffling.get_state()), "random": random_state()}

    def load(self, state: State, changed: set[str]) -> Sequence[str]:
        """Go on from what `state` gave, its second part under `process`; returns what people should know of it.

        Raises:
            ConfigError: the agent is not of the form that the run began with.
        """
        try:
            load_trained_weights(self.agent, state["weights"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        except ValueError as error:
            raise ConfigError(f"the checkpoint does not fit this agent: {error}") from error
        lost = self.collector.load(state["collector"])
        self.episodes.extend((score, length) for score, length in state["episodes"])
        self.steps = state["steps"]
        self.shuffling.set_state(from_text(state["process"]["shuffling"]))
        set_random_state(state["process"]["random"])
        if not lost:
            return ()
        which = ", ".join(map(str, lost))
        return (
            f"environments {which} could not be brought back to where they were (what they do does not follow from "
            "seed and actions alone); they begin a new episode",
        )

    def rewind(self) -> bool:
        """Environments have no way back to the beginning of an iteration."""
        return False

    def evaluate(self, number: int) -> dict[str, float]:
        """Run whole episodes in copies of their own, with the training's statistics; some of them are filmed."""
        settings, seed = self.args.eval, self.args.seed + EVALUATION_SEED
        metrics = self.player.measure(settings, seed) if settings.episodes else {}
        if settings.videos:
            self.player.record(settings, seed, self.record.folder.path / "videos", f"iteration-{number}")
        return metrics

    def _evaluate(self, inputs: dict[str, Tensor], policy_loss: TokenLoss) -> Evaluation:
        return self.model(**inputs, policy_loss=policy_loss, entropy=self.args.ppo.entropy_coef > 0)

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """Write what a run leaves at its end: agent, summary and report; returns the summary."""
        summary = self.record.end(stopped_by, self._save)
        if self.record.history:
            write_report(self.record.folder.path)
        self.envs.close()
        return summary

    def _save(self, folder: Path, summary: dict[str, Any]) -> None:
        save_agent(folder, self.agent, self.envs)


def transitions(rollout: Rollout, advantages: Tensor, returns: Tensor) -> Experience:
    """The steps that are transitions, each a row of one step."""
    acted = rollout.mask

    def rows(x: Tensor) -> Tensor:
        return x[acted].unsqueeze(1)

    count = int(acted.sum())
    return Experience(
        inputs={"observations": rows(rollout.observations), "actions": rows(rollout.actions)},
        mask=torch.ones(count, 1, dtype=torch.bool),
        lengths=torch.ones(count, dtype=torch.int64),
        logprobs=rows(rollout.logprobs),
        values=rows(rollout.values),
        advantages=rows(advantages),
        returns=rows(returns),
    )
