"""PPO for language models: one iteration, readable top to bottom, and the run around it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration
from torch import Tensor

from tokencredit.core.advantages import estimate
from tokencredit.core.kl import kl_estimate
from tokencredit.core.masked import whiten
from tokencredit.core.rewards import token_rewards
from tokencredit.learn.controllers import AdaptiveKL, FixedKL, RunningMoments
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.stopping import EarlyStopping
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, ppo_update
from tokencredit.runs.config import KLConfig, PPOConfig
from tokencredit.runs.console import Screen
from tokencredit.runs.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder
from tokencredit.text.batch import Batch
from tokencredit.text.loading import build_actor_critic, end_ids, load_language_model, room_for_prompts, save_policy
from tokencredit.text.models import ActorCritic
from tokencredit.text.prompts import load_prompts
from tokencredit.text.rewards import NonFiniteReward, RewardError, build_terms, score
from tokencredit.text.sampling import Rollout, sample

LAST = 5
"""Iterations whose mean counts as where a run ended."""


class Reference(NamedTuple):
    """What the reference says of a rollout; None and nothing without one."""

    logprobs: Tensor | None
    kl: Tensor | None
    """What each token's reward pays for, nats; None where the loss pays."""
    inputs: dict[str, Tensor]
    """What the update needs to price the KL in the loss."""


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
            mixed_precision=mixed_precision(args.model.dtype),
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
        lm, self.tokenizer = load_language_model(args.model)
        self.end_ids = end_ids(lm, self.tokenizer)
        self.prompts = load_prompts(
            args.prompts, self.tokenizer, seed=args.seed, room=room_for_prompts(lm, args.rollout.max_new_tokens)
        )
        base = ActorCritic(deepcopy(lm)) if args.kl.coef > 0 and not args.model.lora.rank else None
        self.policy = build_actor_critic(lm, self.tokenizer, args.model).to(self.accelerator.device)
        self.reference = None
        if base is not None:
            self.reference = base.requires_grad_(False).to(self.accelerator.device)
        elif args.kl.coef > 0:
            self.reference = self.policy  # without its adapter
        parts = ((self.policy.lm, args.optim.lr), (self.policy.critic_parts(), args.optim.value_lr))
        optimizer = build_optimizer(
            [{"params": trainable(p), "lr": lr, "weight_decay": args.optim.weight_decay} for p, lr in parts],
            args.optim.name,
            hidden=hidden_matrices(lm, exclude=lm.get_output_embeddings().parameters()),
        )
        factor = schedule(
            args.optim.schedule,
            warmup=args.optim.warmup,
            total=max(args.run.iterations, args.optim.warmup + 1),
            final_scale=args.optim.final_scale,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self.model, self.optimizer = self.accelerator.prepare(self.policy, optimizer)
        self.kl = build_kl(args.kl)
        self.scores = RunningMoments()
        self.stopping = EarlyStopping(reward=args.stop.reward, kl=args.stop.kl, patience=args.stop.patience)
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
                    metrics, samples = self.iteration(number)
                    self._record(metrics, samples)
                    reason = self.stopping.update(reward=metrics["reward"], kl=metrics.get("kl", 0.0))
                    if reason is not None:
                        return self._end(f"stop.{reason}")
        except KeyboardInterrupt:
            self._end("interrupt")
            raise
        except (NonFiniteReward, NonFiniteUpdate) as error:
            self._end("a number that is not finite")
            raise RunStopped(f"stopped in iteration {len(self.history) + 1}: {error}") from error
        except RewardError as error:
            self._end("a reward that could not be computed")
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
        batch, experience = self.collect(number)
        lr, *_, value_lr = self.schedule.get_last_lr()
        kl_coef = self.kl.coef
        update = self.update(number, batch, experience)
        seconds = sum(self.seconds.values())
        metrics = {
            "iteration": number,
            **batch.metrics(self._all_sum),
            **update,
            "kl_coef": kl_coef,
            "lr": lr,
            "value_lr": value_lr,
            "seconds": seconds,
            **{f"seconds/{stage}": spent for stage, spent in self.seconds.items()},
        }
        if "kl" in metrics:
            self.kl.update(metrics["kl"], self.args.rollout.batch_size)
        metrics["tokens_per_second"] = metrics["length"] * self.args.rollout.batch_size / seconds
        samples = batch.samples(self.args.run.samples, self.tokenizer)
        return metrics, [{"iteration": number, **sample} for sample in samples]

    def collect(self, number: int) -> tuple[Batch, Experience]:
        """Sample a batch from the policy as it is, score it, and give each token its credit."""
        args, device = self.args, self.accelerator.device
        total = args.rollout.batch_size
        share = total // self.accelerator.num_processes
        first = share * self.accelerator.process_index
        prompts = self.prompts.batch((number - 1) * total + first, share, args.rollout.per_prompt)
        uniforms = torch.rand(total, args.rollout.max_new_tokens, generator=self.sampling)[first : first + share]
        with self._timed("rollout"), self._no_grad():
            rollout = sample(
                self.policy,
                prompts.ids.to(device),
                prompts.mask.to(device),
                uniforms.to(device),
                args.rollout,
                self.tokenizer,
                self.end_ids,
            )
            if self.accelerator.mixed_precision != "no":
                # In half precision a cached pass and a full one differ, and the ratio must start at exactly 1.
                now = self.policy(**rollout.inputs(), temperature=args.rollout.temperature)
                rollout = replace(rollout, logprobs=now.logprobs, values=now.values)
        completions = rollout.texts(self.tokenizer)
        with self._timed("reward"):
            ids = [ids[acted].tolist() for ids, acted in zip(rollout.response_ids, rollout.mask, strict=True)]
            columns = {"completion_ids": ids}
            rated = score(self.terms, prompts.texts, completions, columns, [len(row) for row in ids])
        if rated.dense is not None:
            raise RewardError("a reward term gave one number a token, which this trainer cannot pay out yet")
        with self._timed("reference"), self._no_grad():
            reference = self._refer(rollout)
        scores = torch.tensor(rated.totals, device=device)
        rewards, advantages, returns = self.give_credit(rollout, scores, reference)
        batch = Batch(
            rollout, prompts.texts, completions, scores, rated.terms, reference.logprobs, rewards, advantages, returns
        )
        if args.advantage.whiten:
            advantages = whiten(advantages, rollout.mask, reduce=self._all_sum)
        inputs = rollout.inputs() | reference.inputs
        return batch, Experience(inputs, rollout.mask, rollout.logprobs, rollout.values, advantages, returns)

    def give_credit(self, rollout: Rollout, scores: Tensor, reference: Reference) -> tuple[Tensor, Tensor, Tensor]:
        """From scores and KL to the reward, advantage and return of each token.

        A completion that was cut off at the length limit is treated as ended there: its score is paid in full, once, so
        the value of the state after it is 0. To bootstrap from the critic as well would count the score twice, and
        since the critic learns from that sum, its values would climb without end.
        """
        args, mask = self.args, rollout.mask
        rewards = token_rewards(
            scores,
            mask,
            kl=reference.kl if args.kl.place == "reward" else None,
            kl_coef=self.kl.coef,
            eos=~rollout.truncated,
            missing_eos_penalty=args.score.missing_eos_penalty,
            clip=args.score.clip,
        )
        options = {name: value for name, value in vars(args.advantage).items() if name not in ("estimator", "whiten")}
        options |= {"baseline": self.scores.mean, "group_size": args.rollout.per_prompt}
        advantages, returns = estimate(args.advantage.estimator, rewards, rollout.values, options=options, mask=mask)
        self.scores.update(rewards.sum(1), reduce=self._all_sum)
        return rewards, advantages, returns

    def update(self, number: int, batch: Batch, experience: Experience) -> dict[str, float]:
        """Train policy and critic on a batch, the critic alone while it warms up; returns the update's metrics."""
        ppo, optim = self.args.ppo, self.args.optim
        objective = Objective(
            clip=(ppo.clip, ppo.clip if ppo.clip_high is None else ppo.clip_high),
            dual_clip=ppo.dual_clip,
            value_clip=ppo.value_clip,
            value_coef=ppo.value_coef,
            entropy_coef=ppo.entropy_coef,
            kl_coef=self.kl.coef,
            reduction=ppo.reduction,
        )
        try:
            with self._timed("update"), self._training():
                metrics = ppo_update(
                    experience,
                    self._evaluate,
                    objective,
                    self.optimizer,
                    self.accelerator,
                    self.shuffling,
                    epochs=ppo.epochs,
                    minibatches=ppo.minibatches,
                    micro_batch_size=ppo.micro_batch_size,
                    target_kl=ppo.target_kl,
                    max_grad_norm=optim.max_grad_norm,
                    grad_norm_type={"l2": 2.0, "max": math.inf}[optim.grad_norm_type],
                    frozen=trainable(self.policy.lm) if number <= ppo.critic_warmup else (),
                )
        except NonFiniteUpdate as error:
            if error.row is None:
                raise
            text = batch.prompts[error.row] + batch.completions[error.row]
            raise NonFiniteUpdate(f"{error.term} of the text {text!r}", error.row) from error
        self.schedule.step()
        return metrics

    def _refer(self, rollout: Rollout) -> Reference:
        """What the reference says of a rollout, as far as the configuration needs it."""
        if self.reference is None:
            return Reference(None, None, {})
        kl, temperature = self.args.kl, self.args.rollout.temperature
        with nullcontext() if self.policy.adapter is None else self.policy.adapter.disable_adapter():
            hidden = self.reference.response_hidden(rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids)
            logprobs = self.reference.token_stats(hidden, rollout.response_ids, rollout.mask, temperature).logprobs
        if kl.place == "loss":
            inputs = {"ref_hidden": hidden} if kl.estimator == "full" else {"ref_logprobs": logprobs}
            return Reference(logprobs, None, inputs)
        if kl.estimator == "full":
            now = self.policy(**rollout.inputs(), temperature=temperature, reference=self.reference, ref_hidden=hidden)
            return Reference(logprobs, now.kl, {})
        return Reference(logprobs, kl_estimate(kl.estimator, rollout.logprobs, logprobs, rollout.mask), {})

    def _evaluate(self, inputs: dict[str, Tensor]) -> Evaluation:
        """What the policy says now of an experience's inputs, with gradients."""
        arguments = {name: tensor for name, tensor in inputs.items() if name != "ref_logprobs"}
        if "ref_hidden" in inputs:
            arguments["reference"] = self.reference
        entropy = self.args.ppo.entropy_coef > 0
        now = self.model(**arguments, temperature=self.args.rollout.temperature, entropy=entropy)
        if "ref_logprobs" in inputs:
            kl = kl_estimate(self.args.kl.estimator, now.logprobs, inputs["ref_logprobs"], inputs["mask"])
            now = now._replace(kl=kl)
        return now

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Training mode, for the things that ask the model for it; all else trains in evaluation mode."""
        args = self.args.model
        self.model.train(args.dropout or args.gradient_checkpointing or args.lora.dropout > 0)
        yield
        self.model.eval()

    @contextmanager
    def _no_grad(self) -> Iterator[None]:
        """Passes that train nothing, in the number format of those that do."""
        with torch.no_grad(), self.accelerator.autocast():
            yield

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


def trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module that training may change."""
    return [p for p in module.parameters() if p.requires_grad]


def mixed_precision(dtype: str) -> str:
    """Accelerate's word for a number format; `auto` is bfloat16 where a GPU has it."""
    half = dtype == "bfloat16" or (dtype == "auto" and torch.cuda.is_available() and torch.cuda.is_bf16_supported())
    return "bf16" if half else "no"


def build_kl(args: KLConfig) -> FixedKL | AdaptiveKL:
    """The controller of the KL coefficient."""
    if args.target is None:
        return FixedKL(args.coef)
    return AdaptiveKL(args.coef, target=args.target, horizon=args.horizon)
