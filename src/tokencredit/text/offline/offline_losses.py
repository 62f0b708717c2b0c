"""TRL's trainers as losses of token ids: collation, loss and metrics are theirs.

The steps are not: `Trainer.train` writes checkpoints with pickles, and cannot stop and resume as runs do here. Nor is
the tokenization: TRL tokenizes prompt and completion as one text, and a policy reads the prompt's own tokens.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import importing
from tokencredit.settings.offline import DPOConfig, OfflineSettings, RewardModelConfig
from tokencredit.text.models.precision import Precision
from tokencredit.text.offline.examples import IGNORED, Example

NAMES = {
    "mean_token_accuracy": "token_accuracy",
    "mean_reward": "score_mean",
    "min_reward": "score_min",
    "max_reward": "score_max",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_log_ratio",
    "rewards/rejected": "rejected_log_ratio",
    "logps/chosen": "chosen_logprob",
    "logps/rejected": "rejected_logprob",
}
"""Names of TRL's metrics here, where they differ."""
PER_TOKEN = ("entropy", "token_accuracy")
"""Metrics that are means over tokens; the others are means over rows."""
LOADED = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""Attributes of a quantised model."""
LEFT_OUT = ("num_tokens", "logits/chosen", "logits/rejected", "epoch", "step")
"""TRL's metrics that runs do not record."""


class OfflineLoss:
    """The loss of one of TRL's trainers, of SFTTrainer, RewardTrainer or DPOTrainer."""

    def __init__(
        self, config: OfflineSettings, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, precision: Precision
    ):
        """Build the trainer of a configuration; `NotInstalled` without TRL."""
        self.precision, self.lm = precision, lm
        self.trainer = build_trainer(config, lm, tokenizer, precision)
        self.by_token = not isinstance(config, DPOConfig | RewardModelConfig)
        """The loss is a mean over tokens, not over rows."""
        self.beta = config.dpo.beta if isinstance(config, DPOConfig) else 1.0

    def size(self, rows: Sequence[Example]) -> float:
        """Number of tokens or rows whose mean the loss of these rows is."""
        return learned(rows) if self.by_token else len(rows)

    def __call__(self, model: Any, rows: Sequence[Example], size: float) -> Tensor:
        """The part of these rows in the mean over a batch, times the number of processes, which average gradients.

        `model` is the model or its wrapper for data parallelism; `size` is the batch's over all processes.
        """
        inputs = self._inputs(rows)
        with self.precision.autocast():
            if self.by_token:
                items = torch.tensor(size, device=self.precision.device)
                loss: Tensor = self.trainer.compute_loss(model, inputs, num_items_in_batch=items)
                return loss
            mean: Tensor = self.trainer.compute_loss(model, inputs)
            part: Tensor = mean * (len(rows) * self.trainer.accelerator.num_processes / size)
            return part

    @torch.no_grad()
    def reference(self, rows: Sequence[Example]) -> list[Example]:
        """Log-probs of each row's completions under the model as it is, in nats, in DPOTrainer's columns."""
        with quietly(), self.precision.autocast():
            both = self.trainer.compute_ref_log_probs(self.lm, self._inputs(rows))
        names = ("ref_chosen_logps", "ref_rejected_logps")
        numbers = zip(*(x.float().tolist() for x in both), strict=True)
        return [dict(zip(names, pair, strict=True)) for pair in numbers]

    def _inputs(self, rows: Sequence[Example]) -> dict[str, Tensor]:
        """The rows as a padded batch on the device."""
        return {name: x.to(self.precision.device) for name, x in self.trainer.data_collator(list(rows)).items()}

    def metrics(self) -> dict[str, float]:
        """TRL's metrics of the last pass, over all processes; of training or evaluation, by the model's mode."""
        self.trainer.log({})
        logged = self.trainer.state.log_history.pop()
        measured = {name.removeprefix("eval_"): float(value) for name, value in logged.items()}
        per_nat = ("rewards/chosen", "rewards/rejected")  # TRL's are times β
        return {
            NAMES.get(name, name): value / self.beta if name in per_nat else value
            for name, value in measured.items()
            if name not in LEFT_OUT and (self.by_token or name != "mean_token_accuracy")  # DPO's is of chosen tokens
        }


