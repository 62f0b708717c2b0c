"""PPOTrainer with TRL's arguments, over `tokencredit.PPOTrainer`: `train`, or `generate` and `step`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import seed_all
from tokencredit.runs.folder import RunFolder, saved
from tokencredit.runs.summary import OPEN_END
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig, RunConfig
from tokencredit.text.data.hub import upload
from tokencredit.text.models.critic import critic_folder
from tokencredit.text.models.model_loading import weights_digest
from tokencredit.text.models.peft_models import attached
from tokencredit.text.models.run_models import save_policy
from tokencredit.text.ppo_trainer import PPOTrainer as Trainer
from tokencredit.text.rewards.calls import Term
from tokencredit.trl.arguments import (
    CONFIG,
    MODEL,
    ROWS,
    TOKENIZER,
    VALUE_HEAD_MODEL,
    RewardOfIds,
    check_value_model,
    equal,
    fitting,
    id_tensors,
    of_optimizer,
    padded,
    prompts_of,
    require,
    trl_terms,
)
from tokencredit.trl.config import PPOConfig as Config
from tokencredit.trl.config import further, refuse_unknown, settings_of
from tokencredit.trl.metrics import Relay, statistics
from tokencredit.trl.value_head import AutoModelForCausalLMWithValueHead, choose_adapter, freeze_layers, same_but_head

ONLY_NEW = {"args", "processing_class", "policy", "ref_policy", "reward_model", "value_model", "train_dataset"}
"""Arguments of TRL 0.12 to 1.9, not of its loop before."""


class PPOTrainer:
    """TRL's PPOTrainer: that of 0.12 to 1.9, or that of 0.11 and before, as the arguments say.

    Attributes:
        trainer: the trainer of Tokencredit that does the work.
    """

    trainer: Trainer
    args: Any = None
    model: Any
    tokenizer: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> PPOTrainer:
        """A trainer of the version whose arguments these are."""
        if issubclass(cls, TrainingTrainer | SteppingTrainer):
            return super().__new__(cls)
        if cls is not PPOTrainer:
            bases = "TrainingTrainer (which has train) or SteppingTrainer (step)"
            raise ConfigError(f"{cls.__name__} must be a subclass of {bases} of tokencredit.trl.trainers")
        new = ONLY_NEW & kwargs.keys() or (len(args) > 1 and isinstance(args[1], PreTrainedTokenizerBase))
        chosen = TrainingTrainer if new else SteppingTrainer
        refuse_unknown("PPOTrainer", kwargs, [*signature(chosen.__init__).parameters][1:])
        return super().__new__(chosen)

    @property
    def accelerator(self) -> Any:
        """An Accelerator of the same processes, for scripts that prepare something or ask for the device."""
        return Accelerator(cpu=self.trainer.processes.device.type == "cpu")

    def save_pretrained(self, folder: Any) -> None:
        """Save the policy, or its adapter, with the tokenizer; a critic without a trunk into FOLDER-critic."""
        policy, folder = self.trainer.policy, Path(folder)
        head = policy.critic is not None and policy.critic.trunk is None
        beside = folder.parent / critic_folder(folder.name) if head else None
        save_policy(folder, policy, self.trainer.tokenizer, beside, writes=self.trainer.processes.main)

    def push_to_hub(self, repo_id: str | None = None, *, private: bool | None = None, **others: Any) -> None:
        """Upload the policy to `repo_id`, else `hub_model_id`, else a repository named as the run's folder.

        A new repository is private by `private`, else `hub_private_repo`.
        """
        self.say([f"{name}: push_to_hub does not read it" for name in others])
        run = self.trainer.record.folder.path
        self.save_pretrained(run / "policy")
        private = getattr(self.args, "hub_private_repo", None) if private is None else private
        if self.trainer.processes.main:
            upload(run / "policy", repo_id or getattr(self.args, "hub_model_id", None) or run.name, private)

    def audit(self, settings: AuditConfig | None = None) -> dict[str, Any]:
        """`tokencredit.PPOTrainer.audit`, to which a run's last lines lead."""
        return self.trainer.audit(settings)

    def say(self, lines: Sequence[str]) -> None:
        """Say once what is not honoured."""
        if lines:
            warnings.warn("of TRL's settings, these are not honoured: " + "; ".join(lines), stacklevel=3)
        for line in lines:
            self.trainer.record.log(f"not honoured: {line}")

    def take_reference(self, given: Any, same: bool) -> None:
        """Let the reference model be the given one, unless that is the `same`; `ConfigError` if it cannot be."""
        reference = self.trainer.pipeline.reference
        if reference is None or same:
            return
        if reference is self.trainer.policy:
            raise ConfigError("ref_model differs from model, and with an adapter the reference is model without it")
        try:
            reference.lm.load_state_dict(given.state_dict())
        except RuntimeError as error:
            raise ConfigError(f"ref_model is not of the model's architecture: {error}") from error
        self.trainer.record.parts["ref_model"] = {"name": type(given).__name__, "digest": weights_digest(given)}

    def responses(
        self,
        queries: Sequence[Tensor],
        batch_size: int,
        lengths: Callable[[], int] | None = None,
        model: Any = None,
        whole: bool = False,
        **generation_kwargs: Any,
    ) -> list[Tensor]:
        """Responses by a model's own `generate`, up to their end-of-sequence token unless `whole`."""
        device, found = self.trainer.processes.device, []
        model, ends = model or self.model, torch.tensor(self.trainer.pipeline.engine.end_ids, device=device)
        for first in range(0, len(queries), batch_size):
            inputs = padded(queries[first : first + batch_size], device, "left")
            length = {} if lengths is None else {"max_new_tokens": lengths()}
            with self.trainer.pipeline.precision.no_grad():
                sampled = model.generate(**inputs, **generation_kwargs | length)
            for row in sampled[:, inputs["input_ids"].shape[1] :]:
                at = torch.isin(row, ends).nonzero()[:, 0].tolist()
                found.append(row[: at[0] + 1] if at and not whole else row)
        return found


