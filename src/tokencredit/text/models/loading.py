"""From names to models: loading, checks, upload."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import NewGELUActivation
from transformers.utils.hub import cached_file

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.modes import disable_noise
from tokencredit.settings.model import ModelConfig
from tokencredit.text.models.parts import weight_hash
from tokencredit.text.models.peft_models import ADAPTER_CONFIG, load_adapter, saved_config, take_over

HUB_TIMEOUT = 10
"""Seconds for the hub's first answer."""
TOKENIZER = "tokenizer_config.json"


def resolve(name: str, part: str) -> str:
    """The folder behind a name: of `builtin:reviews` (`part` is policy or sentiment), of a path, or of the hub's cache.

    A hub id comes back as it is when the hub answers, and as the folder of its cached copy when it does not.

    Raises:
        ConfigError: an unknown built-in world, a folder that holds no model, or a hub id that cannot be had.
    """
    if name == "builtin:reviews":
        return str(files("tokencredit") / "demo" / "reviews" / part)
    if name.startswith("builtin:"):
        raise ConfigError(f"{name!r} is not a built-in world; there is one, builtin:reviews")
    folder = Path(name)
    looks_like_path = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if folder.exists() or looks_like_path:
        folder = folder.expanduser()
        if not any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            raise ConfigError(f"{name!r} is not a model folder: it has no config.json")
        return str(folder)
    return name if _hub_answers(name) else _cached(name)


@lru_cache  # a model and its tokenizer are asked for one after the other
def _hub_answers(name: str) -> bool:
    """Whether the hub says anything of a model; one short question, where a download would be tried several times."""
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except HfHubHTTPError:
        return True  # it refuses, and says why when the model is loaded
    except Exception:  # the errors of the HTTP library below, which is not always the same one
        return False
    return True


def _cached(name: str) -> str:
    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is no folder here, the hub cannot be reached, and its cache holds no copy; "
            "give a folder with config.json, model.safetensors and the tokenizer's files"
        ) from error


