"""From names to models and back: loading, adapters, saving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from shutil import which
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import NewGELUActivation

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.text.models.actor_critic import ActorCritic, build_value_head, positions, width

HUB_TIMEOUT = 10
"""Seconds for the hub's first answer."""
VALUE_HEAD_FILE = "value_head.safetensors"
CRITIC_FOLDER = "critic"


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
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
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
    lm = _load(AutoModelForCausalLM, args.name, resolve(args.name, "policy"), args)
    tokenizer = tokenizer or load_tokenizer(args)
    return check_language_model(args, lm, tokenizer), tokenizer


def load_tokenizer(args: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, by the model's name."""
    with _naming(f"a tokenizer from {args.name!r}"):
        return AutoTokenizer.from_pretrained(resolve(args.name, "policy"), trust_remote_code=args.trust_remote_code)


def check_language_model(args: ModelConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Switch a model's dropout off unless asked not to, make sure that it can be trained here, and return it.

    Raises:
        ConfigError: it cannot end a text, its tokenizer is another model's, or its logits take an unknown form.
    """
    fuse_gelu(lm)
    if not args.dropout:
        disable_dropout(lm)
    if not end_ids(lm, tokenizer):
        raise ConfigError(
            f"the tokenizer of {args.name!r} has no end-of-sequence token, so no completion could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    _check_vocabulary(args.name, lm, tokenizer)
    check_projection(args.name, lm)
    return lm


def build_actor_critic(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: ModelConfig, peft_config: Any = None
) -> ActorCritic:
    """The model that is trained: `lm` with its adapter and its critic, as the configuration wants them.

    `peft_config`, if given, takes the place of `args.lora`.

    Raises:
        ConfigError: a critic that cannot be loaded or has another vocabulary, an adapter that fits no layer, or no
            compiler where one is needed.
    """
    critic = None
    if args.critic == "separate":
        if args.critic_name is None:
            critic = deepcopy(lm.get_decoder())
        else:
            critic = _load(AutoModel, args.critic_name, resolve(args.critic_name, "policy"), args)
            _check_vocabulary(args.critic_name, critic, tokenizer)
    adapter = None
    if args.lora.rank or peft_config is not None:
        adapter = add_adapter(lm, peft_config or lora_config(args.lora))
    head = build_value_head(
        args.value_head, width(critic or lm), args.value_head_init, args.value_head_gain, args.value_head_hidden_gain
    )
    compiler = os.environ.get("CXX", "g++")
    if args.compile and not (torch.cuda.is_available() or which(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and there is no {compiler!r}; install g++, or leave it out"
        )
    if args.gradient_checkpointing:
        for model in filter(None, (lm, critic)):
            # Newer versions of Transformers warn about the older name.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
    return ActorCritic(lm, head, critic, detach=args.detach_critic, adapter=adapter, compiled=args.compile)


def lora_config(args: LoraConfig) -> Any:
    """PEFT's configuration of a low-rank adapter.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora needs PEFT, which is not installed: pip install tokencredit[peft]") from error
    return peft.LoraConfig(
        r=args.rank,
        lora_alpha=args.alpha,
        lora_dropout=args.dropout,
        target_modules=args.target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )


def add_adapter(lm: PreTrainedModel, config: Any) -> Any:
    """Put an adapter on a model's layers, in place; returns the PEFT model around it.

    Raises:
        ConfigError: no layer has one of the target names, or the output projection does.
    """
    import peft

    try:
        adapter = peft.get_peft_model(lm, config)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {error}") from error
    if any(p.requires_grad for p in lm.get_output_embeddings().parameters()):
        raise ConfigError(
            "model.lora.target_modules names the output projection, whose adapter would be ignored; leave it out"
        )
    return adapter


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


@torch.no_grad()
def check_projection(name: str, lm: PreTrainedModel) -> None:
    """Make sure that hidden states and output projection give the very logits that the model itself gives.

    Raises:
        ConfigError: they do not, because the model scales or shapes its logits in a way of its own.
    """
    ids = torch.arange(min(4, lm.config.get_text_config().vocab_size)).unsqueeze(0)
    model = ActorCritic(lm)
    mask, position_ids = positions(torch.ones_like(ids, dtype=torch.bool), 0)
    ours = model.logits(model.hidden(ids, mask, position_ids))
    theirs = lm(input_ids=ids, attention_mask=mask).logits.float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise ConfigError(f"{name!r} shapes its logits in a way that is not supported: {type(lm).__name__}")


def fuse_gelu(model: nn.Module) -> None:
    """Let each tanh-approximated GELU, written as eight operations in GPT-2 and its kin, be PyTorch's one.

    The formula is the same, x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))); it takes half the time and keeps one tensor
    for the backward pass instead of four.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0, those of layers and those that attention reads from a number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def fingerprint(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What tells whether a model and a tokenizer are those that they were: `model` and `tokenizer`, in hexadecimal."""
    weights = [f"{name} {int(torch.hash_tensor(p).view(torch.int64))}" for name, p in lm.named_parameters()]
    vocabulary = json.dumps(
        [tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map], sort_keys=True
    )
    return {
        "model": hashlib.sha256("\n".join(weights).encode()).hexdigest(),
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }


def save_policy(folder: Path, model: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary Hugging Face folder (of an adapter, if there is one), with the critic beside it."""
    (model.adapter or model.lm).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.critic is not None:
        model.critic.save_pretrained(folder / CRITIC_FOLDER)
    head = {key: value.contiguous() for key, value in model.value_head.state_dict().items()}
    save_file(head, folder / VALUE_HEAD_FILE)


def load_value_head(folder: Path, model: ActorCritic) -> None:
    """Read back the value head that `save_policy` wrote."""
    model.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))


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


def _load(kind: Any, name: str, folder: str, args: ModelConfig) -> PreTrainedModel:
    with _naming(f"a language model from {name!r}"):
        model = kind.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=args.trust_remote_code
        )
    fuse_gelu(model)
    if not args.dropout:
        disable_dropout(model)
    return model


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn what loading raises into one message."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load {what}: {error}") from error


def _check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but {name!r} knows {rows}; they do not belong together"
        )
