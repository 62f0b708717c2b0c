"""PPO for language models: one iteration, readable top to bottom, and the run around it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError, EngineLost, naming
from tokencredit.learn import rng
from tokencredit.learn.controllers import EarlyStopping
from tokencredit.learn.experience import Experience
from tokencredit.learn.state import nbytes, sharded_parameters, trainable
from tokencredit.report.page import LARGEST, write_final_report
from tokencredit.runs.folder import read_choices
from tokencredit.runs.loop import Iteration, State, as_trained, run
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import Summary
from tokencredit.settings.fields import check_value, require_config
from tokencredit.settings.foreign_names import refuse_arguments
from tokencredit.settings.run_kind import TEXT, refuse_python
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.text import ppo_setup as setup
from tokencredit.text.audit.completion_auditor import CompletionAuditor
from tokencredit.text.audit.limit import limit_metrics
from tokencredit.text.batch import Batch
from tokencredit.text.callbacks import check_callbacks
from tokencredit.text.credit import Credit
from tokencredit.text.data.datasets import Rows
from tokencredit.text.data.hub import check_push
from tokencredit.text.data.prefixes import choose_spacing, end_event, save_fit
from tokencredit.text.data.stream import BatchStream, share_of_rows
from tokencredit.text.evaluation import check_evaluation_lengths, evaluate
from tokencredit.text.models import run_models
from tokencredit.text.models.critic import folder_names
from tokencredit.text.models.model_loading import check_origin, fingerprint
from tokencredit.text.models.precision import choose_precision
from tokencredit.text.models.run_models import Models, save_policy
from tokencredit.text.models.sharded_loading import Sharding
from tokencredit.text.pipeline import Stages, UnusableBatch, count_step
from tokencredit.text.ppo_learner import build_learner
from tokencredit.text.pretraining import Pretraining
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rollout_passes import rollout_logprobs
from tokencredit.text.run_parts import given_parts, parts_of, with_labels
from tokencredit.text.sources.ahead import CurrentPolicy, SamplesAhead
from tokencredit.text.sources.by_hand import NO_REWARD, LoopByHand
from tokencredit.text.turns.environments import Environments
from tokencredit.text.turns.episode_record import episode_events
from tokencredit.user_code.parts import load_parts


class PPOTrainer(LoopByHand):
    """Trains a causal language model with PPO from a reward on its texts.

    `PPOTrainer().train()` is what `tokencredit train` does; `sample` and `learn` are the same by hand. Arguments have
    the names and types of TRL's GRPOTrainer; omitted ones come from `args`. Global RNG state is preserved.
    """

    def __init__(
        self,
        model: str | torch.nn.Module | None = None,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        callbacks: Iterable[Any] | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        **unknown: Any,
    ):
        """Load everything that a run needs; `train` creates its folder. `ConfigError` names what cannot be used.

        Args:
            model: a hub id, a folder, or a loaded model or PeftModel, trained in place.
            reward_funcs: a function, a reward model, or a list of them, see `rewards.terms.as_terms`; an empty list
                if `learn` is given the scores.
            args: the configuration.
            train_dataset: rows with prompts, as a `datasets.Dataset` or a list of dicts.
            eval_dataset: the same, for evaluation.
            processing_class: the policy's tokenizer.
            peft_config: a PEFT configuration for a new adapter; only the adapter is then trained.
            callbacks: see `text.callbacks.Callback`.
            tools: functions that the policy may call (docs/turns.md).
            environment_factory: a class of environments, or a dict of names to classes.
            unknown: refused; the message has the keys for TRL's names.
        """
        refuse_arguments(unknown, [*signature(PPOTrainer).parameters][:-1])
        callbacks = check_callbacks(callbacks)
        args, reward_funcs = setup.with_reward(require_config(args, PPOConfig), reward_funcs)
        played = environment_factory is not None or bool(tools)
        setup.check_arguments(args, model, processing_class, peft_config, train_dataset, eval_dataset, played)
        if model is not None:
            name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
            args = replace(args, model=replace(args.model, name=name))
        own = {"reward_funcs": reward_funcs, "environment_factory": environment_factory, "peft_config": peft_config}
        rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "tools": tools or None}
        loaded = {"model": None if isinstance(model, str) else model, "processing_class": processing_class}
        given = given_parts(args, own | rows | loaded | {"callbacks": callbacks or None})
        refuse_python(args, f"{args.run.dir or 'RUN'}/config.yaml", given)
        self.processes = Processes(args.run.timeout)
        setup.check_batch_size(args, self.processes.count)
        with rng.isolated():
            rng.seed_all(args.seed)  # for draws by libraries, such as new layers' weights, and by user code
            self.loaded = load_parts(args)  # with a user's functions in place of their names
            environments = setup.environments_of(args, environment_factory, tools)
            terms = setup.load_terms(args, reward_funcs, self.processes.device, environments)
            sharding = Sharding.of(args, self.processes)
            with naming("model.name" if model is None else "model"):
                lm, self.tokenizer = run_models.load_start(args.model, model, processing_class, sharding)
            precision = choose_precision(args.model.dtype, self.processes, args.run.dir)
            replace(args, model=replace(args.model, dtype=precision.dtype))  # checked with the dtype that `auto` picks
            prepared = setup.prepare_rows(args, lm, self.tokenizer, environments, train_dataset, eval_dataset)
            self.prompts, self.eval_prompts = prepared
            before = None if args.run.dir is None else read_choices(Path(args.run.dir)).get("critic.prefix_every")
            chosen = choose_spacing(self.loaded, terms, lm, self.prompts, before)
            self.prefix_every = 0 if chosen.critic.prefix_every == "auto" else chosen.critic.prefix_every
            choices = precision.choices | ({} if chosen is self.loaded else {"critic.prefix_every": self.prefix_every})
            self.record = RunRecord(args.run, self.processes, TEXT, choices, show_every=args.run.show_every)
            self.origin = fingerprint(lm, self.tokenizer)
            self.record.parts = parts_of(args, given, *prepared, self.origin)
            self.args = with_labels(args, given, self.record.parts)
            parts = lm, self.tokenizer, precision, peft_config, model is None or isinstance(model, str), sharding
            models = run_models.build_models(chosen, *parts)
            setup.check_terms(terms, models, self.prompts, self.eval_prompts)
            self.rng = rng.random_state()
        self._assemble(models, terms, environments, callbacks)

    def _assemble(
        self, models: Models, terms: list[Term], environments: Environments | None, callbacks: list[object]
    ) -> None:
        args, self.policy, self.reference = self.loaded, models.policy, models.reference
        self.sharded = is_sharded(self.policy.lm)
        of_run = self.processes, environments, self.record.event, self.prefix_every
        self.pipeline = setup.build_pipeline(args, models, terms, *of_run)
        remarks = setup.remarks(args, self.prompts, sharded=self.sharded, by_hand=self.handed_scores is not None)
        self.notes = [*models.notes, *self.pipeline.engine.notes, *remarks]
        check_evaluation_lengths(args, self.pipeline, self.eval_prompts)
        self.rows = args.rollout.batch_size
        first = share_of_rows(self.processes, self.rows, args.rollout.per_prompt).start
        self.credit = Credit(args, self.processes.sum, first)
        self.pipeline.fit = self.credit.prefixes
        self.auditor = CompletionAuditor(self.pipeline, self.credit, self.prompts, args.audit)
        self.learner, self.stages = build_learner(args, models, self.processes), Stages(self, callbacks)
        self.stopping = EarlyStopping(reward=args.stop.reward, kl=args.stop.kl, patience=args.stop.patience)
        self.stream = BatchStream(self.prompts, args.rollout, self.processes, seed=2 * args.seed)
        self.source = CurrentPolicy(self.pipeline, self.stream)
        if args.rollout.max_age:
            self.source = SamplesAhead(self.pipeline, self.stream, args, self.record.event)
        self.pretrained: dict[str, float] | None = None
        """Metrics of value pretraining; empty if there is none, None before it."""
        self.reported: set[str] = set()
        """What was reported once: metrics of problems with episodes, the end of prefixes, what calls handed over."""
        self.updated: dict[str, float] | None = None
        """Metrics of the iteration's update; None until it is complete."""

    def train(self, resume_from_checkpoint: bool = False) -> Summary:
        """Run all iterations, write the run's folder, and return its summary.

        Args:
            resume_from_checkpoint: resume the interrupted run in `run.dir`; see docs/resuming.md.

        Raises:
            ConfigError: `run.dir` is in use, or holds no run that can be resumed with these settings.
            RunStopped: losses, gradients or rewards were not finite several times in a row, a reward could not be
                computed, a file could not be written, or memory ran out. The policy trained so far is saved.
            KeyboardInterrupt: after the policy is saved, except in a notebook; after a second, at once.
        """
        if self.handed_scores is not None:
            raise ConfigError(f"train() needs a reward: {NO_REWARD}")
        if self.remaining is not None:
            raise ConfigError("this run was begun by hand: go on with learn(batch), or close() and resume it")
        with rng.isolated():
            rng.set_random_state(self.rng)
            try:
                return run(self, **self.start(resume_from_checkpoint))
            finally:
                self.source.close()

    def start(self, resume: bool) -> dict[str, Any]:
        """Arguments of `runs.loop.steps`."""
        self.stages.seconds.clear()
        if self.args.run.push_to_hub is not None and self.processes.main:
            check_push(self.args.run.push_to_hub)
        for line in filter(None, (prompts.dropped() for prompts in dict.fromkeys([self.prompts, self.eval_prompts]))):
            self.record.screen.say(line)
        reserve = nbytes(self.policy.parameters()) * (2 if self.args.eval.every else 1) + LARGEST + 2**20
        trained = nbytes(trainable(self.policy))
        return {"resume": resume, "reserve": reserve, "weights": trained, "first": self.pretrain()}

    def audit(self, settings: AuditConfig | None = None, estimator: Any = None) -> dict[str, Any]:
        """Audit the policy, trained here or before in `run.dir`, as docs/audit.md says; writes it down and returns it.

        `settings` are its size, by default those of `args.audit` with all states; `estimator` is compared as well.
        """
        if self.handed_scores is not None:
            raise ConfigError(f"no audit: it needs a reward: {NO_REWARD}")
        check_value("settings", settings, AuditConfig | None, {})
        as_trained(self)
        audit = self.auditor.beside(estimator).write(self.record, settings)
        write_final_report(self.record)
        return audit

    def overview(self) -> Iterator[tuple[str, str]]:
        """Model, prompts, reward, device and folder: pairs of a label and a text."""
        configured = "reward_funcs" not in self.args.python
        return setup.overview(self.args, self.pipeline, self.prompts, configured, self.record.folder.path)

    def pretrain(self) -> Iterator[None]:
        """Pretrain the critic, one batch per step, unless the run is resumed."""
        if self.pretrained is not None or not self.args.critic.pretrain:
            return
        stream = BatchStream(self.prompts, self.args.rollout, self.processes, seed=~self.args.seed)
        pretraining = Pretraining(self.args, stream, self.pipeline, self.credit, self.learner, self.record)
        self.pretrained = yield from pretraining.batches()
        if self.record.due(0, last=False):
            self.record.checkpoint(0, *self.state())

    def iteration(self, number: int) -> Iteration:
        """Collect completions, assign credit, update; returns the iteration's metrics and samples."""
        # Kept until weights change: an iteration that fails before can be done again, here or in a resumed run.
        self.before = (self.handed and self.before) or self._loop_state()
        with self.stages("iteration") as results:
            metrics: dict[str, float] = {"iteration": number} | self.learner.set_rates(number)
            metrics |= self.pretrained or {} if number == 1 else {}
            samples: list[dict[str, Any]] = []
            self.progress, self.updated = (metrics, samples), None
            try:
                # 1. Collect: completions of the policy, with log-probs of the reference model and scores.
                scored = self.collect()
                # 2. Assign credit: reward, advantage and return of each token.
                batch, experience = self.credit.give(scored)
                self.last = self.handed and batch
                events = episode_events(batch.episodes or ()) | end_event(self.credit.prefixes, self.tokenizer)
                for own in map(json.loads, self.processes.texts(json.dumps(events))):
                    for name, line in own.items():
                        self._report_once(name, line)
            except UnusableBatch as bad:
                # Nothing is learned from a batch with numbers that are not finite; too many of them end the run.
                self.record.bad_step(number, str(bad), bad.rollout.inputs(), diverged=bad.diverged, texts=bad.texts)
                self.before, self.updated = None, {}  # the batch is counted
                tokens = float(self.processes.sum(bad.rollout.mask.sum()))
                metrics |= {"reward": math.nan, "tokens": tokens, "steps": 0, "bad_steps": 1}
            else:
                # The batch is measured before it is learned from.
                metrics |= batch.metrics(self.processes, self.credit.shaped(batch)) | self.credit.metrics()
                metrics |= limit_metrics(batch, metrics.get("kl"), self.credit, self.processes, self.record.history)
                # 3. Update policy and critic, and give the engine their weights.
                metrics |= self.update(number, batch, experience, metrics.get("kl"))
                samples += self._samples(number, batch, experience)
            # 4. Evaluate and audit if due. What is returned here, `runs.loop.run` writes down.
            if self.args.eval.every and number % self.args.eval.every == 0:
                metrics |= self.evaluate()
            if self.args.audit.every and number % self.args.audit.every == 0:
                metrics |= self.auditor.measure(number, self.stages, self.record)
            results |= {"metrics": metrics, "samples": samples}
        metrics |= self.stages.times(metrics["tokens"])
        return self.progress

    def learned(self) -> Iteration | None:
        """Metrics and samples so far of an iteration that failed after its update; None if it failed before."""
        if self.updated is None or self.progress is None:
            return None
        metrics = {k: x for k, x in (self.progress[0] | self.updated).items() if isinstance(x, Real)}  # callbacks' too
        return metrics | self.stages.times(metrics["tokens"]), self.progress[1]

    def collect(self) -> Batch:
        """Sample the next batch from the current policy, and score it; errors as in `Pipeline.collect`."""
        later = max(self.args.run.iterations - len(self.record.history) - 1, 0)
        batch = self.handed or self.pipeline.drawn(partial(self.source.sample, later), **self.drawing())
        return self.scored(batch)

    def update(self, number: int, batch: Batch, experience: Experience, kl: float | None = None) -> dict[str, float]:
        """Train policy and critic on a batch of this KL; returns metrics."""
        self.learner.objective = self.learner.objective.changed(kl_coef=self.credit.kl.coef)
        with self.stages("update") as results, self.pipeline.precision.updates():
            on_step, each = partial(count_step, self.record, number, batch), self.stages.caller("after_minibatch")
            self.before = None
            metrics = results["metrics"] = self.learner.update(experience, on_step=on_step, each=each)
            if kl is not None:  # the coefficient of the next iteration follows the KL of this one's samples
                self.credit.kl.update(kl, self.rows)
            elif self.args.kl.target is not None or self.args.stop.kl is not None:
                without = "kl.target and stop.kl pass over batches that the current policy did not draw"
                self._report_once("kl", f"{without}: their KL is not known")
            self.updated = dict(metrics)  # whatever fails from here on, the iteration counts
        self.pipeline.weights_changed(self.record.event)
        self.source.weights_changed()
        return metrics

    def _samples(self, number: int, batch: Batch, experience: Experience) -> list[dict[str, Any]]:
        """This iteration's records of completions: first rows of all processes, with log-probs after the update."""
        count, first = self.args.run.samples, self.credit.first
        if not count:
            return []
        rollout = batch.rollout if count == "all" else batch.rollout.head(max(count - first, 0))
        used = self.learner.used_advantages(experience, first, self.rows)
        logprobs: Tensor = rollout.logprobs
        if len(rollout.mask) or self.pipeline.lockstep is not None:
            with self.pipeline.precision.no_grad():
                temperature, budget = self.args.rollout.temperature, self.pipeline.budget
                logprobs = rollout_logprobs(self.policy, rollout, temperature, budget, self.pipeline.lockstep)
        samples = batch.samples(self.tokenizer, range(len(logprobs)), logprobs, used)
        if self.processes.count > 1:
            samples = [sample for text in self.processes.texts(json.dumps(samples)) for sample in json.loads(text)]
        return [{"iteration": number, **sample} for sample in samples]

    def evaluate(self) -> dict[str, float]:
        """Evaluate the policy, and save it to `best/` if its reward is the best so far.

        Returns the metrics; none if a number is not finite, or the engine is lost.
        """
        try:
            with self.stages("evaluation") as results, rng.preserved():  # a reward may draw from the global generators
                metrics = results["metrics"] = evaluate(self.pipeline, self.eval_prompts, self.args)
        except (UnusableBatch, EngineLost) as error:
            self.record.event(f"an evaluation is skipped: {error}")
            return {}
        if self.processes.first(metrics["eval/reward"] > self.record.best and self.record.folder.path.is_dir()):
            with self.record.replaced(*folder_names("best", self.policy.critic), in_all=self.sharded) as folders:
                if folders is not None:
                    self._save(folders[0], None, *folders[1:])
        return metrics

    def state(self) -> tuple[State, State]:
        """Resumable state: the part that all processes share, and this process's own."""
        state = self._loop_state()
        random = state.pop("random")
        return state | {"origin": self.origin} | self.learner.state(), {"random": random}

    def _loop_state(self) -> State:
        """Resumable state other than the learner's."""
        return {
            **self.source.state_dict(),
            "pretrained": self.pretrained or {},
            "credit": self.credit.state_dict(),
            "random": rng.random_state(),
        }

    def sharded_tensors(self) -> dict[str, Tensor]:
        """The sharded parameters, by name."""
        return sharded_parameters(self.policy)

    def load(self, state: State, changed: set[str]) -> Sequence[str]:
        """Restore `state`, with the second part as `process`, if of this model; `changed` are keys of settings."""
        check_origin(state["origin"], self.origin, self.args.model.name)
        self.learner.load(state)
        rewards = ("reward", "env.factory", "environment_factory", "tools")
        of_rewards = dict.fromkeys(("baseline", "prefixes", "lam_choice"), (*rewards, "score."))
        for part, groups in {"kl": ("kl.",), "scores": rewards, **of_rewards}.items():
            if any(key.startswith(groups) for key in changed):  # it begins anew
                del state["credit"][part]
        self._restore(state | {"random": state["process"]["random"]})
        self.pipeline.engine.weights_changed()
        return ()

    def _restore(self, state: State) -> None:
        self.source.load_state_dict(state)
        self.pretrained = state.get("pretrained", {})
        self.credit.load_state_dict(state["credit"])
        rng.set_random_state(state["random"])

    def rewind(self) -> tuple[State, State] | None:
        """Restore the start of a failed iteration unless it changed weights, in all processes; its state if so."""
        if not self.processes.all(self.before is not None) or self.before is None:
            return None
        self._restore(self.before)
        return self.state()

    def finish(self, stopped_by: str) -> Summary:
        """Write policy, summary, audit and report, upload the policy of a run at its end, and return the summary."""
        _, *more = folder_names("policy", self.policy.critic)
        summary = self.record.end(stopped_by, self._save, *more, in_all=self.sharded)
        if self.handed_scores is None:  # which nobody hands of fresh completions
            self.auditor.at_end(summary, self.stages, self.record)
        setup.write_card(self.args, self.pipeline, self.record, summary, self.reported)
        write_final_report(self.record)
        self.record.next_steps(setup.next_steps(self.args))
        setup.upload_policy(self.args.run, self.record, stopped_by)
        return summary

    def _save(self, folder: Path, _: Summary | None = None, beside: Path | None = None) -> None:
        save_policy(folder, self.policy, self.tokenizer, beside, writes=self.processes.main)
        if (every := self.pipeline.prefix_every) and beside is not None and self.processes.main:
            save_fit(beside, self.credit.prefixes, every)
