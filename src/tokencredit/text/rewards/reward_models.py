"""Sequence classifiers and reward models as rewards; they read text, so their tokenizer need not be the policy's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.text.models.architecture import fuse_gelu
from tokencredit.text.models.foreign_weights import find_head, read_weights
from tokencredit.text.models.model_loading import (
    as_config_error,
    base_model,
    check_shapes,
    errors_alone,
    load_tokenizer,
    local_folder,
    read_tokenizer,
    resolve,
)
from tokencredit.text.models.peft_models import ADAPTER_WEIGHTS, attached, load_adapter, peft_errors
from tokencredit.text.models.precision import dequantise, quantised_layers
from tokencredit.text.rewards.texts import Text, Texts, for_template, joined, messages, plain
from tokencredit.text.rewards.token_trees import TokenTree, batches, grow, tree_inputs


class Reader:
    """A sequence classification model with its tokenizer: from texts to logits, batched by length.

    Texts beyond the model's context are truncated on the left, since the completion is at the end.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        text: str = "both",
        batch_size: int = 64,
        append_eos: bool = False,
    ):
        """Combine a `…ForSequenceClassification` model, named `name` in messages, with its tokenizer.

        `text` is `both` for prompt and completion, or `completion`; `append_eos` appends the end-of-sequence token, if
        there is one, to plain texts. Raises `ConfigError` if the tokenizer has more tokens than the model, or the model
        cannot read a text.
        """
        rows = model.get_input_embeddings().get_parameter("weight").shape[0]
        if len(tokenizer) > rows:
            raise ConfigError(
                f"the tokenizer of {name!r} has {len(tokenizer)} tokens, but its model's embedding only {rows}; "
                "save the model with its own tokenizer"
            )
        tokenizer.truncation_side = "left"
        fuse_gelu(model)
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.text, self.batch_size = text, batch_size
        self.limit, self.vocabulary = context(model, tokenizer), rows
        self.eos = (tokenizer.eos_token or "") if append_eos else ""
        self.warned = False
        self.lock = threading.Lock()
        """Held by the call that reads: it sets the pad token and the tokenizer's truncation."""
        self.pads = self._ignores_padding()
        """Texts of different lengths may share a batch."""
        self.shares = self._shares_beginnings()
        """Texts may share the states of a common beginning."""

    def logits(self, prompts: Texts, completions: Texts) -> Tensor:
        """Logits `[batch, labels]` in float32, on the CPU."""
        with self.lock, torch.no_grad():
            return self._logits(prompts, completions)

    def _logits(self, prompts: Texts, completions: Texts) -> Tensor:
        ids = [self.encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        logits = torch.empty(len(ids), self.model.config.num_labels)
        # Prefixes of the same texts: one pass of a causal model has the states of all.
        if self.shares:
            read = [self._read_part(row) for row in ids]
            order = sorted(range(len(ids)), key=read.__getitem__)
            trees = grow([read[row] for row in order])
            if 2 * sum(len(tree.ids) for tree in trees) <= sum(map(len, ids)):
                logits[order] = self._read_trees(trees, self.batch_size * max(map(len, ids)))
                return logits
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        for _, group in groupby(order, key=lambda row: 0 if self.pads else len(ids[row])):
            members = list(group)
            for start in range(0, len(members), self.batch_size):
                rows = members[start : start + self.batch_size]
                logits[rows] = self._read([ids[row] for row in rows])
        return logits

    def _read(self, texts: list[list[int]]) -> Tensor:
        """Logits `[batch, labels]`, the same for each text as without padding.

        Decoders are pooled at the last token that differs from the configuration's pad token. Without a pad token,
        the batch is padded with a token that occurs in none of its texts.
        """
        config = self.model.config.get_text_config()
        own = config.pad_token_id
        pad = own if own is not None and 0 <= own < self.vocabulary else None
        if pad is None:
            used = set().union(*texts)
            pad = next((token for token in range(self.vocabulary) if token not in used), None)
        if pad is None and len(texts) > 1:
            return torch.cat([self._read([text]) for text in texts])
        width = max(map(len, texts))
        ids = torch.tensor([text + [pad or 0] * (width - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
        config.pad_token_id = pad
        try:
            device = self.model.device
            logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            return logits.float().cpu()
        finally:
            config.pad_token_id = own

    def _read_part(self, text: list[int]) -> list[int]:
        """A text up to the last token that differs from the configuration's pad token, where decoders are pooled."""
        end, pad = len(text), self.model.config.get_text_config().pad_token_id
        while end > 1 and text[end - 1] == pad:
            end -= 1
        return text[:end]

    def _read_trees(self, trees: list[TokenTree], tokens: int) -> Tensor:
        """Logits of the trees' texts, in passes of so many tokens."""
        parts = []
        for batch in batches(trees, tokens):
            inputs = {name: x.to(self.model.device) for name, x in tree_inputs(batch, self.model.dtype).items()}
            states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            parts += [self.model.score(states[number, tree.ends]) for number, tree in enumerate(batch)]
        return torch.cat(parts).float().cpu()

    @torch.no_grad()
    def _shares_beginnings(self) -> bool:
        """True for a causal model with a head on its last token, if prefixes read in one pass score as alone.

        A model whose layers see a window only is none: the mask of a tree would show them everything before a token.
        """
        if not may_share(self.model):
            return False
        texts = [self._read_part(self.encode("", text)) for text in ("Yes", "Yes and no", "Yes and then")]
        alone = torch.cat([self._read([text]) for text in texts])
        try:
            together = self._read_trees(grow(texts), sum(map(len, texts)))
        except Exception:  # a model that takes no such mask or positions, in its own way
            return False
        tolerance = torch.finfo(self.model.dtype).eps ** 0.5
        return torch.allclose(together, alone, rtol=tolerance, atol=tolerance)

    @torch.no_grad()
    def _ignores_padding(self) -> bool:
        """True if padding does not change logits; it does for XLNet, FNet and ConvBERT."""
        short, long = self.encode("", "Yes"), self.encode("", "Yes and no")
        try:
            padded, alone = self._read([short, long])[0], self._read([short])[0]
        except Exception as error:
            raise ConfigError(
                f"a forward pass of {self.name!r} on a text fails: {type(error).__name__}: {error}"
            ) from error
        tolerance = torch.finfo(self.model.dtype).eps ** 0.5
        return torch.allclose(padded, alone, rtol=tolerance, atol=tolerance)

    def encode(self, prompt: Text, completion: Text) -> list[int]:
        """Token ids of a prompt and completion, truncated on the left if too long."""
        if self.text == "completion":
            text, template = plain(completion), False
        elif template := bool(self.tokenizer.chat_template) and not isinstance(prompt, str):
            conversation = [for_template(x) for x in (*messages(prompt, "user"), *messages(completion, "assistant"))]
            text = str(self.tokenizer.apply_chat_template(conversation, tokenize=False))
        else:
            text = joined(prompt, completion)
        if not template and not text.endswith(self.eos):
            text += self.eos
        special = not template  # a chat template contains the special tokens
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        if self.limit is not None and len(ids) > self.limit:
            if not self.warned:
                warnings.warn(
                    f"{self.name!r} reads at most {self.limit} tokens; longer texts, such as one of {len(ids)}, are "
                    "truncated on the left",
                    stacklevel=2,
                )
                self.warned = True
            arguments = {"truncation": True, "max_length": self.limit}
            ids = self.tokenizer(text, add_special_tokens=special, **arguments)["input_ids"]
        if self.eos and ids[-2:] == [self.tokenizer.eos_token_id] * 2:  # the tokenizer adds one itself
            ids.pop()
        fallbacks = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return ids or [next(i for i in fallbacks if i is not None)]  # models need at least one token


class Classifier(Reader):
    """Scores completions by one label of a sequence classifier."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        label: str | None,
        output: str = "probability",
        **reading: Any,
    ):
        """Take the label that is rewarded, or raise `ConfigError`; `reading` and the others as in `Reader`.

        `output` is `probability`, `logit`, or `log_odds` (the logit of the probability).
        """
        super().__init__(name, model, tokenizer, **reading)
        config: Any = model.config
        if config.num_labels < 2:
            raise ConfigError(f"{name!r} has one output and no labels to choose from; set it as reward_model")
        if label not in config.label2id:
            raise ConfigError(f"{name!r} has no label {label!r}; set label: one of {', '.join(config.label2id)}")
        self.label, self.output = config.label2id[label], output
        # Multi-label classifiers have one sigmoid per label instead of a softmax over all.
        self.independent = config.problem_type == "multi_label_classification"

    def __call__(self, prompts: Texts, completions: Texts) -> list[float]:
        """Score each completion."""
        logits = self.logits(prompts, completions)
        logit = logits[:, self.label]
        if self.output == "logit":
            return logit.tolist()
        others = logits.clone()
        others[:, self.label] = -torch.inf
        log_odds = logit if self.independent else logit - others.logsumexp(-1)
        return (log_odds if self.output == "log_odds" else log_odds.sigmoid()).tolist()


class RewardModel(Reader):
    """A reward model with one output, as trained by TRL's RewardTrainer.

    Inputs are those of RewardTrainer: conversations by the model's own chat template, plain texts followed by its
    end-of-sequence token.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **reading: Any):
        """Check the number of outputs; arguments and errors as in `Reader`."""
        if model.get_output_embeddings() is not None:
            raise ConfigError(
                f"{name!r} is a {type(model).__name__}, a language model, which scores tokens and not texts; give a "
                "reward model, as loaded by AutoModelForSequenceClassification"
            )
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{name!r} has {model.config.num_labels} outputs, and a reward model has one; "
                "set it as classifier, with the label that is rewarded"
            )
        super().__init__(name, model, tokenizer, append_eos=True, **reading)

    def __call__(self, prompts: Texts, completions: Texts) -> list[float]:
        """Score each completion."""
        return self.logits(prompts, completions)[:, 0].tolist()


def load(
    name: str, device: torch.device | str, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence classification model in a dtype, from safetensors only, and its tokenizer.

    Raises:
        ConfigError: it cannot be loaded, or its classification head has no weights.
    """
    folder = resolve(name, "sentiment")
    below = base_model(name, folder)
    with as_config_error(f"a classifier from {name!r}"), errors_alone():
        kind, number = AutoModelForSequenceClassification, getattr(torch, dtype)
        if below is None:
            model, loaded = read_weights(kind, folder, number, code=False)
            _make_dense(model, number)
        else:
            model, loaded = _read_adapter(name, folder, below, number)
    take_value_head(name, model, loaded)
    _check_head(name, model, loaded)
    check_shapes(name, loaded)
    tokenizer = read_tokenizer(name, folder) if below is None else load_tokenizer(ModelConfig(name=name))
    return model.to(device), tokenizer


def _read_adapter(name: str, folder: str, below: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A sequence classifier with an adapter merged, and what neither of their weights have, such as its head."""
    with safe_open(cached_file(folder, ADAPTER_WEIGHTS), framework="pt") as weights:
        shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
    labels = [shape[0] for key, shape in shapes.items() if key.endswith((".score.weight", ".classifier.weight"))]
    kind, options = AutoModelForSequenceClassification, {"num_labels": labels[0] if labels else 1}
    model, loaded = read_weights(kind, resolve(below), dtype, code=False, **options)
    _make_dense(model, dtype)
    load_adapter(model, folder)
    with peft_errors(f"cannot merge the adapter {name!r}"):
        model = attached(model).merge_and_unload()
    own = {key.removeprefix("base_model.model.") for key in shapes}
    mismatched = {found for found in loaded["mismatched_keys"] if found[0] not in own}
    return model, loaded | {"missing_keys": set(loaded["missing_keys"]) - own, "mismatched_keys": mismatched}


def _make_dense(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Dequantise a model that was saved quantised: adapters merge exactly, and scores do not depend on the batch."""
    if quantised_layers(model):
        dequantise(model)
        torch.nn.Module.to(model, dtype)


def take_value_head(name: str, model: PreTrainedModel, loaded: dict[str, Any]) -> str | None:
    """Make a causal model's value head, read at the last token, the missing head of a classifier of one output.

    It is TRL's or LLaMA-Factory's, in the model's weights or beside them. Returns its name and file, None without one.
    """
    folder = local_folder(name) if loaded["missing_keys"] else None
    found = None if folder is None else find_head(folder)
    own = getattr(model, "score", None)
    if found is None or not isinstance(own, torch.nn.Linear):
        return None
    file, layer = found
    with safe_open(file, framework="pt") as weights:
        weight, bias = weights.get_tensor(f"{layer}.weight"), torch.zeros(1)
        if f"{layer}.bias" in set(weights.keys()):
            bias = weights.get_tensor(f"{layer}.bias")
    if weight.shape != (1, own.in_features):
        raise ConfigError(f"{layer}.weight of {file} is {list(weight.shape)}; it must be [1, {own.in_features}]")
    head = torch.nn.Linear(own.in_features, 1, dtype=own.weight.dtype)
    head.load_state_dict({"weight": weight, "bias": bias})
    model.score, model.config.num_labels = head, 1
    # Classifiers are read before the padding, and a text's end may be the padding token.
    model.config.get_text_config().pad_token_id = None
    loaded["missing_keys"] = {key for key in loaded["missing_keys"] if not key.startswith("score.")}
    return f"{layer}.weight of {file}"


def _check_head(name: str, model: PreTrainedModel, loaded: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the weights have no classification head, or one of another number of outputs."""
    for key, saved, expected in sorted(loaded["mismatched_keys"]):
        if saved[1:] == expected[1:] and not key.startswith(f"{model.base_model_prefix}."):
            raise ConfigError(
                f"the head of {name!r} is {key} of the shape {list(saved)}, one row per label, and its config.json has "
                f'{expected[0]} labels; set "num_labels": {saved[0]} there'
            )
    if not loaded["missing_keys"]:
        return
    missing = ", ".join(sorted(loaded["missing_keys"]))  # which Transformers initializes at random
    raise ConfigError(f"{name!r} is not a sequence classifier: its weights lack {missing}")


def may_share(model: PreTrainedModel) -> bool:
    """True for a model with the head of a causal one, and without a window."""
    config: Any = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return not windowed and layers <= {"full_attention"} and isinstance(getattr(model, "score", None), torch.nn.Module)


def context(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Context length of a model in tokens; None if unknown or unlimited."""
    limits = [tokenizer.model_max_length]  # a huge number if unknown
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet's −1 means unlimited
        # In the RoBERTa family positions start after the padding index.
        table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        limits.append(positions if padding is None else positions - padding - 1)
    limit = min(limits)
    return limit if limit < 1_000_000_000 else None
