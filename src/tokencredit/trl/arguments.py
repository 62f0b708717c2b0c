"""What scripts for TRL give: tokenizers, reward models, optimizers and texts as this trainer reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import column_names
from tokencredit.settings.model import ModelConfig
from tokencredit.text.data.datasets import column_values, from_python
from tokencredit.text.models.critic import check_tokenizer
from tokencredit.text.models.model_loading import local_folder, weights_digest

ROWS = 64
"""Texts per forward pass of a reward model."""
CONFIG = "a PPOConfig of tokencredit.trl"
MODEL = "a loaded model, such as AutoModelForCausalLM.from_pretrained(FOLDER)"
VALUE_HEAD_MODEL = "an AutoModelForCausalLMWithValueHead of tokencredit.trl"
TOKENIZER = "a tokenizer, such as AutoTokenizer.from_pretrained(FOLDER)"
WITHOUT = "or leave value_model out: the critic then begins as a copy of the policy"


@contextmanager
def trl_terms(value_model: str | None = None) -> Iterator[None]:
    """A context in which errors name the arguments of TRL's scripts; the value model is saved in that folder."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for folder in filter(None, (value_model, value_model and str(Path(value_model).absolute()))):
            text = text.replace(f"critic.name is {folder!r}", "value_model").replace(repr(folder), "value_model")
        text = re.sub(r"\brun\.dir\b", "output_dir", re.sub(r"^critic\.name\b", "value_model", text))
        if value_model is not None and "value_model" in text:
            text = f"{text if text.startswith('value_model') else f'value_model: {text}'}; {WITHOUT}"
        text = re.sub(r"run\.allow_changed: (\[.*\])", r'PPOConfig(settings={"run.allow_changed": \1})', text)
        error.args = (text,)
        raise


def require(kind: Any, must_be: str, **arguments: Any) -> None:
    """Raise `ConfigError` for the first of the arguments that is not of a type."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is of type {type(value).__name__}; it must be {must_be}")


def check_value_model(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` for a value model that is not a whole model, or that comes with another tokenizer."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"value_model is a {type(model).__name__}, and must be a loaded model without an adapter, such as "
            f"AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=1); {WITHOUT}"
        )
    name = str(model.config._name_or_path)
    if local_folder(name) is not None:
        with trl_terms(name):
            check_tokenizer(f"value_model is from {name}", name, ModelConfig(name=name), tokenizer)


def equal(given: Any, model: nn.Module) -> bool:
    """True if a reference model is not given, or has the model's weights."""
    return given is None or weights_digest(given) == weights_digest(model)


def fitting(tokenizer: Any, model: Any) -> Any:
    """The tokenizer, without a padding token that a script added beyond the model's vocabulary."""
    if len(tokenizer) <= model.get_input_embeddings().weight.shape[0]:
        return tokenizer
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = tokenizer.chat_template
    return own


def prompts_of(dataset: Any, tokenizer: PreTrainedTokenizerBase, name: str = "train_dataset") -> Any:
    """The rows of prompts; `ConfigError` without `input_ids`, and for padding in them, which would be read as text."""
    if isinstance(dataset, list):  # of dicts, or of what a tokenizer returns
        dataset = [row.data if isinstance(row, BatchEncoding) else row for row in dataset]
    rows, pad = from_python(dataset, name), tokenizer.pad_token_id
    if "input_ids" not in (columns := column_names(rows)) and columns:
        raise ConfigError(f"{name} has the columns {', '.join(columns)}; it must have input_ids, a prompt's token ids")
    ends = (None, tokenizer.bos_token_id, tokenizer.eos_token_id)
    padding = {"attention_mask": 0} | ({} if pad in ends else {"input_ids": pad})
    for column in padding.keys() & set(columns):
        values = (row for chunk in column_values(rows, column) for row in chunk)
        if any(padding[column] in row for row in values if not isinstance(row, str | None)):
            raise ConfigError(f"input_ids of {name} hold padding; tokenize them with padding=False")
    return rows


