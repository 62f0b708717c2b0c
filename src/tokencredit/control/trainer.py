"""Policy gradients for Gymnasium environments: one iteration, and the run around it."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokencredit.control.agent import Agent
from tokencredit.control.collecting import Collector, Rollout
from tokencredit.control.environments import make_envs
from tokencredit.control.playing import Player, check_videos, episode_metrics, save_agent
from tokencredit.core.advantages import estimate
from tokencredit.core.masked import explained_variance, moments, whiten
from tokencredit.core.projection import TokenLoss
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.stopping import EarlyStopping
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, ppo_update
from tokencredit.report.page import LARGEST, write_report
from tokencredit.runs.control_config import ControlConfig
from tokencredit.runs.errors import ConfigError, RunStopped
from tokencredit.runs.record import RunRecord

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
        factor = schedule(optim.schedule, warmup=optim.warmup, total=total, final_scale=optim.final_scale)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        # In one process nothing wraps them, and Accelerate's own step looks for packages on the disk each time.
        self.model, self.optimizer = self.agent, optimizer
        self.shuffling = torch.Generator().manual_seed(args.seed + 1)
        self.collector = Collector(self.envs, self.agent, args.seed)
        self.stopping = EarlyStopping(reward=args.stop.reward, patience=args.stop.patience)
        self.episodes: deque[tuple[float, int]] = deque(maxlen=EPISODES)
        self.steps = 0

    def train(self) -> dict[str, Any]:
        """Run all iterations, leave the run's folder behind, and return its summary.

        Raises:
            RunStopped: something was not finite, or an environment raised. What was trained until then is kept.
            KeyboardInterrupt: likewise kept, then passed on.
        """
        args = self.args
        self.record.begin(args, reserve=LARGEST + 2**20)
        number = 0
        try:
            with self.record.screen:
                for number in range(1, args.run.iterations + 1):
                    metrics = self.iteration(number)
                    last = number == args.run.iterations
                    if last or (args.eval.every and number % args.eval.every == 0):
                        metrics |= self.evaluate(number)
                    self.record.iteration(metrics, [])
                    if self.stopping.update(reward=metrics["train/average_return"], kl=0.0) is not None:
                        return self._end("stop.reward")
        except KeyboardInterrupt:
            self._end("interrupt")
            raise
        except (RunStopped, NonFiniteUpdate) as error:
            self._end("an error")
            raise RunStopped(f"stopped in iteration {number}: {error}") from error
        return self._end("iterations")

    def iteration(self, number: int) -> dict[str, float]:
        """Step the environments, give credit, update; returns the iteration's metrics."""
        started = time.perf_counter()
        args = self.args
        rollout = self.collector.collect(args.steps)
        self.episodes.extend(rollout.episodes)
        collected = time.perf_counter()
        advantages, returns = self.credit(rollout)
        mask = rollout.mask
        _, mean, variance = moments(advantages, mask)
        metrics = {
            "iteration": number,
            "advantage_mean": float(mean),
            "advantage_std": float(variance.sqrt()),
            "explained_variance": float(explained_variance(rollout.values, returns, mask)),
            "lr": self.schedule.get_last_lr()[0],
            **self.update(number, rollout, advantages, returns),
        }
        self.schedule.step()
        seconds = time.perf_counter() - started
        self.steps += mask.numel()
        return metrics | {
            **episode_metrics("train", list(self.episodes)),
            "episodes": len(rollout.episodes),
            "steps": mask.numel(),
            "total_steps": self.steps,
            "seconds": seconds,
            "seconds/rollout": collected - started,
            "seconds/update": seconds - (collected - started),
            "steps_per_second": mask.numel() / seconds,
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
        )

    def evaluate(self, number: int) -> dict[str, float]:
        """Run whole episodes in copies of their own, with the training's statistics; some of them are filmed."""
        settings, seed = self.args.eval, self.args.seed + EVALUATION_SEED
        metrics = self.player.measure(settings, seed) if settings.episodes else {}
        if settings.videos:
            self.player.record(settings, seed, self.record.folder.path / "videos", f"iteration-{number}")
        return metrics

    def _evaluate(self, inputs: dict[str, Tensor], policy_loss: TokenLoss) -> Evaluation:
        return self.model(**inputs, policy_loss=policy_loss, entropy=self.args.ppo.entropy_coef > 0)

    def _end(self, stopped_by: str) -> dict[str, Any]:
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