def learned(rows: Sequence[Example]) -> int:
    """Number of tokens that are learned from: those with a loss, or those of both completions."""
    if rows and "labels" in rows[0]:
        return sum(label != IGNORED for row in rows for label in row["labels"][1:])
    return sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)


def combined(parts: Sequence[tuple[dict[str, float], float, float]]) -> dict[str, float]:
    """The metrics of a batch from those of its micro-batches, each with its numbers of rows and of learned tokens."""
    whole: dict[str, float] = {}
    for name in parts[0][0]:
        numbers = [metrics[name] for metrics, _, _ in parts]
        weights = [tokens if name in PER_TOKEN else rows for _, rows, tokens in parts]
        if name in ("score_min", "score_max"):
            whole[name] = min(numbers) if name == "score_min" else max(numbers)
        else:
            whole[name] = sum(x * weight for x, weight in zip(numbers, weights, strict=True)) / sum(weights)
    return whole


def build_trainer(
    config: OfflineSettings, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, precision: Precision
) -> Any:
    """TRL's trainer of a configuration; its own data set stays empty of what is trained on."""
    with quietly():
        with importing("training from a data set", "TRL", "tokencredit[path]"):
            trl: Any = import_module("trl")  # its lazy exports are not typed
        from datasets import Dataset
        from transformers import PrinterCallback

        class TokenizedDPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
            """DPO on rows that are tokenized, with their reference log-probs."""

            def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:  # noqa: ARG002
                return dataset

            def _precompute_ref_logps(self, dataset: Any, *rest: Any) -> Any:  # noqa: ARG002
                return dataset

        with tempfile.TemporaryDirectory() as folder:
            shared: dict[str, Any] = {
                "output_dir": folder,
                "use_cpu": precision.device.type == "cpu",
                "bf16": False,  # the passes are in a context of their own
                "report_to": "none",
                "disable_tqdm": True,
                "max_length": None,
                "gradient_checkpointing": False,  # switched on in the model, if it is
                "seed": config.seed,
            }
            end = tokenizer.eos_token_id
            if isinstance(config, RewardModelConfig):
                args = trl.RewardConfig(**shared, center_rewards_coefficient=config.reward_model.center)
                kind, row = trl.RewardTrainer, {"chosen_ids": [end], "rejected_ids": [end]}
            elif isinstance(config, DPOConfig):
                losses: dict[str, Any] = {"loss_type": [config.dpo.loss], "beta": config.dpo.beta}
                if config.dpo.loss == "robust":
                    losses["label_smoothing"] = config.dpo.label_noise
                losses |= {"disable_dropout": False, "router_aux_loss_coef": 0.0, "precompute_ref_log_probs": True}
                kind, args = TokenizedDPOTrainer, trl.DPOConfig(**shared, **losses)
                row = {"prompt_ids": [end], "chosen_ids": [end], "rejected_ids": [end]}
            else:
                kind, args = trl.SFTTrainer, trl.SFTConfig(**shared, router_aux_loss_coef=0.0)
                row = {"input_ids": [end, end], "labels": [end, end]}
            args._n_gpu = 1  # of several GPUs that are in sight, as in PPO
            with as_dense(lm):
                trainer: Any = kind(lm, args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.accelerator.autocast = nullcontext  # `accelerate launch` may ask for another format than model.dtype
    return trainer


@contextmanager
def as_dense(lm: PreTrainedModel) -> Iterator[None]:
    """A context in which a quantised model does not say that it is one.

    TRL would round its adapter to bfloat16, and Transformers would not see the adapter and refuse the model.
    """
    marks = {name: vars(lm).pop(name) for name in ("hf_quantizer", *LOADED) if name in vars(lm)}
    try:
        yield
    finally:
        vars(lm).update(marks)


@contextmanager
def quietly() -> Iterator[None]:
    """A context without TRL's telemetry, and without the warnings of its and Transformers' deprecated names."""
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_DISABLE_TELEMETRY
    hub.HF_HUB_DISABLE_TELEMETRY = True
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        hub.HF_HUB_DISABLE_TELEMETRY = before