def id_tensors(name: str, rows: Sequence[Any]) -> list[Tensor]:
    """Token ids of several texts, each `[time]` and not empty; `ConfigError` for anything else."""
    try:
        tensors = [torch.as_tensor(row) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must hold token ids: {error}") from error
    for ids in tensors:
        if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
            kind = f"tensor of shape {list(ids.shape)} and {ids.dtype}"
            raise ConfigError(f"{name} holds a {kind}; it must hold token ids in one dimension per text")
    return tensors


def padded(rows: Sequence[Any], device: torch.device, side: str) -> dict[str, Tensor]:
    """Token ids of rows of several lengths, padded on one side, with the attention mask."""
    ids = [torch.as_tensor(row) for row in rows]
    parts = {"input_ids": ids, "attention_mask": [torch.ones_like(row) for row in ids]}
    return {name: pad_sequence(part, batch_first=True, padding_side=side).to(device) for name, part in parts.items()}


class RewardOfIds:
    """The score of a reward model at a completion's last token, read with the policy's token ids."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device):
        """Put the model on the device; `ConfigError` unless it has a score head of one output."""
        head = getattr(model, "score", None)  # may be a method
        layers = [*head.modules()] if isinstance(head, nn.Module) else []
        outputs = next((x.out_features for x in reversed(layers) if isinstance(x, nn.Linear)), 1)
        if head is None or outputs != 1:
            labels = " or ".join(getattr(getattr(model, "config", None), "label2id", ())) or "LABEL"
            has = f"a score head of {outputs} outputs" if outputs != 1 else "no score head over the policy's tokens"
            raise ConfigError(
                f"reward_model is a {type(model).__name__}, which has {has}; load a reward model with num_labels=1; "
                f"for a classifier give tokencredit.ClassifierTerm(classifier=FOLDER, label={labels}), or a function"
            )
        self.model = model.eval() if hasattr(model, "hf_device_map") else model.eval().to(device)
        self.pad = tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(
        self, prompts: Any, completions: Any, prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> list[float]:
        """One score per completion, which ends before its first padding token, such as an end-of-sequence token."""
        del prompts, completions
        device, scores = next(self.model.parameters()).device, []
        trunk = getattr(self.model, self.model.base_model_prefix)
        texts = [
            one + (two[: two.index(self.pad)] if self.pad in two else two)
            for one, two in zip(prompt_ids, completion_ids, strict=True)
        ]
        for first in range(0, len(texts), ROWS):
            inputs = padded(texts[first : first + ROWS], device, "right")
            states = trunk(**inputs, use_cache=False, return_dict=True, output_hidden_states=True).hidden_states[-1]
            of_tokens = self.model.score(states).squeeze(-1).float()
            scores += of_tokens.gather(1, inputs["attention_mask"].sum(1, keepdim=True) - 1)[:, 0].tolist()
        return scores


def of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Settings of an optimizer of Adam's kind; `ConfigError` for another, or for several groups."""
    if optimizer is None:
        return {}
    groups: list[Any] = list(getattr(optimizer, "param_groups", ()))
    plain = isinstance(optimizer, torch.optim.AdamW) or type(optimizer) is torch.optim.Adam
    other = not plain or len(groups) != 1 or groups[0]["betas"] != (0.9, 0.999)
    if other or groups[0]["amsgrad"] or groups[0]["maximize"]:
        raise ConfigError(f"optimizer is {type(optimizer).__name__}; plain Adam or AdamW with one group is honoured")
    if groups[0]["weight_decay"] and not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError("optimizer is Adam with weight_decay; only AdamW's is honoured")
    rate, decay = groups[0]["lr"], groups[0]["weight_decay"]
    return {"optim.lr": rate, "critic.lr": rate, "optim.weight_decay": decay, "optim.eps": groups[0]["eps"]}
