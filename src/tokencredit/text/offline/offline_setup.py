"""Models and examples of a run that learns from a data set, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError, naming
from tokencredit.learn.training_mode import disable_noise
from tokencredit.provenance.parts import Part, describe
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.offline import DPOConfig, OfflineSettings, RewardModelConfig, SFTConfig
from tokencredit.text.data.datasets import Rows
from tokencredit.text.models.adapters import add_adapter, enable_checkpointing, lora_config
from tokencredit.text.models.architecture import fuse_gelu, trunk_of
from tokencredit.text.models.foreign_weights import read_weights
from tokencredit.text.models.model_loading import (
    as_config_error,
    bars_on_terminals,
    check_vocabulary,
    errors_alone,
    fingerprint,
    load_language_model,
    load_tokenizer,
    resolve,
)
from tokencredit.text.models.peft_models import attached, check_adapted, merge, name_base, saved_config
from tokencredit.text.models.precision import in_float32, quantisation
from tokencredit.text.models.run_models import build_policy, check_trained, load_start, merge_notes, merged, save_policy
from tokencredit.text.offline.examples import Encoder, Example, Row, examples_of, read_rows, scored_pair, split
from tokencredit.text.rewards.reward_models import RewardModel, take_value_head
from tokencredit.text.rewards.reward_models import load as load_classifier


@dataclass(frozen=True)
class Model:
    """A model to train, and how it is saved."""

    lm: PreTrainedModel
    """A causal language model, or a classifier with one output."""
    tokenizer: PreTrainedTokenizerBase
    start: Mapping[str, str]
    """Fingerprints of the model and tokenizer before training, without a new adapter."""
    save: Callable[[Path], None]
    """Writes its folder."""
    next_steps: Mapping[str, str]
    """Commands for the finished run, with their meaning."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user."""


def load_model(args: OfflineSettings) -> Model:
    """Load the model that a run starts from, with its adapter or score head; both draw PyTorch's global generator."""
    if isinstance(args, RewardModelConfig):
        return load_reward_model(args)
    settings = ModelConfig(**vars(args.model))
    with naming("model.name"):
        lm, tokenizer = load_start(settings)
    start, notes = fingerprint(lm, tokenizer), merge_notes(settings, lm)
    policy, more = build_policy(merged(settings, lm), tokenizer, settings, CriticConfig(kind="none"))
    check_trained(settings.name, policy)
    steps = {
        "tokencredit generate RUN --prompt TEXT": "completions of the trained model",
        "tokencredit train --model.name RUN/policy": "PPO from the trained model",
    }
    return Model(
        policy.lm, tokenizer, start, lambda folder: save_policy(folder, policy, tokenizer), steps, notes + more
    )


