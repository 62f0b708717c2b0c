"""Load language models and tokenizers by name, and check them."""

from __future__ import annotations

import hashlib
import json
import logging as python_logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.hub import cached_file

from tokencredit.distributed.processes import connection_lost, out_of_memory
from tokencredit.distributed.sharding import whole
from tokencredit.errors import ConfigError, quoted
from tokencredit.learn.training_mode import disable_noise
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.run_kind import is_path, lacking
from tokencredit.text.models.architecture import fuse_gelu, trunk_of, weight_hash
from tokencredit.text.models.foreign_weights import HEAD_FILES, HEADS, PICKLE, WEIGHTS, read_weights
from tokencredit.text.models.peft_models import ADAPTER_CONFIG, adopt, load_adapter, saved_config
from tokencredit.text.models.precision import in_float32, quantisation, saved_bits, whole_weights
from tokencredit.text.models.sharded_loading import Sharding

LOG = python_logging.getLogger("tokencredit")
HUB_TIMEOUT = 10
"""Timeout of the request that tests whether the hub answers, in seconds."""
TOKENIZER = "tokenizer_config.json"
MODEL_FILES = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".py")
"""Suffixes of the files that a model or a tokenizer is loaded from."""
BUILTIN = {
    "policy": {"builtin:reviews": "reviews/policy", "builtin:grid": "grid", "builtin:calculator": "calculator"},
    "sentiment": {"builtin:reviews": "reviews/sentiment"},
}
"""Folders of the built-in models, by part and world."""


def resolve(name: str, part: str = "policy") -> str:
    """The local folder or hub id that a model name stands for; `part` of a built-in world is policy or sentiment.

    A hub id is returned unchanged if the hub answers, otherwise as the folder of its cached copy.

    Raises:
        ConfigError: an unknown built-in world or one without that part, a folder without a model, or a hub id that is
            neither reachable nor cached.
    """
    if name.startswith("builtin:"):
        if name not in BUILTIN[part]:
            kind = {"policy": "world", "sentiment": "classifier"}[part]
            raise ConfigError(f"{name!r} is not a built-in {kind}; choose one of {', '.join(BUILTIN[part])}")
        return str(files("tokencredit") / "demo" / BUILTIN[part][name])
    if is_path(name):
        folder = Path(name).expanduser()
        if not any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            raise ConfigError(f"{name!r} is not a model folder: {lacking(folder, 'no config.json')}")
        return str(folder.absolute())  # an adapter names its base model by it, wherever it is loaded later
    if _hub_answers(name):
        return name
    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is not a local folder, the hub cannot be reached, and its cache holds no copy; "
            "give a folder with config.json, model.safetensors and the tokenizer's files"
        ) from error


@lru_cache  # loading a model and then its tokenizer resolves the same name twice
def _hub_answers(name: str) -> bool:
    """True if the hub answers a request for a model; one short request, while a download would retry for minutes."""
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except Exception as error:  # the HTTP library, and so its exceptions, depends on the version of huggingface_hub
        return isinstance(error, HfHubHTTPError)  # loading the model raises the hub's reason
    return True


def local_folder(name: str) -> Path | None:
    """The folder of a model's name or, for a hub id, of its cached copy; None if there is none.

    What is read here of a hub id's files, its configuration and a value head beside the weights, is cached first.
    """
    if not name or is_path(name):
        path = Path(name).expanduser()
        return path if name and path.is_dir() else None
    with suppress(ConfigError, OSError):
        return _cached_copy(resolve(name))
    return None


@lru_cache
def _cached_copy(name: str) -> Path | None:
    """The folder of a hub id's cached copy, with a value head beside the weights; of a folder, itself."""
    if Path(name).is_dir():
        return Path(name)

    def cached(*files: str) -> list[str]:
        found = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in files)
        return [file for file in found if file is not None]

    read = (cached("config.json") or cached(ADAPTER_CONFIG, PICKLE)) + cached(*HEAD_FILES)
    return Path(read[0]).parent if read else None


def same_weights(one: str, other: str) -> bool:
    """True for two names of one model, or of copies with the same weights."""
    if one == other:
        return True
    folders = local_folder(one), local_folder(other)
    return None not in folders and len({folder_digest(str(folder), (WEIGHTS,)) for folder in folders}) == 1


