"""Train a tiny model of every causal language model family in the installed Transformers, and print a table.

    python benchmarks/families.py [FAMILY ...] [--write FILE]

Each model is tiny and random. The table holds, for each: the largest difference between the log-probs that a rollout
recorded and those of the model's own pass over each row alone, with a growing and a static KV cache; the first ratio
error of an update, without and with gradient checkpointing; or the message of a refusal. Exits with 1 if a family
neither trains nor is refused.
"""

from __future__ import annotations

import argparse
import math
import platform
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokencredit import PPOConfig, PPOTrainer
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import RunConfig, UpdateConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.model_loading import resolve

SECONDS = 60
"""Time limit per family."""
LARGEST = 4_000_000
"""Largest number of parameters of a tiny model."""
TOLERANCE = 1e-3
"""Largest error, in nats or of a ratio, of a family that trains."""
TEMPERATURE = 0.8
PROMPTS = [{"prompt": text} for text in ("This movie was really", "A film", "I did not think that the second act")]

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "mamba_d_ssm"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size", "linear_hidden_size", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "mamba_n_heads", "linear_num_value_heads", "num_group"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("kv_channels", "state_size", "mamba_d_state", "mamba_d_head", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("vocab_size_per_layer_input", "max_position_embeddings"), 2048),
    "is_decoder": True,
}
"""Settings of a tiny model, by name."""

LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"]}
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_d_head": 16} | LINEAR_FULL,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_FULL | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "opt": {"word_embed_proj_dim": 16},
    "qwen3_5_moe_text": LINEAR_FULL,
    "qwen3_5_text": LINEAR_FULL,
    "qwen3_next": LINEAR_FULL,
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 16, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that a family needs in addition to `SIZES`."""


class Row(NamedTuple):
    """Result of a family."""

    family: str
    result: str
    """`trains`, `refused`, `not built` (no tiny model of it could be made), or `wrong`."""
    sampled: str = ""
    static: str = ""
    first_ratio: str = ""
    checkpointed: str = ""
    note: str = ""


def main() -> None:
    """Measure the families given on the command line, or all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--write", type=Path, help="File for the table.")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))
    rows = []
    for family in args.families:
        rows.append(measure(family, tokenizer))
        print("  ".join(filter(None, rows[-1])), flush=True)
    counts = Counter(row.result for row in rows)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if args.write:
        args.write.write_text(table(rows, counts))
    sys.exit(1 if counts["wrong"] else 0)


def measure(family: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Build, sample from and train a family's model; errors go into the row."""
    try:
        with time_limit():
            lm = build(family, tokenizer)
    except Exception as error:
        return Row(family, "not built", note=brief(error))
    try:
        with time_limit():
            sampled, first_ratio, moved = train(lm, tokenizer)
    except ConfigError as error:
        return Row(family, "refused", note=brief(error))
    except Exception as error:
        return Row(family, "wrong", note=brief(error))
    try:
        with time_limit():
            error_with = train(lm, tokenizer, checkpointing=True)[1]
            checkpointed = f"{error_with:.0e}"
    except ConfigError:
        error_with, checkpointed = 0.0, "refused"
    except Exception as error:
        return Row(family, "wrong", note=brief(error))
    try:
        with time_limit():
            error_static = train(lm, tokenizer, cache="static")[0]
            static = f"{error_static:.0e}"
    except ConfigError:
        error_static, static = 0.0, "refused"
    except Exception as error:
        return Row(family, "wrong", note=brief(error))
    good = moved and max(sampled, error_static, first_ratio, error_with) < TOLERANCE
    note = "" if moved else "no weight moved"
    numbers = f"{sampled:.0e}", static, f"{first_ratio:.0e}", checkpointed
    return Row(family, "trains" if good else "wrong", *numbers, note)


def build(family: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A random model of a family, with weights large enough that every token matters."""
    config = tiny(CONFIG_MAPPING[family])
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": 0}
    for part in (config, config.get_text_config()):
        for name, value in {"vocab_size": len(tokenizer), **ids}.items():
            setattr(part, name, value)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters, since its sizes have other names")
    torch.manual_seed(0)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in lm.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    with torch.no_grad():
        lm.eval()(input_ids=torch.tensor([[300, 301, 302]]))  # invalid sizes are an error of this program
    if lm.generation_config is not None:
        lm.generation_config.eos_token_id = list(range(len(tokenizer) // 8))  # so that rows end early
    return lm


def tiny(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Configuration of a small model, and of its sub-models."""
    default = kind()
    names = vars(default).keys() | type(default).attribute_map.keys()
    sizes = {name: size for name, size in SIZES.items() if name in names}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    parts = {name: tiny(type(part)) for name in kind.sub_configs if (part := getattr(default, name)) is not None}
    return kind(**parts | sizes | EXTRA.get(kind.model_type, {}))


def train(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpointing: bool = False,
    cache: Literal["dynamic", "static"] = "dynamic",
) -> tuple[float, float, bool]:
    """One iteration: the error of sampled log-probs in nats, the first ratio error, and True if weights moved."""
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            model=ModelConfig(dtype="float32", gradient_checkpointing=checkpointing),
            rollout=RolloutConfig(batch_size=12, per_prompt=2, max_new_tokens=8, temperature=TEMPERATURE, cache=cache),
            ppo=UpdateConfig(epochs=1, minibatches=2),
            run=RunConfig(dir=folder, iterations=1, trackers=[]),
        )
        trainer = PPOTrainer(lm, count_letters, args, PROMPTS, processing_class=tokenizer)
        scored = trainer.collect()
        sampled = own_error(lm, scored.rollout)
        before = [p.detach().clone() for p in lm.parameters()]
        metrics = trainer.update(1, *trainer.credit.give(scored))
    if not math.isfinite(metrics["loss"]):
        raise ArithmeticError(f"the loss is {metrics['loss']}")
    moved = any(not torch.equal(now, then) for now, then in zip(lm.parameters(), before, strict=True))
    return sampled, metrics["first_ratio_error"], moved


def count_letters(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that differs between completions."""
    return [len(text) / 10 for text in completions]


@torch.no_grad()
def own_error(lm: PreTrainedModel, rollout: Rollout) -> float:
    """Largest difference of a rollout's log-probs from those of the model's own pass over each row alone, nats."""
    errors = []
    for row, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        response = rollout.response_ids[row][mask]
        logits = lm(input_ids=torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
        errors.append((logprobs - rollout.logprobs[row][mask]).abs().max())
    return float(torch.stack(errors).max())


def table(rows: list[Row], counts: Counter[str]) -> str:
    """Format the rows as a Markdown page."""
    versions = (
        f"Python {platform.python_version()}, PyTorch {torch.__version__}, Transformers {transformers.__version__}"
    )
    static = sum(row.static not in ("", "refused") for row in rows)
    lines = [
        "# Families of causal language models",
        "",
        f"`make families`: {', '.join(f'{count} {result}' for result, count in counts.most_common())}; {versions},",
        "float32 on a CPU. Models are tiny and random. Log-probs: largest difference, in nats, between a rollout's and",
        "those of the model's own pass over each row alone; static cache: the same with `rollout.cache: static`, which",
        f"{static} families take. First ratio error: of an update, without and with `model.gradient_checkpointing`.",
        "`not built` is a family of which this program makes no tiny model.",
        "",
        "| family | result | log-probs | static cache | first ratio error | with checkpointing | |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def brief(error: Exception) -> str:
    """Format an error on one line."""
    text = " ".join(str(error).replace("|", "/").split())
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= 300 else text[:297] + "...")


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise `TimeoutError` when a family exceeds its time limit."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