def load_language_model(
    args: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, with float32 weights, and its tokenizer, unless that is given.

    Raises:
        ConfigError: the name leads to no causal language model, to no tokenizer, or to one that cannot end a text.
    """
    folder = resolve(args.name, "policy")
    base = _base(args.name, folder)
    if base is None:
        lm = take_over(load_model(AutoModelForCausalLM, args.name, folder, args))
    else:
        lm = load_model(AutoModelForCausalLM, base, resolve(base, "policy"), args)
        load_adapter(lm, folder)
    tokenizer = tokenizer or load_tokenizer(args)
    return check_language_model(args, lm, tokenizer), tokenizer


def load_tokenizer(args: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, by the model's name; an adapter's folder without one leaves it to the base model."""
    folder = resolve(args.name, "policy")
    base = _base(args.name, folder)
    if base is not None and cached_file(folder, TOKENIZER, _raise_exceptions_for_missing_entries=False) is None:
        folder = resolve(base, "policy")
    with naming(f"a tokenizer from {args.name!r}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust_remote_code)


def _base(name: str, folder: str) -> str | None:
    """The base model that an adapter's folder names; None for a model's folder, even if an adapter lies in it."""
    if (Path(folder) / "config.json").is_file():
        return None
    config = saved_config(folder)
    if config is None:
        return None
    if not config.base_model_name_or_path:
        raise ConfigError(f"the adapter {name!r} names no base model; set base_model_name_or_path in {ADAPTER_CONFIG}")
    return str(config.base_model_name_or_path)


def check_language_model(args: ModelConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Switch off a model's noise, make sure that it can be trained here, and return it; its dropout may be kept.

    Raises:
        ConfigError: it is no causal language model, cannot end a text, or its tokenizer is another model's.
    """
    if lm.get_output_embeddings() is None or not hasattr(lm, "generation_config"):
        raise ConfigError(
            f"the model {args.name!r} is a {type(lm).__name__}, which has no projection to a vocabulary; give a causal "
            "language model, such as AutoModelForCausalLM loads"
        )
    fuse_gelu(lm)
    disable_noise(lm, dropout=not args.dropout)
    if not end_ids(lm, tokenizer):
        raise ConfigError(
            f"the tokenizer of {args.name!r} has no end-of-sequence token, so no completion could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    check_vocabulary(args.name, lm, tokenizer)
    return lm


def end_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a text: the tokenizer's, and those the model's generation settings add.

    Ids outside the vocabulary, which some architectures have by default, can never be sampled and do not count.
    """
    listed = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
    return sorted(i for i in ids if 0 <= i < lm.config.get_text_config().vocab_size)


def room_for_prompts(lm: PreTrainedModel, max_new_tokens: int, budget: int | None = None) -> int | None:
    """The longest prompt that leaves room for a completion in the model's context and in a budget of tokens.

    None if there is neither a known end of the context nor a budget.
    """
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (context, budget) if limit is not None]
    return min(limits) - max_new_tokens if limits else None


def fuse_gelu(model: nn.Module) -> None:
    """Let each tanh-approximated GELU, written as eight operations in GPT-2 and its kin, be PyTorch's one.

    The formula is the same, x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))); it takes half the time and keeps one tensor
    for the backward pass instead of four.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def fingerprint(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What tells whether a model and a tokenizer are those that they were: `model` and `tokenizer`, in hexadecimal."""
    weights = [f"{name} {weight_hash(p)}" for name, p in lm.named_parameters()]
    vocabulary = json.dumps(
        [tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map], sort_keys=True
    )
    return {
        "model": hashlib.sha256("\n".join(weights).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }


def origin(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> dict[str, Any]:
    """The start of a run as a checkpoint holds it: fingerprints, and the arguments that came from Python."""
    return fingerprint(lm, tokenizer) | {"given": [name for name, value in given.items() if value is not None]}


def check_origin(then: Mapping[str, Any], now: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` if a run that is resumed began with another model, tokenizer or arguments of Python's."""
    for part in ("model", "tokenizer"):
        if then[part] != now[part]:
            raise ConfigError(
                f"the {part} that model.name {name!r} stands for is not what it was when this run began; bring it "
                "back, or begin a new run"
            )
    if then["given"] != now["given"]:
        before, after = (", ".join(arguments["given"]) or "none" for arguments in (then, now))
        raise ConfigError(
            f"this run began with arguments of PPOTrainer that config.yaml does not hold ({before}; now: {after}); "
            "give the same from Python, and call train(resume_from_checkpoint=True)"
        )


def upload(folder: Path, repository: str) -> None:
    """Put a policy's folder on the Hugging Face hub.

    Raises:
        RunStopped: the hub refused or could not be reached; the folder is still there.
    """
    try:
        HfApi().create_repo(repository, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunStopped(
            f"could not upload to run.push_to_hub {repository!r}: {reason}; the policy is in {folder}"
        ) from error


def load_model(kind: Any, name: str, folder: str, args: ModelConfig) -> PreTrainedModel:
    """A model of an Auto class, with float32 weights from safetensors alone.

    Raises:
        ConfigError: the folder holds none.
    """
    with naming(f"a language model from {name!r}"):
        model: PreTrainedModel = kind.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=args.trust_remote_code
        )
    fuse_gelu(model)
    disable_noise(model, dropout=not args.dropout)
    return model


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn what loading raises into one message."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        # A class that the library does not know for this use is followed by a list of all that it knows.
        reason = str(error).partition("\nModel type should be one of")[0]
        raise ConfigError(f"cannot load {what}: {reason}") from error


def check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if the tokenizer has more tokens than the model."""
    rows = len(cast(Tensor, model.get_input_embeddings().weight))
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but {name!r} knows {rows}; they do not belong together"
        )
