"""PPO for language models: one iteration, readable top to bottom, and the run around it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration
from torch import Tensor

from tokencredit.core.advantages import gae
from tokencredit.core.kl import kl_estimate
from tokencredit.core.masked import whiten
from tokencredit.core.rewards import token_rewards
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import build_optimizer, schedule
from tokencredit.learn.update import NonFiniteUpdate, Objective, ppo_update
from tokencredit.runs.config import PPOConfig
from tokencredit.runs.console import Screen
from tokencredit.runs.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder
from tokencredit.text.batch import Batch
from tokencredit.text.models import ActorCritic, end_ids, load_language_model, room_for_prompts, save_policy
from tokencredit.text.prompts import Prompts
from tokencredit.text.rewards import NonFiniteReward, build_terms, score
from tokencredit.text.sampling import Rollout, sample

LAST = 5
"""Iterations whose mean counts as where a run ended."""


class PPOTrainer:
    """Trains a causal language model with PPO from a reward on its texts.

    `PPOTrainer(PPOConfig(...)).train()` is what `tokencredit train` does.
    """

    def __init__(self, args: PPOConfig | None = None):
        """Load everything that a run needs; its folder is made by `train`.

        Raises:
            ConfigError: a setting, model, classifier or folder that cannot be used; the message names its key.
        """
        self.args = args = args or PPOConfig()
        self.folder = RunFolder(args.run.dir)
        installed = [str(tracker) for tracker in get_available_trackers()]
        for tracker in args.run.trackers:  # Accelerate would leave out in silence what is missing
            if tracker not in installed:
                raise ConfigError(f"run.trackers has {tracker}, which is not installed: pip install {tracker}")
        self.accelerator = Accelerator(
            mixed_precision="bf16" if args.model.dtype == "bfloat16" else "no",
            log_with=args.run.trackers or None,
            project_config=ProjectConfiguration(logging_dir=str(self.folder.path / "tensorboard")),
        )
        if self.accelerator.is_main_process:
            self.folder.refuse_if_used()
        if args.rollout.batch_size % self.accelerator.num_processes:
            raise ConfigError(
                f"rollout.batch_size is {args.rollout.batch_size}; "
                f"it must be a multiple of the {self.accelerator.num_processes} processes"
            )
        torch.manual_seed(args.seed)  # for what libraries draw by themselves, such as a new layer's weights
        # Two streams, so that what is sampled does not depend on how many rows each process shuffles.
        self.sampling = torch.Generator().manual_seed(2 * args.seed)
        self.shuffling = torch.Generator().manual_seed(2 * args.seed + 1)
        self.terms = build_terms(args.reward, self.accelerator.device)
        lm, self.tokenizer = load_language_model(args.model.name)
        self.end_ids = end_ids(lm, self.tokenizer)
        self.prompts = Prompts(
            args.prompts.text,
            self.tokenizer,
            add_bos=args.prompts.add_bos,
            max_length=room_for_prompts(lm, args.rollout.max_new_tokens),
        )
        self.reference = None
        if args.kl.coef > 0:
            self.reference = ActorCritic(deepcopy(lm)).requires_grad_(False).to(self.accelerator.device)
        self.policy = ActorCritic(lm, args.model.value_head).to(self.accelerator.device)
        decay = args.optim.weight_decay
        optimizer = build_optimizer(
            [
                {"params": self.policy.lm.parameters(), "lr": args.optim.lr, "weight_decay": decay},
                {"params": self.policy.value_head.parameters(), "lr": args.optim.value_lr, "weight_decay": decay},
            ]
        )
        factor = schedule(
            args.optim.schedule,
            warmup=args.optim.warmup,
            total=max(args.run.iterations, args.optim.warmup + 1),
            final_scale=args.optim.final_scale,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self.model, self.optimizer = self.accelerator.prepare(self.policy, optimizer)
        self.screen = Screen(args.run.iterations, enabled=self.accelerator.is_main_process)
        self.seconds: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.first_samples: list[dict[str, Any]] = []
        self.last_samples: list[dict[str, Any]] = []

    def train(self) -> dict[str, Any]:
        """Run all iterations, leave the run's folder behind, and return its summary.

        Raises:
            RunStopped: a reward, loss or gradient was not finite, or a file could not be written. What was trained
                until then is kept.
            KeyboardInterrupt: likewise kept, then passed on.
        """
        self._begin()
        try:
            with self.screen:
                for number in range(1, self.args.run.iterations + 1):
                    self._record(*self.iteration(number))
        except KeyboardInterrupt:
            self._end("interrupt")
            raise
        except (NonFiniteReward, NonFiniteUpdate) as error:
            self._end("a number that is not finite")
            raise RunStopped(f"stopped in iteration {len(self.history) + 1}: {error}") from error
        except OSError as error:
            self._end("a file that could not be written")
            raise RunStopped(
                f"stopped in iteration {len(self.history)}: {error.strerror} ({error.filename})"
            ) from error
        return self._end("iterations")

    def iteration(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample, score, give credit, update: returns the iteration's metrics and samples."""
        self.seconds = {}
        batch = self.collect(number)
        lr, value_lr = self.schedule.get_last_lr()
        update = self.update(batch)
        seconds = sum(self.seconds.values())
        metrics = {
            "iteration": number,
            **batch.metrics(self._all_sum),
            **update,
            "kl_coef": self.args.kl.coef,
            "lr": lr,
            "value_lr": value_lr,
            "seconds": seconds,
            **{f"seconds/{stage}": spent for stage, spent in self.seconds.items()},
        }
        metrics["tokens_per_second"] = metrics["length"] * self.args.rollout.batch_size / seconds
        samples = batch.samples(self.args.run.samples, self.tokenizer)
        return metrics, [{"iteration": number, **sample} for sample in samples]

    def collect(self, number: int) -> Batch:
        """Sample a batch from the policy as it is, score it, and give each token its credit."""
        args, device = self.args, self.accelerator.device
        total = args.rollout.batch_size
        share = total // self.accelerator.num_processes
        first = share * self.accelerator.process_index
        prompts, prompt_ids, prompt_mask = self.prompts.batch((number - 1) * total + first, share)
        uniforms = torch.rand(total, args.rollout.max_new_tokens, generator=self.sampling)[first : first + share]
        with self._timed("rollout"), self.accelerator.autocast():
            rollout = sample(
                self.policy,
                prompt_ids.to(device),
                prompt_mask.to(device),
                uniforms.to(device),
                temperature=args.rollout.temperature,
                end_ids=self.end_ids,
            )
            if args.model.dtype != "float32":
                # In half precision a cached pass and a full one differ, and the ratio must start at exactly 1.
                with torch.no_grad():
                    logprobs, values, _ = self._evaluate(self.policy, rollout.inputs())
                rollout = replace(rollout, logprobs=logprobs, values=values)
        completions = rollout.texts(self.tokenizer)
        with self._timed("reward"):
            scores, terms = score(self.terms, prompts, completions)
        with self._timed("reference"), torch.no_grad(), self.accelerator.autocast():
            ref_logprobs = self._evaluate(self.reference, rollout.inputs())[0] if self.reference else None
        return give_credit(
            rollout, prompts, completions, torch.tensor(scores, device=device), terms, ref_logprobs, args
        )

    def update(self, batch: Batch) -> dict[str, float]:
        """Train policy and critic on a batch; returns the update's metrics."""
        args, rollout = self.args, batch.rollout
        advantages = batch.advantages
        if args.advantage.whiten:
            advantages = whiten(advantages, rollout.mask, reduce=self._all_sum)
        experience = Experience(
            rollout.inputs(), rollout.mask, rollout.logprobs, rollout.values, advantages, batch.returns
        )
        objective = Objective(args.ppo.clip, args.ppo.value_clip, args.ppo.value_coef, args.ppo.entropy_coef)
        try:
            with self._timed("update"):
                metrics = ppo_update(
                    experience,
                    lambda inputs: self._evaluate(self.model, inputs, entropy=args.ppo.entropy_coef > 0),
                    objective,
                    self.optimizer,
                    self.accelerator,
                    self.shuffling,
                    epochs=args.ppo.epochs,
                    minibatches=args.ppo.minibatches,
                    micro_batch_size=args.ppo.micro_batch_size,
                    target_kl=args.ppo.target_kl,
                    max_grad_norm=args.optim.max_grad_norm,
                )
        except NonFiniteUpdate as error:
            if error.row is None:
                raise
            text = batch.prompts[error.row] + batch.completions[error.row]
            raise NonFiniteUpdate(f"{error.term} of the text {text!r}", error.row) from error
        self.schedule.step()
        return metrics

    def _evaluate(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return model(**inputs, temperature=self.args.rollout.temperature, entropy=entropy)

    def _all_sum(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, "sum")

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

    def _begin(self) -> None:
        if self.accelerator.is_main_process:
            self.folder.create(reserve=sum(p.numel() * p.element_size() for p in self.policy.parameters()) + 2**20)
            self.folder.write("config.yaml", yaml.safe_dump(asdict(self.args), sort_keys=False, allow_unicode=True))
        if self.args.run.trackers:
            self.accelerator.init_trackers("tokencredit")
        self.started = time.perf_counter()

    def _record(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        self.history.append(metrics)
        self.first_samples, self.last_samples = self.first_samples or samples, samples
        self.accelerator.log({k: v for k, v in metrics.items() if k != "iteration"}, step=int(metrics["iteration"]))
        if not self.accelerator.is_main_process:
            return
        self.folder.append("metrics.jsonl", {k: v if math.isfinite(v) else None for k, v in metrics.items()})
        self.folder.append("samples.jsonl", *samples)
        self.screen.iteration(metrics)
        if self.args.run.show_every and metrics["iteration"] % self.args.run.show_every == 0:
            self.screen.samples(int(metrics["iteration"]), samples)

    def _end(self, stopped_by: str) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        last = self.history[-LAST:]
        tokens = sum(m["length"] for m in self.history) * self.args.rollout.batch_size
        summary = {
            "reward_first": self.history[0]["reward"] if self.history else None,
            "reward_last": sum(m["reward"] for m in last) / len(last) if last else None,
            "kl_last": sum(m["kl"] for m in last) / len(last) if last and self.reference else None,
            "iterations": len(self.history),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "stopped_by": stopped_by,
        }
        if self.accelerator.is_main_process:
            with self.folder.replacing("policy") as folder:
                save_policy(folder, self.policy, self.tokenizer)
            self.folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
            self.screen.finish(summary, str(self.folder.path), self.first_samples, self.last_samples)
        self.accelerator.end_training()
        return summary


def give_credit(
    rollout: Rollout,
    prompts: list[str],
    completions: list[str],
    scores: Tensor,
    terms: dict[str, list[float]],
    ref_logprobs: Tensor | None,
    args: PPOConfig,
) -> Batch:
    """From scores and log-probabilities to the reward and the advantage of each token.

    A completion that was cut off at the length limit is treated as ended there: its score is paid in full, once, so
    the value of the state after it is 0. To bootstrap from the critic as well would count the score twice, and since
    the critic learns from that sum, its values would climb without end.
    """
    mask = rollout.mask
    kl = None if ref_logprobs is None else kl_estimate(args.kl.estimator, rollout.logprobs, ref_logprobs, mask)
    rewards = token_rewards(scores, mask, kl=kl, kl_coef=args.kl.coef)
    advantages, returns = gae(rewards, rollout.values, gamma=args.advantage.gamma, lam=args.advantage.lam, mask=mask)
    return Batch(rollout, prompts, completions, scores, terms, ref_logprobs, kl, rewards, advantages, returns)
