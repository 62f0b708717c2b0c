"""PPO for language models: one iteration, readable top to bottom, and the run around it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.core.kl import kl_estimate
from tokencredit.core.masked import whiten
from tokencredit.core.projection import TokenLoss
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.stopping import EarlyStopping
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, ppo_update
from tokencredit.report.page import LARGEST, write_report
from tokencredit.runs.config import PPOConfig
from tokencredit.runs.errors import ConfigError, RunStopped
from tokencredit.runs.record import RunRecord
from tokencredit.text.batch import Batch
from tokencredit.text.card import model_card
from tokencredit.text.credit import Credit
from tokencredit.text.evaluation import evaluate
from tokencredit.text.loading import (
    build_actor_critic,
    check_language_model,
    end_ids,
    load_language_model,
    load_tokenizer,
    room_for_prompts,
    save_policy,
    upload,
)
from tokencredit.text.models import ActorCritic, width
from tokencredit.text.passes import Reference, critic_values, evaluate_rollout, refer, rollout_logprobs
from tokencredit.text.precision import choose, this_process
from tokencredit.text.prompts import PromptBatch, load_prompts
from tokencredit.text.rewards import NonFiniteReward, RewardError, as_terms, build_terms, score
from tokencredit.text.sampling import Rollout, sample

if TYPE_CHECKING:
    from tokencredit.text.datasets import Rows


MEMORY_ADVICE = {
    "rollout": "lower rollout.batch_size or rollout.max_new_tokens",
    "reward": "lower the batch_size of the reward's terms",
    "evaluation": "lower eval.samples or eval.max_new_tokens",
}
"""What to do when a stage runs out of memory."""


class PPOTrainer:
    """Trains a causal language model with PPO from a reward on its texts.

    `PPOTrainer().train()` is what `tokencredit train` does. The arguments have the names and types of TRL's
    GRPOTrainer; what is not given comes from `args`.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] = (),
    ):
        """Load everything that a run needs; its folder is made by `train`.

        Args:
            model: a hub id, a folder, or a loaded model, which is trained in place.
            reward_funcs: a function `f(prompts, completions, **columns) -> list[float]`, a reward model (hub id,
                folder or loaded), or a list of them, each with weight 1; see `rewards.as_terms`.
            args: the configuration.
            train_dataset: rows with prompts, as a `datasets.Dataset` or a list of dicts.
            eval_dataset: the same, for evaluation.
            processing_class: the policy's tokenizer.
            peft_config: a configuration of PEFT's; only its adapter is then trained.
            callbacks: objects with any of the methods `before_STAGE(trainer)` and `after_STAGE(trainer, **results)`,
                where STAGE is iteration, rollout, reference, reward, update or evaluation.

        Raises:
            ConfigError: a setting, model, reward or folder that cannot be used; the message names its key.
        """
        args = args or PPOConfig()
        # Before the first large tensor: PyTorch then asks Linux for large pages, in which new memory costs a quarter.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if model is not None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = replace(args, model=replace(args.model, name=name))
        self.callbacks = list(callbacks)
        torch.manual_seed(args.seed)  # for what libraries draw by themselves, such as a new layer's weights
        # Two streams, so that what is sampled does not depend on how many rows each process shuffles.
        self.sampling = torch.Generator().manual_seed(2 * args.seed)
        self.shuffling = torch.Generator().manual_seed(2 * args.seed + 1)
        device = this_process().device
        self.terms = build_terms(args.reward, device) if reward_funcs is None else as_terms(reward_funcs, device)
        if isinstance(model, PreTrainedModel):
            self.tokenizer = processing_class or load_tokenizer(args.model)
            lm = check_language_model(args.model, model.float(), self.tokenizer)
        else:
            lm, self.tokenizer = load_language_model(args.model, processing_class)
        # What `auto` stood for is written down, so that the run's configuration makes the same run again.
        dtype = choose(args.model.dtype, width(lm))
        self.args = args = replace(args, model=replace(args.model, dtype=dtype))
        self.record = RunRecord(args.run, {"float32": "no", "bfloat16": "bf16"}[dtype])
        self.accelerator = self.record.accelerator
        self._check_batch_size()
        self.end_ids = end_ids(lm, self.tokenizer)
        self._load_prompts(lm, train_dataset, eval_dataset)
        self._build(lm, peft_config)
        self.credit = Credit(args, self._all_sum)
        self.stopping = EarlyStopping(reward=args.stop.reward, kl=args.stop.kl, patience=args.stop.patience)
        self.best = -math.inf
        self.seconds: dict[str, float] = {}
        self.stage = "first"

    def train(self) -> dict[str, Any]:
        """Run all iterations, leave the run's folder behind, and return its summary.

        Raises:
            RunStopped: a reward, loss or gradient was not finite, a reward could not be computed, a file not be
                written, or memory ran out. What was trained until then is kept.
            KeyboardInterrupt: likewise kept, then passed on.
        """
        weights = sum(p.numel() * p.element_size() for p in self.policy.parameters())
        self.record.begin(self.args, reserve=weights * (2 if self.args.eval.every else 1) + LARGEST + 2**20)
        number = 0
        for prompts in dict.fromkeys((self.prompts, self.eval_prompts)):
            if left_out := prompts.left_out():
                self.record.screen.say(left_out)
        try:
            with self.record.screen:
                for number in range(1, self.args.run.iterations + 1):
                    metrics, samples = self.iteration(number)
                    self.record.iteration(metrics, samples)
                    reason = self.stopping.update(reward=metrics["reward"], kl=metrics.get("kl", 0.0))
                    if reason is not None:
                        return self._end(f"stop.{reason}")
        except KeyboardInterrupt:
            self._end("interrupt")
            raise
        except (NonFiniteReward, NonFiniteUpdate) as error:
            self._end("a number that is not finite")
            raise RunStopped(f"stopped in iteration {number}: {error}") from error
        except RewardError as error:
            self._end("a reward that could not be computed")
            raise RunStopped(f"stopped in iteration {number}: {error}") from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self._end("a lack of memory")
            advice = MEMORY_ADVICE.get(self.stage, "lower ppo.micro_batch_tokens, or set model.gradient_checkpointing")
            raise RunStopped(
                f"stopped in iteration {number}: out of memory in its {self.stage} stage; {advice}"
            ) from error
        except OSError as error:
            self._end("a file that could not be written")
            raise RunStopped(f"stopped in iteration {number}: {error.strerror} ({error.filename})") from error
        return self._end("iterations")

    def iteration(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample, score, give credit, update: returns the iteration's metrics and samples."""
        self.seconds = {}
        with self._stage("iteration") as results:
            batch, experience = self.collect(number)
            lr, *_, value_lr = self.schedule.get_last_lr()
            kl_coef = self.credit.kl.coef
            update = self.update(number, batch, experience)
            metrics = {
                "iteration": number,
                **batch.metrics(self._all_sum, self.accelerator),
                **update,
                "kl_coef": kl_coef,
                "lr": lr,
                "value_lr": value_lr,
            }
            if "kl" in metrics:
                self.credit.kl.update(metrics["kl"], self.args.rollout.batch_size)
            if self.args.eval.every and number % self.args.eval.every == 0:
                metrics |= self.evaluate()
            samples = [{"iteration": number, **s} for s in batch.samples(self.tokenizer, self._logprobs_now(batch))]
            results |= {"metrics": metrics, "samples": samples}
        seconds = self.seconds.pop("iteration")
        metrics |= {"seconds": seconds, **{f"seconds/{stage}": spent for stage, spent in self.seconds.items()}}
        metrics["tokens_per_second"] = metrics["tokens"] / seconds
        return metrics, samples

    def collect(self, number: int) -> tuple[Batch, Experience]:
        """Sample a batch from the policy as it is, score it, and give each token its credit."""
        args = self.args
        total = args.rollout.batch_size
        share = total // self.accelerator.num_processes
        first = share * self.accelerator.process_index
        prompts = self.prompts.batch((number - 1) * total + first, share, args.rollout.per_prompt)
        uniforms = torch.rand(total, args.rollout.max_new_tokens, generator=self.sampling)[first : first + share]
        with self._stage("rollout") as results:
            rollout = results["rollout"] = self.roll(prompts, uniforms)
        with self._stage("reference") as results:
            reference = results["reference"] = self._refer(rollout, args.rollout.temperature)
        completions = rollout.texts(self.tokenizer)
        with self._stage("reward") as results:
            rated = results["scores"] = score(
                self.terms,
                prompts.prompts,
                prompts.answers(completions),
                prompts.columns | rollout.columns(reference.logprobs),
                rollout.mask.sum(1).tolist(),
            )
        scores = torch.tensor(rated.totals, device=self.accelerator.device)
        rewards, advantages, returns = self.credit.give(rollout, scores, rated.dense, reference.kl)
        if rated.dense is not None:
            scores = scores + torch.tensor([sum(row) for row in rated.dense], device=scores.device)
        batch = Batch(
            rollout, prompts.texts, completions, scores, rated.terms, reference.logprobs, rewards, advantages, returns
        )
        if args.advantage.whitened_over("batch"):
            advantages = whiten(advantages, rollout.mask, reduce=self._all_sum)
        inputs = rollout.inputs() | reference.inputs
        lengths = rollout.lengths()
        return batch, Experience(inputs, rollout.mask, lengths, rollout.logprobs, rollout.values, advantages, returns)

    def roll(self, prompts: PromptBatch, uniforms: Tensor) -> Rollout:
        """Continue prompts with the policy as it is."""
        device, settings = self.accelerator.device, self.args.rollout
        with self._no_grad():
            rollout = sample(
                self.policy,
                prompts.ids.to(device),
                prompts.mask.to(device),
                uniforms.to(device),
                settings,
                self.tokenizer,
                self.end_ids,
                settings.per_prompt,
            )
            budget = self.args.ppo.micro_batch_tokens
            if self.accelerator.mixed_precision != "no":
                # In half precision a cached pass and a full one differ, and the ratio must start at exactly 1.
                now = evaluate_rollout(self.policy, rollout, settings.temperature, budget)
                return replace(rollout, logprobs=now.logprobs, values=now.values)
            if self.policy.critic is not None:
                return replace(rollout, values=critic_values(self.policy, rollout, budget))
            return rollout

    def update(self, number: int, batch: Batch, experience: Experience) -> dict[str, float]:
        """Train policy and critic on a batch, the critic alone while it warms up; returns the update's metrics."""
        ppo, optim = self.args.ppo, self.args.optim
        objective = Objective(**ppo.objective(), kl_coef=self.credit.kl.coef)
        try:
            with self._stage("update") as results, self._training():
                metrics = results["metrics"] = ppo_update(
                    experience,
                    self._evaluate,
                    objective,
                    self.model,
                    self.optimizer,
                    self.accelerator,
                    self.shuffling,
                    epochs=ppo.epochs,
                    minibatches=ppo.minibatches,
                    micro_batch_tokens=ppo.micro_batch_tokens,
                    whiten_minibatches=self.args.advantage.whitened_over("minibatch"),
                    target_kl=ppo.target_kl,
                    max_grad_norm=optim.max_grad_norm,
                    grad_norm_type=optim.norm_order(),
                    frozen=trainable(self.policy.lm) if number <= ppo.critic_warmup else (),
                )
        except NonFiniteUpdate as error:
            if error.row is None:
                raise
            text = batch.prompts[error.row] + batch.completions[error.row]
            raise NonFiniteUpdate(f"{error.term} of the text {text!r}", error.row) from error
        self.schedule.step()
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Measure the policy on the evaluation prompts, and keep it in `best/` if it never did as well."""
        with self._stage("evaluation") as results, self._no_grad():
            metrics = results["metrics"] = evaluate(
                self.policy,
                self.tokenizer,
                self.end_ids,
                self.terms,
                self.eval_prompts,
                self.args.eval,
                seed=self.args.seed,
                ref_logprobs=lambda rollout: self._refer(rollout, self.args.eval.temperature).logprobs,
                accelerator=self.accelerator,
            )
        if metrics["eval/reward"] > self.best:
            self.best = metrics["eval/reward"]
            if self.record.main and self.record.folder.path.is_dir():
                with self.record.folder.replacing("best") as folder:
                    save_policy(folder, self.policy, self.tokenizer)
        return metrics

    def _logprobs_now(self, batch: Batch) -> Tensor:
        """Log-probabilities of the completions that are written down, under the policy as it is."""
        rollout = batch.rollout.head(self.args.run.samples)
        if not len(rollout.mask):
            return rollout.logprobs
        with self._no_grad():
            return rollout_logprobs(
                self.policy, rollout, self.args.rollout.temperature, self.args.ppo.micro_batch_tokens
            )

    def _refer(self, rollout: Rollout, temperature: float) -> Reference:
        with self._no_grad():
            return refer(
                self.policy, self.reference, rollout, self.args.kl, temperature, self.args.ppo.micro_batch_tokens
            )

    def _evaluate(self, inputs: dict[str, Tensor], policy_loss: TokenLoss) -> Evaluation:
        """What the policy says now of an experience's inputs, with gradients."""
        inputs, estimate = dict(inputs), None
        if "ref_logprobs" in inputs:
            estimate = partial(kl_estimate, self.args.kl.estimator)
            ref_logprobs = inputs.pop("ref_logprobs")
            policy_loss = with_kl(policy_loss, estimate, ref_logprobs[inputs["mask"]])
        if "ref_hidden" in inputs:
            inputs["reference"] = self.reference
        now = self.model(
            **inputs,
            temperature=self.args.rollout.temperature,
            policy_loss=policy_loss,
            entropy=self.args.ppo.entropy_coef > 0,
        )
        return now if estimate is None else now._replace(kl=estimate(now.logprobs, ref_logprobs, inputs["mask"]))

    def _check_batch_size(self) -> None:
        processes, rollout = self.accelerator.num_processes, self.args.rollout
        if rollout.batch_size % (processes * rollout.per_prompt):
            raise ConfigError(
                f"rollout.batch_size is {rollout.batch_size}; it must be a multiple of {processes} processes times "
                f"rollout.per_prompt, {rollout.per_prompt}"
            )

    def _load_prompts(self, lm: PreTrainedModel, train_dataset: Rows | None, eval_dataset: Rows | None) -> None:
        """Prompts for training and, where they are others, for evaluation."""
        args = self.args
        held_out = args.eval.prompts is not None or eval_dataset is not None
        longest = args.rollout.max_new_tokens
        if args.eval.every and not held_out:
            longest = max(longest, args.eval.max_new_tokens)
        budget = args.ppo.micro_batch_tokens
        self.prompts = self.eval_prompts = load_prompts(
            args.prompts,
            self.tokenizer,
            seed=args.seed,
            room=room_for_prompts(lm, longest, budget),
            dataset=train_dataset,
        )
        if held_out:
            self.eval_prompts = load_prompts(
                args.eval.prompts or args.prompts,
                self.tokenizer,
                seed=args.seed,
                room=room_for_prompts(lm, args.eval.max_new_tokens, budget),
                dataset=eval_dataset,
                group="eval.prompts",
                dataset_name="eval_dataset",
            )

    def _build(self, lm: PreTrainedModel, peft_config: Any) -> None:
        """Policy, reference, optimizer and learning-rate schedule."""
        args = self.args
        adapted = bool(args.model.lora.rank) or peft_config is not None
        base = ActorCritic(deepcopy(lm), compiled=args.model.compile) if args.kl.coef > 0 and not adapted else None
        self.policy = build_actor_critic(lm, self.tokenizer, args.model, peft_config).to(self.accelerator.device)
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
            eps=args.optim.eps,
        )
        factor = schedule(
            args.optim.schedule,
            warmup=args.optim.warmup,
            total=max(args.run.iterations, args.optim.warmup + 1),
            final_scale=args.optim.final_scale,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self.model, self.optimizer = self.accelerator.prepare(self.policy, optimizer)

    def _end(self, stopped_by: str) -> dict[str, Any]:
        summary = self.record.end(stopped_by, self._save)
        if self.record.main and self.record.history:
            write_report(self.record.folder.path)
        if self.args.run.push_to_hub and self.record.main:
            upload(self.record.folder.path / "policy", self.args.run.push_to_hub)
        return summary

    def _save(self, folder: Path, summary: dict[str, Any]) -> None:
        save_policy(folder, self.policy, self.tokenizer)
        (folder / "README.md").write_text(model_card(self.args, [t.name for t in self.terms], summary))

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage, and tell the callbacks of its beginning and, with its results, of its end."""
        self._tell(f"before_{name}")
        self.stage = name
        results: dict[str, Any] = {}
        started = time.perf_counter()
        yield results
        self.seconds[name] = time.perf_counter() - started
        self._tell(f"after_{name}", **results)

    def _tell(self, event: str, **results: Any) -> None:
        for callback in self.callbacks:
            method: Callable[..., Any] | None = getattr(callback, event, None)
            if method is not None:
                method(self, **results)

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


def trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module that training may change."""
    return [p for p in module.parameters() if p.requires_grad]


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what PyTorch or Python raises when memory runs out; on processors PyTorch has no type for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def with_kl(policy_loss: TokenLoss, estimate: Callable[[Tensor, Tensor], Tensor], ref_logprobs: Tensor) -> TokenLoss:
    """The loss of statistics to which an estimate of the KL, from log-probabilities and the reference's, is added."""
    return lambda now, at: policy_loss(now._replace(kl=estimate(now.logprobs, ref_logprobs[at])), at)