def load_language_model(
    args: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None, sharding: Sharding | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model with float32 weights, and its tokenizer unless one is passed.

    Raises:
        ConfigError: the name stands for no causal language model or no tokenizer, or there is no end-of-sequence token.
    """
    folder = resolve(args.name)
    base = base_model(args.name, folder)
    if base is None:
        lm = adopt(load_model(AutoModelForCausalLM, args.name, folder, args, sharding))
    else:
        lm = load_model(AutoModelForCausalLM, base, resolve(base), args, sharding)
        load_adapter(lm, folder)
    tokenizer = tokenizer or load_tokenizer(args)
    return check_language_model(args, lm, tokenizer), tokenizer


def load_tokenizer(args: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; that of the base model if an adapter's folder has none."""
    folder = resolve(args.name)
    base = base_model(args.name, folder)
    if base is not None and cached_file(folder, TOKENIZER, _raise_exceptions_for_missing_entries=False) is None:
        folder = resolve(base)
    return read_tokenizer(args.name, folder, args.trust_remote_code, ", or pass it to PPOTrainer as processing_class")


def read_tokenizer(
    name: str, folder: str, trust_remote_code: bool = False, alternative: str = ""
) -> PreTrainedTokenizerBase:
    """Read the tokenizer in the folder of a model; `ConfigError` names the cure of a missing one, or an alternative."""
    with as_config_error(f"a tokenizer from {name!r}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # Some classes make an empty tokenizer if the folder has no tokenizer files.
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise ConfigError(
            f"the model folder {name!r} has no tokenizer; save one there (tokenizer.save_pretrained){alternative}"
        )
    return tokenizer


def base_model(name: str, folder: str) -> str | None:
    """The base model of an adapter's folder; None for a full model's folder, even if it also holds an adapter."""
    if (Path(folder) / "config.json").is_file():
        return None
    config = saved_config(folder)
    if config is None:
        return None
    if not config.base_model_name_or_path:
        raise ConfigError(f"the adapter {name!r} names no base model; set base_model_name_or_path in {ADAPTER_CONFIG}")
    return str(config.base_model_name_or_path)


def check_language_model(args: ModelConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Check that a language model can be trained here, switch off its noise (dropout by `model.dropout`), return it."""
    saved_bits(args.name, lm.config.to_dict())  # refuses those of other libraries
    if lm.get_output_embeddings() is None or not hasattr(lm, "generation_config"):
        raise ConfigError(
            f"the model {args.name!r} is a {type(lm).__name__}, which has no projection to a vocabulary; give a causal "
            "language model, as loaded by AutoModelForCausalLM; a class of your own is a GenerationMixin with lm_head "
            "and model.embed_tokens (docs/python.md#your-own-model)"
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
    """End-of-sequence token ids: the tokenizer's and those of the model's generation config.

    Ids outside the vocabulary, the default of some architectures, are left out.

    Raises:
        ConfigError: the config has something else there.
    """
    listed = lm.generation_config.eos_token_id if lm.generation_config else None
    config = listed if isinstance(listed, list) else [listed]
    if not all(i is None or (isinstance(i, int) and not isinstance(i, bool)) for i in config):
        raise ConfigError(
            f"eos_token_id is {quoted(listed)} in generation_config.json of the model {lm.name_or_path!r}, or in its "
            "config.json; it must be a token id, or a list of them"
        )
    ids = {tokenizer.eos_token_id, *config} - {None}
    return sorted(i for i in ids if 0 <= i < lm.config.get_text_config().vocab_size)


def max_prompt_length(lm: PreTrainedModel, max_new_tokens: int, budget: int | None = None) -> int | None:
    """The longest prompt, in tokens, that fits context and token budget with a completion; None without a limit.

    Raises:
        ConfigError: not even one token fits.
    """
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    named = {"the model's context has {} tokens": context, "ppo.micro_batch_tokens is {}": budget}
    limits = {text.format(limit): limit for text, limit in named.items() if limit is not None}
    full = [text for text, limit in limits.items() if limit <= max_new_tokens]
    if full:
        raise ConfigError(
            f"max_new_tokens leaves no room for a prompt: it is {max_new_tokens}, and {' and '.join(full)}; lower it"
        )
    return min(limits.values()) - max_new_tokens if limits else None


def fingerprint(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests of a model's weights (`model`, as `weights_digest`) and of its tokenizer (`tokenizer`, SHA-256)."""
    parts = [tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.special_tokens_map]
    vocabulary = json.dumps(parts, sort_keys=True)
    return {"model": weights_digest(lm), "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()}


def weights_digest(model: nn.Module) -> str:
    """SHA-256 digest of the names of a model's weights and of their hashes, by `weight_hash`."""
    weights = [f"{name} {weight_hash(whole(x))}" for name, x in whole_weights(model)]
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()


def folder_digest(name: Any, suffixes: tuple[str, ...] = MODEL_FILES) -> str | None:
    """SHA-256 digest of the files that load a model and its tokenizer from a local folder; None for anything else.

    Weights count by size and `weight_hash`, which takes less time than SHA-256, by far without instructions for it.
    """
    if not isinstance(name, str) or not Path(name).is_dir():
        return None
    sha = hashlib.sha256()
    for file in sorted(path for path in Path(name).iterdir() if path.suffix in suffixes and path.is_file()):
        words = file.stat().st_size // 4 if file.suffix == WEIGHTS else 0
        sha.update(f"{file.name} {file.stat().st_size} ".encode())
        if words:
            sha.update(str(weight_hash(torch.from_file(str(file), size=words))).encode())
        with file.open("rb") as rest:
            rest.seek(4 * words)
            sha.update(rest.read())
    return sha.hexdigest()


def check_origin(then: Mapping[str, Any], now: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` if a resumed run began with another model or tokenizer."""
    for part in ("model", "tokenizer"):
        if then[part] != now[part]:
            raise ConfigError(
                f"the {part} that model.name {name!r} stands for is not what it was when this run began; restore it, "
                "or start a new run"
            )


def load_model(
    kind: Any, name: str, folder: str, args: ModelConfig, sharding: Sharding | None = None, *, trunk: bool = False
) -> PreTrainedModel:
    """Load a model by an Auto class, with float32 weights, from safetensors only.

    With `sharding` each process loads its part; with `trunk` only the trunk is loaded for use, and returned.

    Raises:
        ConfigError: it cannot be loaded, or has no weights for some layer, as a classifier has none to predict tokens.
    """
    model: PreTrainedModel
    with as_config_error(f"a language model from {name!r}"), errors_alone():
        options = {} if sharding is None else sharding.options(kind, folder, args, trunk=trunk)
        options |= quantisation(kind, name, args, PretrainedConfig.get_config_dict(folder)[0])
        model, loaded = read_weights(kind, folder, torch.float32, args.trust_remote_code, **options)
    check_shapes(name, loaded)
    # The critic says what becomes of a value head.
    unused = [key for key in loaded["unexpected_keys"] if key.rpartition(".")[0] not in HEADS]
    if unused and kind is AutoModelForCausalLM:
        LOG.warning("weights of %r that its model does not use: %s", name, listed(unused))
    # Transformers initializes them at random. No trunk is read through its pooler.
    if missing := [key for key in loaded["missing_keys"] if not key.startswith("pooler.")]:
        what = "causal language" if kind is AutoModelForCausalLM else "whole"
        raise ConfigError(f"{name!r} is not a {what} model: its weights lack {listed(missing)}")
    model = trunk_of(model) if trunk else model
    in_float32(model)
    if sharding is not None:
        sharding.prepare(model)
    fuse_gelu(model)
    disable_noise(model, dropout=not args.dropout)
    return model


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """A context for loading: whatever libraries and code of a model raise is a `ConfigError` in one line."""
    try:
        with bars_on_terminals():
            yield
    except ConfigError:
        raise
    except Exception as error:
        if out_of_memory(error) or connection_lost(error):
            raise
        # Transformers appends a list of all supported classes, and reports on weights as a table.
        reason = " ".join(str(error).partition("\nModel type should be one of")[0].split())
        kind = "" if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__}: "
        raise ConfigError(f"cannot load {what}: {kind}{reason}") from error


def check_shapes(name: str, loaded: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if weights have other shapes than the model that config.json describes."""
    for key, saved, expected in sorted(loaded["mismatched_keys"])[:1]:
        raise ConfigError(
            f"the weights of {name!r} do not fit its config.json: {key} has the shape {list(saved)}, and config.json "
            f"asks for {list(expected)}; restore the file that the weights were saved with"
        )


def listed(keys: Iterable[str]) -> str:
    """The first names of weights, and the number of further ones."""
    names = sorted(keys)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def errors_alone() -> Iterator[None]:
    """A context with only errors of Transformers' logs: callers say what matters, as of missing or unused weights."""
    before, batching = logging.get_verbosity(), python_logging.getLogger("ContinuousBatchingLogger")
    level = batching.level
    logging.set_verbosity_error()
    batching.setLevel(python_logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
        batching.setLevel(level)


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """A context in which Transformers shows progress bars on terminals and in notebooks, and not in logs."""
    before = logging.set_tqdm_hook(lambda bar, args, options: bar(*args, **{"disable": None} | options))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def check_same_ids(what: str, other: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` unless another tokenizer has the policy's tokens at the same ids; `what` is the setting."""
    ids, own = other.get_vocab(), policy.get_vocab()
    different = {token: i for token, i in own.items() if ids.get(token) != i}
    if different:
        token, i = min(different.items(), key=lambda item: item[1])
        raise ConfigError(
            f"{what}, whose tokenizer has other ids for {len(different)} of the policy's {len(own)} tokens, such as "
            f"{ids.get(token)} for {token!r}, which is {i} in the policy; give a model with the policy's vocabulary"
        )


def check_vocabulary(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    advice: str = "use the model's own tokenizer",
) -> None:
    """Raise `ConfigError`, with advice, if the tokenizer has more tokens than the model; warn if it has far fewer."""
    rows = len(cast(Tensor, model.get_input_embeddings().weight))
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but the embedding of {name!r} only {rows}; {advice}"
        )
    if len(tokenizer) < 0.9 * rows:  # vocabularies are padded by less
        sizes = (len(tokenizer), name, rows)
        LOG.warning("the tokenizer has %d tokens, and %r %d, so others have no text; is it the model's own?", *sizes)