def load_reward_model(args: RewardModelConfig) -> Model:
    """A classifier with one output: a language model's trunk with a new head, or a classifier's own."""
    settings = ModelConfig(**vars(args.model))
    with naming("model.name"), errors_alone():
        tokenizer = load_tokenizer(settings)
        config = saved_config(resolve(settings.name))
        adapted = config is not None
        if adapted and settings.quantization is not None:
            raise ConfigError(
                f"model.quantization is {settings.quantization}, and {settings.name!r} is an adapter, which is merged "
                "into dense weights; leave it out"
            )
        with as_config_error(f"a model with a score head from {settings.name!r}"):
            of_classifier = adapted and config.task_type == "SEQ_CLS"
            read = read_classifier_adapter if of_classifier else read_adapter if adapted else read_whole
            model, notes = read(settings)
        check_vocabulary(settings.name, model, tokenizer)
    in_float32(model.eval())
    fuse_gelu(model)
    disable_noise(model, dropout=True)
    if args.model.gradient_checkpointing:
        enable_checkpointing(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    start = fingerprint(model, tokenizer)
    if settings.lora.rank:
        add_adapter(model, lora_config(settings.lora, "SEQ_CLS"), "model.lora")
    check_adapted(settings.name, model)

    def save(folder: Path) -> None:
        saved: Any = attached(model) or model
        if adapted and settings.lora.rank:  # no folder holds the weights below the adapter
            saved = deepcopy(saved).merge_and_unload()
        with bars_on_terminals():
            saved.save_pretrained(folder)
        name_base(folder)
        tokenizer.save_pretrained(folder)

    steps = {"tokencredit train --reward '[{reward_model: RUN/reward_model}]'": "PPO on this reward"}
    model.eval()
    if not settings.lora.rank:
        model.requires_grad_(True)
    return Model(model, tokenizer, start, save, steps, notes)


def read_classifier_adapter(settings: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    """A reward model with its adapter merged, and its head; `ConfigError` if it has several outputs."""
    model, _ = load_classifier(settings.name, "cpu")
    if model.config.num_labels != 1:
        raise ConfigError(
            f"the adapter {settings.name!r} is a classifier's of {model.config.num_labels} labels, and a reward model "
            "has one output; give its base model"
        )
    return model, [f"the adapter of {settings.name!r} is merged, and its score head is trained further"]


def read_adapter(settings: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    """The trunk of a language model with its adapter merged, with its value head or a new head, and notes."""
    lm, _ = load_language_model(settings)
    config = deepcopy(lm.config)
    config.num_labels = 1
    notes = merge_notes(replace(settings, adapter="merge"), lm)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    trunk_of(model).load_state_dict(trunk_of(merge(lm)).state_dict())
    return model, notes + begin_with_value_head(settings.name, model, {"missing_keys": ["score.weight"]})


def read_whole(settings: ModelConfig) -> tuple[PreTrainedModel, list[str]]:
    """A classifier with its head, or the trunk of a language model with its value head or a new head, and notes."""
    folder, kind = resolve(settings.name), AutoModelForSequenceClassification
    options = quantisation(kind, settings.name, settings, PretrainedConfig.get_config_dict(folder)[0])
    code = settings.trust_remote_code
    model, loaded = read_weights(kind, folder, torch.float32, code, num_labels=1, **options)
    return model, check_head(settings.name, model, loaded) + begin_with_value_head(settings.name, model, loaded)


def begin_with_value_head(name: str, model: PreTrainedModel, loaded: dict[str, Any]) -> list[str]:
    """Make a language model's value head the missing score head, and return a note; no note without one."""
    if (head := take_value_head(name, model, loaded)) is None:
        return []
    # As saved classifiers have it; pairs do not depend on it.
    cast(torch.nn.Module, model.score).register_parameter("bias", None)
    return [f"the score head begins with {head}, without its bias"]


def check_head(name: str, model: PreTrainedModel, loaded: Mapping[str, Any]) -> list[str]:
    """A note if the score head of a loaded classifier replaces one; `ConfigError` if weights below it are missing."""
    replaced = [str(key[0] if isinstance(key, tuple) else key) for key in loaded["mismatched_keys"]]
    prefix = f"{model.base_model_prefix}."
    if lacking := sorted(key for key in [*loaded["missing_keys"], *replaced] if key.startswith(prefix)):
        raise ConfigError(f"the weights of {name!r} lack {', '.join(lacking[:3])}")
    return [f"the classification head of {name!r} is replaced by a new one with one score"] * bool(replaced)


def load_examples(
    args: OfflineSettings, model: Model, train: Rows | None, held_out: Rows | None
) -> tuple[list[Example], list[Example], list[str], dict[str, Part]]:
    """Examples to train on, held-out ones, notes for the user, and descriptions of the data sets as they were read.

    `train` and `held_out` are rows from Python in place of `data.dataset` and `eval.dataset`.
    """
    encode, column = encoding(args, model)
    data, notes, parts = args.data, [*model.notes], dict[str, Part]()

    def read(source: Any, rows: Rows | None, group: str) -> list[Example]:
        repeats, found = list[bool](), list[dict[str, Any]]()

        def counted(row: Row) -> Example | None:
            repeats.append(row.repeats_prompt(column))
            found.append(row.described())
            return encode(row)

        examples, dropped = examples_of(read_rows(data, model.tokenizer, column, source, rows, group), counted)
        if 2 * sum(repeats) > len(repeats):
            notes.append(
                f"{sum(repeats)} rows of {group} have the whole prompt at the start of {column!r} again, so the model "
                "reads it twice; remove it there"
            )
        if equal := sum(x.get("chosen_ids") == x.get("rejected_ids", ()) for x in examples):
            notes.append(
                f"{equal} of {len(examples)} rows of {group} have the same tokens in {column!r} and in the rejected "
                "completion, and teach no preference; leave them out"
            )
        if dropped:
            notes.append(f"{dropped} of {len(repeats)} rows of {group} are too long and are dropped")
        if rows is None:
            parts[f"{group}.dataset"] = describe(found)
        return examples

    if train is not None and data.dataset is not None:
        raise ConfigError("train_dataset and data.dataset are both given; leave one of them out")
    if held_out is not None and (data.held_out or args.eval.dataset):
        key = "eval.dataset" if args.eval.dataset else "data.held_out"
        raise ConfigError(f"eval_dataset and {key} are both given; leave one of them out")
    examples = read(data, train, "data")
    if held_out is None and args.eval.dataset is None:
        if args.eval.every and not data.held_out:
            raise ConfigError(f"eval.every is {args.eval.every}, and no rows are held out; leave it out")
        return *split(examples, data.held_out_of(len(examples)), args.seed), notes, parts
    return examples, read(args.eval, held_out, "eval"), notes, parts


def encoding(args: OfflineSettings, model: Model) -> tuple[Callable[[Row], Example | None], str]:
    """How rows become examples, and the column of completions that they must have."""
    if isinstance(args, SFTConfig):
        sft, encoder = args.data, Encoder(args.data, model.lm, model.tokenizer, args.sft.loss_on)
        return lambda row: encoder.with_completion(row, sft.completion), sft.completion
    if isinstance(args, DPOConfig):
        dpo, encoder = args.data, Encoder(args.data, model.lm, model.tokenizer)
        return lambda row: encoder.with_pair(row, dpo.chosen, dpo.rejected), dpo.chosen
    assert isinstance(args, RewardModelConfig)
    pairs, reader = args.data, RewardModel(args.model.name, model.lm, model.tokenizer)
    return lambda row: scored_pair(reader, row, pairs.chosen, pairs.rejected), pairs.chosen
