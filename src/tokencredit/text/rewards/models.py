"""Models that read text and score it: sequence classifiers, and reward models with one number.

They read text, so their tokenizer and vocabulary need not be the policy's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.text.models.loading import fuse_gelu, resolve
from tokencredit.text.rewards.texts import Text, joined, messages, plain

BATCH_SIZE = 64
"""Texts in a model at once, unless told otherwise."""


class Reader:
    """A sequence classification model with its tokenizer: texts in, logits out, batched by length.

    A text that is longer than the model's context loses its beginning, because the end holds the completion.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        text: str = "both",
        batch_size: int = BATCH_SIZE,
        append_eos: bool = False,
    ):
        """Fit a model and its tokenizer together.

        Args:
            name: what messages call it.
            model: its class ends in `ForSequenceClassification`.
            tokenizer: the model's; its side of truncation is set here.
            text: `both` reads prompt and completion, `completion` the completion alone.
            batch_size: texts in the model at once.
            append_eos: put the end-of-sequence token, if there is one, after plain texts.

        Raises:
            ConfigError: the tokenizer has more tokens than the model, or the model cannot read a text.
        """
        rows = model.get_input_embeddings().get_parameter("weight").shape[0]
        if len(tokenizer) > rows:
            raise ConfigError(
                f"the tokenizer of {name!r} has {len(tokenizer)} tokens, but its model knows {rows}; "
                "they do not belong together"
            )
        tokenizer.truncation_side = "left"
        fuse_gelu(model)
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.text, self.batch_size = text, batch_size
        self.limit, self.vocabulary = context(model, tokenizer), rows
        self.eos = (tokenizer.eos_token or "") if append_eos else ""
        self.warned = False
        self.pads = self._ignores_padding()
        """Texts of different lengths share a batch."""

    @torch.no_grad()
    def logits(self, prompts: Sequence[Text], completions: Sequence[Text]) -> Tensor:
        """`[batch, labels]` in float32, on the processor."""
        ids = [self.encode(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        logits = torch.empty(len(ids), self.model.config.num_labels)
        for _, group in groupby(order, key=lambda row: 0 if self.pads else len(ids[row])):
            alike = list(group)
            for start in range(0, len(alike), self.batch_size):
                rows = alike[start : start + self.batch_size]
                logits[rows] = self._read([ids[row] for row in rows])
        return logits

    def _read(self, texts: list[list[int]]) -> Tensor:
        """`[batch, labels]`: for each text the logits that the model gives for it alone.

        A decoder is read at its last token other than the pad token of its configuration, as it was trained. Without
        one it is read at the last token, so it is padded with a token that none of the texts has.
        """
        config = self.model.config.get_text_config()
        own = config.pad_token_id
        pad = own if own is not None and 0 <= own < self.vocabulary else self._unused(texts)
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

    def _unused(self, texts: list[list[int]]) -> int | None:
        """A token that none of the texts has, if there is one."""
        used = set().union(*texts)
        return next((token for token in range(self.vocabulary) if token not in used), None)

    @torch.no_grad()
    def _ignores_padding(self) -> bool:
        """True if a padded text has the logits that it has alone; XLNet's, FNet's and ConvBERT's have not.

        Raises:
            ConfigError: the model cannot read a text.
        """
        short, long = self.encode("", "Yes"), self.encode("", "Yes and no")
        try:
            padded, alone = self._read([short, long])[0], self._read([short])[0]
        except Exception as error:
            raise ConfigError(f"{self.name!r} cannot read a text: {type(error).__name__}: {error}") from error
        tolerance = torch.finfo(self.model.dtype).eps ** 0.5
        return torch.allclose(padded, alone, rtol=tolerance, atol=tolerance)

    def encode(self, prompt: Text, completion: Text) -> list[int]:
        """Token ids of what the model reads of one completion, the end of it if it is too long."""
        if self.text == "completion":
            text, template = plain(completion), False
        elif template := bool(self.tokenizer.chat_template) and not isinstance(prompt, str):
            conversation = [*messages(prompt, "user"), *messages(completion, "assistant")]
            text = str(self.tokenizer.apply_chat_template(conversation, tokenize=False))
        else:
            text = joined(prompt, completion)
        if not template and not text.endswith(self.eos):
            text += self.eos
        special = not template  # a template has written the special tokens itself
        ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        if self.limit is not None and len(ids) > self.limit:
            if not self.warned:
                warnings.warn(
                    f"{self.name!r} reads at most {self.limit} tokens; of a text of {len(ids)} the beginning was cut "
                    "off, and of every longer one after it will be",
                    stacklevel=2,
                )
                self.warned = True
            arguments = {"truncation": True, "max_length": self.limit}
            ids = self.tokenizer(text, add_special_tokens=special, **arguments)["input_ids"]
        stand_ins = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return ids or [next(i for i in stand_ins if i is not None)]  # a model cannot read nothing at all


class Classifier:
    """What a sequence classifier says of one label."""

    def __init__(
        self,
        name: str,
        label: str | None,
        output: str = "probability",
        device: torch.device | str = "cpu",
        *,
        text: str = "both",
        batch_size: int = BATCH_SIZE,
        dtype: str = "float32",
    ):
        """Load a classifier.

        Args:
            name: hub id, folder, or `builtin:reviews`.
            label: the label that is rewarded.
            output: `probability`, `logit`, or `log_odds` (the logit of the probability).
            device: where it runs.
            text: see `Reader`.
            batch_size: see `Reader`.
            dtype: of its weights and passes.

        Raises:
            ConfigError: no classifier has that name, or it has no such label.
        """
        self.reader = Reader(name, *load(name, device, dtype), text=text, batch_size=batch_size)
        config = self.reader.model.config
        if config.num_labels < 2:
            raise ConfigError(f"{name!r} has one output and no labels to choose from; name it as reward_model")
        if label not in config.label2id:
            wrong = "needs label" if label is None else f"has no label {label!r}"
            raise ConfigError(f"{name!r} {wrong}; its labels are {', '.join(sorted(config.label2id))}")
        self.label, self.output = config.label2id[label], output
        # Labels that do not exclude each other have a probability of their own, not a share of one.
        self.independent = config.problem_type == "multi_label_classification"

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """Score each completion."""
        logits = self.reader.logits(prompts, completions)
        chosen = logits[:, self.label]
        if self.output == "logit":
            return chosen.tolist()
        others = logits.clone()
        others[:, self.label] = -torch.inf
        log_odds = chosen if self.independent else chosen - others.logsumexp(-1)
        return (log_odds if self.output == "log_odds" else log_odds.sigmoid()).tolist()


class RewardModel:
    """A model with one output, such as TRL's RewardTrainer saves: that output is the reward.

    It reads what RewardTrainer trains on: conversations through its own chat template, plain texts with its
    end-of-sequence token after them.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        text: str = "both",
        batch_size: int = BATCH_SIZE,
    ):
        """Make a reward of a model and its tokenizer; arguments as in `Reader`.

        Raises:
            ConfigError: the model has more than one output, or does not fit its tokenizer.
        """
        if model.config.num_labels != 1:
            raise ConfigError(
                f"{name!r} has {model.config.num_labels} outputs, and a reward model has one; "
                "name it as classifier, with the label that is rewarded"
            )
        self.reader = Reader(name, model, tokenizer, text=text, batch_size=batch_size, append_eos=True)

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """Score each completion."""
        return self.reader.logits(prompts, completions)[:, 0].tolist()


def load(
    name: str, device: torch.device | str, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence classification model in a dtype, from safetensors only, and its tokenizer.

    Raises:
        ConfigError: the name leads to none, or to a model whose classification head has no weights.
    """
    folder = resolve(name, "sentiment")
    try:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load a classifier from {name!r}: {error}") from error
    if loaded["missing_keys"]:  # they would be random numbers
        missing = ", ".join(sorted(loaded["missing_keys"]))
        raise ConfigError(f"{name!r} is no sequence classifier: its weights lack {missing}")
    return model.to(device), tokenizer


def context(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The longest text in tokens that a model can read; None if that has no known end."""
    limits = [tokenizer.model_max_length]  # a huge number where the tokenizer does not know
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet's −1 stands for no end
        # The RoBERTa family counts positions from after the padding's own.
        table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        limits.append(positions if padding is None else positions - padding - 1)
    limit = min(limits)
    return limit if limit < 1_000_000_000 else None