class TrainingTrainer(PPOTrainer):
    """The trainer of TRL 0.12 to 1.9: `train()` does everything."""

    def __init__(
        self,
        args: Any = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: Any = (None, None),
        callbacks: Any = None,
        peft_config: Any = None,
        *,
        config: Any = None,
        tokenizer: Any = None,
        policy: Any = None,
        ref_policy: Any = None,
    ):
        """Build the trainer from TRL's arguments; the last four are names of 0.12.0."""
        self.args, self.tokenizer, self.model = args or config, processing_class or tokenizer, model or policy
        self.ref_model, self.value_model, self.processing_class = ref_model or ref_policy, value_model, self.tokenizer
        self._check_types(reward_model=reward_model, train_dataset=train_dataset)
        if optimizers not in (None, (None, None)):
            raise ConfigError("optimizers would train otherwise than args say; set learning_rate and lr_scheduler_type")
        if self.args.push_to_hub and self.args.hub_private_repo:
            way = "leave push_to_hub out, and call trainer.push_to_hub()"
            raise ConfigError(f"hub_private_repo is true, and a run makes no private repository at its end; {way}")
        own, here = fitting(self.tokenizer, self.model), further(self.args)
        train_dataset = prompts_of(train_dataset, self.tokenizer)
        self.eval_dataset = eval_dataset and prompts_of(eval_dataset, self.tokenizer, "eval_dataset")
        self.relay = Relay(self, callbacks)
        self.state = self.relay.state
        choose_adapter(self.model, self.args.model_adapter_name, self.args.ref_adapter_name)
        processes = Processes(here.get("run.timeout", RunConfig().timeout))
        world = processes.count
        settings, lines = settings_of(self.args, old=False, rows=len(train_dataset), world_size=world)
        run = (settings | here).get("run.dir")
        run = processes.texts(str(RunFolder(run and str(run)).path))[0]
        settings |= self._stops() | self._critic(own, processes, run) | {"prompts.column": "input_ids"} | here
        settings["run.dir"] = run
        # As TRL does; a change is said and written down.
        settings["run.allow_changed"] = ["reward_funcs", "reward", "callbacks", *settings.get("run.allow_changed", ())]
        if type(data_collator) not in (type(None), DataCollatorWithPadding):
            lines.append("data_collator: prompts are input_ids, padded by a mask")
        if isinstance(reward_model, nn.Module):
            reward_model = Term("reward_model", 1.0, RewardOfIds(reward_model, self.tokenizer, processes.device))
        parts = {"processing_class": own, "peft_config": peft_config, "callbacks": [self.relay]}
        same = equal(self.ref_model, self.model)  # an adapter changes the model in place
        with trl_terms(settings["critic.name"]):
            self.trainer = Trainer(self.model, reward_model, PPOConfig.from_dict(settings), train_dataset, **parts)
        self.model = self.policy_model = attached(self.trainer.policy.lm) or self.trainer.policy.lm
        used = self.trainer.args
        batch, batches = used.rollout.batch_size, used.run.iterations
        self.state.max_steps = batches
        self.state.num_train_epochs = batches * batch / len(train_dataset)  # type: ignore[assignment]  # as TRL has it
        self.state.is_world_process_zero = self.state.is_local_process_zero = processes.main
        totals = {"num_total_batches": batches, "total_episodes": batches * batch}
        totals |= {"local_batch_size": batch // world, "mini_batch_size": batch // used.ppo.minibatches}
        self.args.use(old=False, world_size=world, batch_size=batch, **totals)
        self.take_reference(self.ref_model, same)
        self.say([*lines, *self.relay.lines])

    def _check_types(self, **given: Any) -> None:
        """Raise `ConfigError` for an argument that is missing, one of those `given` too, or of another type."""
        needed = {"args": self.args, "processing_class": self.tokenizer, "model": self.model} | given
        if missing := [name for name, value in needed.items() if value is None]:
            raise ConfigError(f"PPOTrainer needs {', '.join(missing)}")
        require(Config, CONFIG, args=self.args)
        require(PreTrainedTokenizerBase, TOKENIZER, processing_class=self.tokenizer)
        require(nn.Module | None, MODEL, model=self.model, ref_model=self.ref_model)

    def train(self, resume_from_checkpoint: bool = False) -> Any:
        """Train; the policy is then in `output_dir`/policy too."""
        self.relay.fire("on_train_begin")
        try:
            with trl_terms():
                return self.trainer.train(resume_from_checkpoint)
        finally:
            self.relay.fire("on_train_end")

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback or its class."""
        self.say(self.relay.add(callback))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy with the tokenizer, into `output_dir` of the arguments by default."""
        self.save_pretrained(output_dir or self.trainer.record.folder.path)

    def generate_completions(self, sampling: bool = False) -> None:
        """Print completions of the held-out prompts, a batch with `sampling`, else at most 64, nearly greedy."""
        count = min(len(self.eval_dataset or ()), (self.args.per_device_eval_batch_size or 8) if sampling else ROWS)
        ids = id_tensors("eval_dataset", [self.eval_dataset[row]["input_ids"] for row in range(count)])
        texts = self.responses(ids, ROWS, max_new_tokens=self.args.response_length, do_sample=True, temperature=0.01)
        for pair in zip(ids, texts, strict=True):
            self.trainer.record.screen.say(" → ".join(self.tokenizer.batch_decode(pair, skip_special_tokens=True)))

    def _stops(self) -> dict[str, Any]:
        """Settings of the end of completions."""
        token, kind = self.args.stop_token_id, self.args.stop_token
        if kind not in (None, "eos") or (kind and token is not None):
            raise ConfigError(f"stop_token is {kind!r}; it must be None or 'eos', and without stop_token_id")
        if token is not None and token != self.tokenizer.eos_token_id:  # an end beside the tokenizer's
            self.model.generation_config.eos_token_id = token
        if self.args.missing_eos_penalty and kind is None and token is None:
            raise ConfigError("missing_eos_penalty needs stop_token='eos' here, or every completion counts as cut off")
        return {"rollout.stop_at_eos": kind == "eos" or token is not None}

    def _critic(self, tokenizer: PreTrainedTokenizerBase, processes: Processes, run: str) -> dict[str, Any]:
        """Settings of the value model: the folder beside the run's in which it is saved as it is, its score head too.

        A script's head is random anew in each process. That of a run with a checkpoint, which can only go on, stays.
        """
        if self.value_model is None:
            return {"critic.name": None}
        check_value_model(self.value_model, tokenizer)
        folder = f"{run}-value-model"
        if processes.main and not (saved(Path(run)) and same_but_head(self.value_model, Path(folder))):
            self.value_model.save_pretrained(folder)
        processes.wait()
        return {"critic.name": folder}


class SteppingTrainer(PPOTrainer):
    """The trainer of TRL up to 0.11: the script samples, scores, and calls `step`."""

    def __init__(
        self,
        config: Any = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Any = None,
        data_collator: Any = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
        training_data_collator: Any = None,
    ):
        """Build the trainer from TRL's arguments; its run ends with `close`, or with the script."""
        require(Config, CONFIG, config=config)
        require(AutoModelForCausalLMWithValueHead, VALUE_HEAD_MODEL, model=model)
        require(nn.Module | None, MODEL, ref_model=ref_model)
        require(PreTrainedTokenizerBase, TOKENIZER, tokenizer=tokenizer)
        if lr_scheduler is not None:
            raise ConfigError("lr_scheduler would train otherwise than config says; leave it out")
        self.config, self.model, self.ref_model, self.tokenizer = config, model, ref_model, tokenizer
        here = further(config)
        processes = Processes(here.get("run.timeout", RunConfig().timeout))
        settings, lines = settings_of(config, old=True, world_size=processes.count)
        config.use(old=True)
        if num_shared_layers is not None and ref_model is None:
            freeze_layers(model, num_shared_layers)
        elif num_shared_layers is not None:
            lines.append("num_shared_layers: ref_model is given, and shares no layers")
        settings |= {"run.iterations": OPEN_END, "run.save_every": 0} | of_optimizer(optimizer)
        settings.pop("run.dir", None)  # exp_name, which is no folder
        settings |= here
        lines += [f"{name}: the critic's head starts at 0" for name in model.ignored]
        lines += ["training_data_collator: updates are padded by a mask"] * (training_data_collator is not None)
        own = fitting(tokenizer, model.pretrained_model)
        given = getattr(ref_model, "pretrained_model", ref_model)
        same = equal(given, model.pretrained_model)
        self.trainer = Trainer(model.pretrained_model, [], PPOConfig.from_dict(settings), processing_class=own)
        model.pretrained_model = attached(self.trainer.policy.lm) or self.trainer.policy.lm  # with the adapter trained
        self.current_device, self.optimizer = self.trainer.processes.device, self.trainer.learner.optimizer
        self.take_reference(given, same)
        self.dataset, self.dataloader = dataset, None
        seed_all(self.trainer.args.seed + processes.rank)  # as TRL does: sampling draws from the global ones
        if dataset is not None:
            generator = torch.Generator().manual_seed(self.trainer.args.seed)
            options = {"collate_fn": data_collator, "shuffle": True, "drop_last": True, "generator": generator}
            rows = DataLoader(dataset, config.batch_size, **options)
            self.dataloader = prepare_data_loader(rows, num_processes=processes.count, process_index=processes.rank)
        self.say(lines)
        self.trainer.begin()

    def generate(
        self,
        query_tensor: Any,
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample a response to a query, or to each of a list, by the model's own `generate` with its arguments.

        `[1, time]` for one query, a list of `[time]` for several; with `generate_ref_response` the reference's too.
        """
        several = isinstance(query_tensor, list)
        queries = id_tensors("query_tensor", query_tensor if several else [query_tensor])
        generation_kwargs.pop("pad_to_multiple_of", None)  # of no effect here
        arguments = {"queries": queries, "batch_size": batch_size, "lengths": length_sampler, **generation_kwargs}
        arguments["whole"] = not (arguments.pop("remove_padding", True) and several)  # as TRL does
        results = [self.responses(**arguments)]
        if generate_ref_response:
            policy, reference = self.trainer.policy, self.trainer.pipeline.reference
            if reference is None:
                raise ConfigError("generate_ref_response needs a reference model; set init_kl_coef above 0")
            with policy.adapter.reference() if reference is policy and policy.adapter else nullcontext():
                results.append(self.responses(**arguments, model=None if reference is policy else reference.lm))
        if return_prompt:
            results = [[torch.cat([q.to(r.device), r]) for q, r in zip(queries, x, strict=True)] for x in results]
        shaped = [rows if several else rows[0].unsqueeze(0) for rows in results]
        return tuple(shaped) if generate_ref_response else shaped[0]

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Any],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Do a PPO iteration on these tokens and scores; returns its statistics under TRL's names."""
        if response_masks is not None:
            raise ConfigError("response_masks are not honoured; give responses of the policy's own tokens")
        began = time.perf_counter()
        try:
            numbers = [float(score) for score in scores]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"scores must be one number per response: {error}") from error
        if len(numbers) != self.config.batch_size:
            raise ConfigError(f"step got {len(numbers)} scores; it must get batch_size, {self.config.batch_size}")
        metrics = self.trainer.learn(self.trainer.adopt(id_tensors("queries", queries), responses), numbers)
        if self.trainer.last is None:
            return metrics  # a batch with numbers that are not finite, which was skipped
        return statistics(metrics, self.trainer.last, numbers) | {"time/ppo/total": time.perf_counter() - began}

    def log_stats(
        self, stats: Mapping[str, Any], batch: Mapping[str, Any], rewards: Sequence[Any], columns_to_log: Any = ()
    ) -> None:
        """Log the rewards; `step` has logged everything else."""
        del stats, batch, columns_to_log
        numbers = torch.tensor([float(reward) for reward in rewards])
        found = {"env/reward_mean": float(numbers.mean()), "env/reward_std": float(numbers.std())}
        self.trainer.record.trackers.log(found, len(self.trainer.record.history))

    def close(self) -> Any:
        """End the run: the policy and the records are then in the run's folder; a script's end does it too."""
        return self.trainer.close()
