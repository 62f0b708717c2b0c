"""PPO for language models: one iteration, readable top to bottom, and the run around it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from tokencredit.errors import ConfigError, OutOfMemory
from tokencredit.learn.experience import Experience
from tokencredit.learn.optim import schedule, set_rates
from tokencredit.learn.rng import from_text, random_state, set_random_state, to_text
from tokencredit.learn.state import (
    load_optimizer_state,
    load_trained_weights,
    optimizer_state,
    trainable,
    trained_weights,
)
from tokencredit.learn.stopping import EarlyStopping
from tokencredit.learn.update import Evaluation, NonFiniteUpdate, Objective, everywhere, ppo_update
from tokencredit.report.page import LARGEST, write_report
from tokencredit.runs.folder import replacing
from tokencredit.runs.loop import State, run
from tokencredit.runs.recorder import RunRecord
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import Batch
from tokencredit.text.card import model_card
from tokencredit.text.credit import Credit
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.sampling import Rollout, sample
from tokencredit.text.evaluation import evaluate
from tokencredit.text.memory import out_of_memory
from tokencredit.text.models.actor_critic import width
from tokencredit.text.models.loading import (
    check_language_model,
    end_ids,
    fingerprint,
    load_language_model,
    load_tokenizer,
    save_policy,
    upload,
)
from tokencredit.text.models.precision import choose, this_process
from tokencredit.text.rewards.calls import NonFiniteReward
from tokencredit.text.rewards.terms import Scores, as_terms, build_terms, score
from tokencredit.text.scoring_passes import Reference, critic_values, evaluate_rollout, refer, rollout_logprobs
from tokencredit.text.setup import check_batch_size, prepare_models, prepare_prompts

if TYPE_CHECKING:
    from tokencredit.text.data.datasets import Rows


MEMORY_ADVICE = {
    "rollout": "lower rollout.batch_size or rollout.max_new_tokens",
    "reward": "lower the batch_size of the reward's terms",
    "evaluation": "lower eval.samples or eval.max_new_tokens",
}
"""What to do when a stage runs out of memory."""


class UnusableBatch(Exception):
    """Completions with something about them that is not finite, from which nothing can be learned."""

    def __init__(self, reason: str, rollout: Rollout, texts: list[str]):
        super().__init__(reason)
        self.rollout, self.texts = rollout, texts


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
        check_batch_size(args, self.accelerator.num_processes)
        self.end_ids = end_ids(lm, self.tokenizer)
        self.prompts, self.eval_prompts = prepare_prompts(args, lm, self.tokenizer, train_dataset, eval_dataset)
        self.origin = fingerprint(lm, self.tokenizer)
        models = prepare_models(args, lm, self.tokenizer, peft_config, self.accelerator)
        self.policy, self.reference, self.model, self.optimizer = vars(models).values()
        self.lr_factor = schedule(
            args.optim.schedule,
            warmup=args.optim.warmup,
            total=max(args.run.iterations, args.optim.warmup + 1),
            final_scale=args.optim.final_scale,
        )
        self.credit = Credit(args, self._all_sum)
        self.stopping = EarlyStopping(reward=args.stop.reward, kl=args.stop.kl, patience=args.stop.patience)
        self.drawn = 0
        """Completions sampled so far, which is where the sequence of prompts stands."""
        self.before: tuple[State, State] | None = None
        """What was remembered, beside weights, when the iteration began; None once it changes weights."""
        self.seconds: dict[str, float] = {}

    def train(self, resume_from_checkpoint: bool = False) -> dict[str, Any]:
        """Run all iterations, leave the run's folder behind, and return its summary.

        Args:
            resume_from_checkpoint: go on in `run.dir` where a run was cut short; docs/resuming.md says how.

        Raises:
            ConfigError: `run.dir` is in use, or holds nothing that can go on with these settings.
            RunStopped: losses, gradients or rewards were not finite several times in a row, a reward could not be
                computed, a file not be written, or memory ran out. What was trained until then is kept.
            KeyboardInterrupt: likewise kept, then passed on; after a second Ctrl-C nothing more is written.
        """
        weights = sum(p.numel() * p.element_size() for p in self.policy.parameters())
        trained = sum(p.numel() * p.element_size() for p in trainable(self.policy))
        for prompts in dict.fromkeys((self.prompts, self.eval_prompts)):
            if left_out := prompts.left_out():
                self.record.screen.say(left_out)
        reserve = weights * (2 if self.args.eval.every else 1) + LARGEST + 2**20
        return run(self, resume=resume_from_checkpoint, reserve=reserve, weights=trained)

    def iteration(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample, score, give credit, update: returns the iteration's metrics and samples."""
        self.before = self.standing()
        self.seconds = {}
        with self._stage("iteration") as results:
            lr, *_, value_lr = set_rates(self.optimizer, self.lr_factor(number - 1))
            metrics: dict[str, float] = {"iteration": number}
            samples: list[dict[str, Any]] = []
            try:
                batch, experience = self.collect()
            except UnusableBatch as bad:
                self.record.bad_step(number, str(bad), bad.rollout.inputs(), texts=bad.texts)
                metrics |= {"reward": math.nan, "tokens": float(bad.rollout.mask.sum()), "steps": 0, "bad_steps": 1}
            else:
                metrics |= batch.metrics(self._all_sum, self.accelerator) | {"kl_coef": self.credit.kl.coef}
                metrics |= self.update(number, batch, experience)
                if "kl" in metrics:
                    self.credit.kl.update(metrics["kl"], self.args.rollout.batch_size)
                if number % self.args.run.samples_every == 0 or number in (1, self.args.run.iterations):
                    kept = batch.samples(self.tokenizer, self._logprobs_now(batch))
                    samples = [{"iteration": number, **sample} for sample in kept]
            metrics |= {"lr": lr, "value_lr": value_lr}
            if self.args.eval.every and number % self.args.eval.every == 0:
                metrics |= self.evaluate()
            results |= {"metrics": metrics, "samples": samples}
        seconds = self.seconds.pop("iteration")
        metrics |= {"seconds": seconds, **{f"seconds/{stage}": spent for stage, spent in self.seconds.items()}}
        metrics["tokens_per_second"] = metrics["tokens"] / seconds
        return metrics, samples

    def collect(self) -> tuple[Batch, Experience]:
        """Sample a batch from the policy as it is, score it, and give each token its credit.

        Raises:
            UnusableBatch: a log-probability, value or reward is not finite.
            RewardError: a reward cannot be had.
        """
        args = self.args
        total = args.rollout.batch_size
        share = total // self.accelerator.num_processes
        first = share * self.accelerator.process_index
        prompts = self.prompts.batch(self.drawn + first, share, args.rollout.per_prompt)
        self.drawn += total
        uniforms = torch.rand(total, args.rollout.max_new_tokens, generator=self.sampling)[first : first + share]
        with self._stage("rollout") as results:
            rollout = results["rollout"] = self.roll(prompts, uniforms)
        with self._stage("reference") as results:
            reference = results["reference"] = self._refer(rollout, args.rollout.temperature)
        completions = rollout.texts(self.tokenizer)
        texts = [prompt + completion for prompt, completion in zip(prompts.texts, completions, strict=True)]
        said = [x for x in (rollout.logprobs, rollout.values, reference.kl) if x is not None]
        if not everywhere(all(bool(x.isfinite().all()) for x in said), self.accelerator):
            raise UnusableBatch("a log-probability, value or KL of a completion is not finite", rollout, texts)
        with self._stage("reward") as results:
            rated = results["scores"] = self.score(prompts, rollout, completions, reference, texts)
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

    def score(
        self, prompts: PromptBatch, rollout: Rollout, completions: list[str], reference: Reference, texts: list[str]
    ) -> Scores:
        """What the reward's terms say of this process's completions.

        Raises:
            UnusableBatch: a reward is not finite, in any process.
            RewardError: a reward cannot be had.
        """
        columns = prompts.columns | rollout.columns(reference.logprobs)
        rated, wrong = None, "a reward term is not finite in another process"
        try:
            rated = score(
                self.terms, prompts.prompts, prompts.answers(completions), columns, rollout.mask.sum(1).tolist()
            )
        except NonFiniteReward as error:
            wrong = str(error)
        if not everywhere(rated is not None, self.accelerator) or rated is None:
            raise UnusableBatch(wrong, rollout, texts)
        return rated

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
        self.before = None
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
                on_step=partial(self._on_step, number, batch),
            )
        return metrics

    def _on_step(self, number: int, batch: Batch, minibatch: Experience, error: NonFiniteUpdate | None) -> None:
        """Count the steps in a row that could not be taken, and keep their minibatches."""
        if error is None:
            self.record.bad_in_a_row = 0
            return
        text = None if error.row is None else batch.prompts[error.row] + batch.completions[error.row]
        reason = str(error) if text is None else f"{error.term} of the text {text!r} is not finite"
        self.record.bad_step(number, reason, minibatch.tensors(), text=text)

    def state(self) -> tuple[State, State]:
        """Everything that the next iteration depends on: what all processes share, and this process's own."""
        shared, own = self.standing()
        weights = {"weights": trained_weights(self.policy), "optimizer": optimizer_state(self.optimizer)}
        return shared | weights, own

    def standing(self) -> tuple[State, State]:
        """The same without weights and what belongs to them."""
        shared = {
            "origin": self.origin,
            "drawn": self.drawn,
            "credit": self.credit.state_dict(),
            "sampling": to_text(self.sampling.get_state()),
        }
        return shared, {"shuffling": to_text(self.shuffling.get_state()), "random": random_state()}

    def load(self, state: State, changed: set[str]) -> Sequence[str]:
        """Go on from what `state` gave, its second part under `process`; `changed` are keys with new settings.

        Raises:
            ConfigError: the model or tokenizer is not the one that the run began with.
        """
        for part, now in self.origin.items():
            if state["origin"][part] != now:
                raise ConfigError(
                    f"the {part} that model.name {self.args.model.name!r} stands for is not what it was when this run "
                    "began; bring it back, or begin a new run"
                )
        try:
            load_trained_weights(self.policy, state["weights"])
            load_optimizer_state(self.optimizer, state["optimizer"])
        except ValueError as error:
            raise ConfigError(f"the checkpoint does not fit this model: {error}") from error
        if any(key.startswith("kl.") for key in changed):
            del state["credit"]["kl"]
        self._stand(state, state["process"])
        return ()

    def _stand(self, shared: State, own: State) -> None:
        self.drawn = shared["drawn"]
        self.credit.load_state_dict(shared["credit"])
        self.sampling.set_state(from_text(shared["sampling"]))
        self.shuffling.set_state(from_text(own["shuffling"]))
        set_random_state(own["random"])

    def rewind(self) -> bool:
        """Go back to the beginning of the iteration that failed, if it has changed no weights; whether it could.

        With several processes nobody knows how far the others are.
        """
        if self.before is None or self.accelerator.num_processes > 1:
            return False
        self._stand(*self.before)
        return True

    def evaluate(self) -> dict[str, float]:
        """Measure the policy on the evaluation prompts, and keep it in `best/` if it never did as well.

        There is no measure, in one process, if a reward is not finite; it stops the run with several.
        """
        try:
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
        except NonFiniteReward as error:
            if self.accelerator.num_processes > 1:
                raise  # the others wait for a mean
            self.record.event(f"an evaluation is left out: {error}")
            return {}
        if metrics["eval/reward"] > self.record.best and self.record.main and self.record.folder.path.is_dir():
            with replacing(self.record.folder.path / "best") as folder:
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

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """Write what a run leaves at its end: policy, summary and report; returns the summary."""
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
        results: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            yield results
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            advice = MEMORY_ADVICE.get(name, "lower ppo.micro_batch_tokens, or set model.gradient_checkpointing")
            raise OutOfMemory(f"out of memory in its {name} stage; {advice}") from error
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


def with_kl(policy_loss: TokenLoss, estimate: Callable[[Tensor, Tensor], Tensor], ref_logprobs: Tensor) -> TokenLoss:
    """The loss of statistics to which an estimate of the KL, from log-probabilities and the reference's, is added."""
    return lambda now, at: policy_loss(now._replace(kl=estimate(now.logprobs, ref_logprobs[at])), at)
