"""`tokencredit plan` against measured runs: memory of each part, peak and time.

    python benchmarks/plan.py [--only NAME …] [--iterations 4] [--memory]

Each configuration is planned by the command and then run at once, both in processes of their own, so that calibration
and run see the same machine. The models have random weights and completions full length. Memory is the resident set's
high-water mark by the kernel (VmHWM), reset before each stage; tensors are summed by their storage. Time is the median
iteration after the first, which warms up. The whole takes 17 minutes on 2 idle cores and prints the tables
of RESULTS.md; `--memory` skips the calibration.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = 64
GB = 1e9
PARTS = ("weights", "critic", "reference", "moments", "gradients")


def gpt2(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A GPT-2 of these sizes."""
    ends = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary, "n_positions": 1024}
    return {"model_type": "gpt2", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **sizes, **ends}


def qwen3(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, head_dim: int = 64
) -> dict[str, Any]:
    """A Qwen3 of these sizes."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocabulary}
    sizes |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": mlp}
    return {"model_type": "qwen3", "max_position_embeddings": 2048, "tie_word_embeddings": True, **sizes}


MODELS = {
    "tiny": gpt2(2, 128, 4, 1_024),
    "mini": gpt2(4, 256, 4, 50_257),
    "medium": gpt2(8, 512, 8, 8_000),
    "small": gpt2(12, 768, 12, 50_257),
    "qwen": qwen3(8, 384, 6, 3, 1_152, 32_000),
    "llama": {**qwen3(8, 384, 6, 3, 1_152, 32_000), "model_type": "llama"},
    "gemma2": {
        **qwen3(6, 384, 6, 3, 1_152, 32_000),
        "model_type": "gemma2",
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
    },
    "mixtral": {**qwen3(4, 256, 4, 2, 512, 16_000), "model_type": "mixtral", "num_local_experts": 4},
    "layer": qwen3(1, 5120, 40, 8, 17_408, 2_000, head_dim=128),
    "neox": {**qwen3(6, 384, 6, 6, 1_536, 20_000), "model_type": "gpt_neox", "max_position_embeddings": 1024},
}
RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "shared critic, float32": ("mini", 1, 16, {"rollout.batch_size": 32, "rollout.max_new_tokens": 48}),
    "separate critic, bfloat16": (
        "mini",
        1,
        16,
        {"rollout.batch_size": 32, "rollout.max_new_tokens": 112, "critic.kind": "separate", "model.dtype": "bfloat16"},
    ),
    "long completions": ("medium", 1, 32, {"rollout.batch_size": 8, "rollout.max_new_tokens": 480}),
    "long, checkpointing": (
        "medium",
        1,
        32,
        {"rollout.batch_size": 8, "rollout.max_new_tokens": 480, "model.gradient_checkpointing": True},
    ),
    "micro-batches": (
        "medium",
        1,
        32,
        {"rollout.batch_size": 32, "rollout.max_new_tokens": 96, "ppo.micro_batch_tokens": 512},
    ),
    "LoRA, bfloat16": (
        "small",
        1,
        16,
        {"rollout.batch_size": 8, "rollout.max_new_tokens": 48, "model.lora.rank": 8, "model.dtype": "bfloat16"},
    ),
    "124M, bfloat16": (
        "small",
        1,
        16,
        {"rollout.batch_size": 8, "rollout.max_new_tokens": 32, "model.dtype": "bfloat16"},
    ),
    "Qwen3, float32": ("qwen", 1, 32, {"rollout.batch_size": 16, "rollout.max_new_tokens": 96}),
    "Qwen3, separate critic, bfloat16": (
        "qwen",
        1,
        32,
        {
            "rollout.batch_size": 16,
            "rollout.max_new_tokens": 96,
            "critic.kind": "separate",
            "critic.layers": 4,
            "model.dtype": "bfloat16",
        },
    ),
    "no critic, groups": (
        "tiny",
        1,
        16,
        {
            "rollout.batch_size": 64,
            "rollout.per_prompt": 4,
            "rollout.max_new_tokens": 112,
            "critic.kind": "none",
            "advantage.estimator": "group_relative",
        },
    ),
    "larger batch": ("medium", 1, 32, {"rollout.batch_size": 96, "rollout.max_new_tokens": 96}),
    "Llama, LoRA, separate critic": (
        "llama",
        1,
        32,
        {
            "rollout.batch_size": 16,
            "rollout.max_new_tokens": 96,
            "model.lora.rank": 8,
            "critic.kind": "separate",
        },
    ),
    "Gemma 2, sliding window": ("gemma2", 1, 32, {"rollout.batch_size": 16, "rollout.max_new_tokens": 160}),
    "Mixtral, micro-batches": (
        "mixtral",
        1,
        32,
        {"rollout.batch_size": 32, "rollout.max_new_tokens": 96, "ppo.micro_batch_tokens": 1024},
    ),
    "GPT-NeoX, exact KL": (
        "neox",
        1,
        32,
        {"rollout.batch_size": 24, "rollout.max_new_tokens": 96, "kl.place": "loss", "kl.estimator": "full"},
    ),
    **{
        f"one layer of Qwen3-14B, {kind}, LoRA{', critic.lora' * (len(critic) > 0)}": (
            "layer",
            1,
            16,
            {
                "rollout.batch_size": 8,
                "rollout.max_new_tokens": 24,
                "ppo.micro_batch_tokens": 80,
                "model.gradient_checkpointing": True,
                "model.lora.rank": 16,
                "model.quantization": kind,
                "critic.head": "linear",
                **critic,
            },
        )
        for kind in ("nf4", "int8")
        for critic in ({}, {"critic.kind": "separate", "critic.lora.rank": 16})
    },
    "2 processes": ("medium", 2, 32, {"rollout.batch_size": 16, "rollout.max_new_tokens": 96}),
    "2 processes, sharded": (
        "medium",
        2,
        32,
        {"rollout.batch_size": 16, "rollout.max_new_tokens": 96, "run.shard": "full", "critic.kind": "separate"},
    ),
}
"""Configurations by name: model, processes, tokens per prompt, settings."""
COMMON = {
    "model.dtype": "float32",
    "reward": [{"function": "repetition"}],
    "rollout.stop_at_eos": False,
    "ppo.epochs": 1,
    "ppo.minibatches": 2,
    "run.trackers": [],
    "run.show_every": 0,
}


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a model with random weights, and a tokenizer with a token per word."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = sizes["vocab_size"]
    words = {f"w{i}": i for i in range(vocabulary - 1)} | {"<end>": vocabulary - 1}
    raw = Tokenizer(WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = WhitespaceSplit()
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>").save_pretrained(folder)


def write_run(folder: Path, name: str, iterations: int) -> Path:
    """Write a run's configuration and prompts; returns the configuration's path."""
    model, _, prompt, settings = RUNS[name]
    chance = random.Random(0)
    words = MODELS[model]["vocab_size"] - 1
    texts = [" ".join(f"w{chance.randrange(words)}" for _ in range(prompt)) for _ in range(PROMPTS)]
    own = {"model.name": str(folder / model), "prompts.text": texts, "run.iterations": iterations}
    own["run.dir"] = str(folder / f"run-{len(list(folder.iterdir()))}")
    file = folder / "run.yaml"
    from tokencredit.settings.reader import dump_yaml

    file.write_text(dump_yaml({**COMMON, **own, **settings}), encoding="utf-8")
    return file


def status(key: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def forget_peak() -> None:
    """Reset the high-water mark of the resident set."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Marks:
    """A callback that records the high-water mark of each stage; after the last iteration comes the saving."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        """The methods `before_STAGE` and `after_STAGE`."""
        moment, _, stage = name.partition("_")
        if moment not in ("before", "after"):
            raise AttributeError(name)
        begins = moment == "before" or stage == "iteration"
        return lambda *_, **__: forget_peak() if begins else self.mark(stage)

    def mark(self, stage: str) -> None:
        """Note the high-water mark since the last reset."""
        self.peaks[stage] = max(self.peaks.get(stage, 0), status("VmHWM"))


def held(tensors: Iterable[Any]) -> int:
    """Bytes of tensors in this process, which holds a part of a sharded one."""
    return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)


def measure(file: Path, out: Path) -> None:
    """Run a configuration, as `tokencredit train` does, and write what was measured."""
    from tokencredit.cli import set_up_libraries

    set_up_libraries()
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tokencredit import PPOConfig, PPOTrainer
    from tokencredit.distributed.processes import Processes, return_freed_memory

    disable_progress_bar()
    config = PPOConfig.from_yaml(file)
    if config.run.shard != "none":
        return_freed_memory()
    processes, marks = Processes(), Marks()
    trainer = PPOTrainer(args=config, callbacks=[marks])
    tensors: dict[str, float] = {}

    def steps(step: Any = trainer.learner.optimizer.step) -> Any:
        tensors["gradients"] = held(p.grad for p in trainer.learner.parameters if p.grad is not None)
        return step()

    trainer.learner.optimizer.step = steps
    trainer.train()
    marks.mark("save")
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [{key: x for key, x in json.loads(line).items() if key.startswith("seconds")} for line in lines]
    state = [x for values in trainer.learner.optimizer.state.values() for x in values.values() if x.dim()]
    own = trainer.reference is not None and trainer.reference is not trainer.policy
    critic = trainer.policy.critic
    tensors |= {
        "weights": held(trainer.policy.lm.parameters()),
        "critic": 0 if critic is None else held(critic.parameters()),
        "moments": held(state),
        "reference": held(trainer.reference.parameters()) if own else 0,
    }
    result = {"peaks": marks.peaks, "seconds": seconds, "tensors": tensors, "threads": torch.get_num_threads()}
    (out / f"rank-{processes.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    processes.close()
    os._exit(0)  # without waiting for the C libraries' threads


def launch(count: int, *arguments: str) -> str:
    """Run this program in one or several processes; returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "ACCELERATE_USE_CPU": "true"}
    start = [sys.executable]
    if count > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
    done = subprocess.run(
        [*start, *arguments], env=environment, capture_output=True, text=True, cwd=tempfile.gettempdir(), check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    """Plan and run all configurations, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--memory", action="store_true", help="plan without the calibration of time")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if args.measure:
        measure(args.measure, args.out)
        return
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in {RUNS[name][0] for name in args.only}:
            make_model(folder / model, MODELS[model])
        results = [compare(folder, name, args) for name in args.only]
    print(f"\n{peak_table(results)}\n\n{parts_table(results)}\n\n{time.monotonic() - started:.0f} s")


def compare(folder: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Plan a configuration and then run it; returns both results, of the process with the highest peak."""
    count, file, out = RUNS[name][1], write_run(folder, name, args.iterations), folder / "plan.json"
    out.unlink(missing_ok=True)
    options = ["--no-time"] if args.memory else []
    plan = ["-m", "tokencredit", "plan", "--config", str(file), "--processes", str(count), "--out", str(out)]
    launch(1, *plan, *options)
    launch(count, __file__, "--measure", str(file), "--out", str(folder))
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    own = max(ranks, key=lambda rank: max(rank["peaks"].values()))
    result = {"name": name, "count": count, "plan": json.loads(out.read_text(encoding="utf-8")), **own}
    print(peak_row(result), flush=True)
    return result


def iteration_seconds(result: dict[str, Any]) -> float:
    """Median seconds of the iterations after the first, without the reward's."""
    return statistics.median(x["seconds"] - x["seconds/reward"] for x in result["seconds"][1:])


def table(head: str, rows: list[str]) -> str:
    """A table in Markdown."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def peak_row(result: dict[str, Any]) -> str:
    """A configuration's peak and time: planned, measured, ratio."""
    planned, measured = result["plan"]["peak"]["bytes"], max(result["peaks"].values())
    stage = max(result["peaks"], key=result["peaks"].__getitem__)
    cells = [result["name"], f"{planned / GB:.2f}", f"{measured / GB:.2f}", f"{planned / measured:.2f}"]
    cells += [f"{result['plan']['peak']['at']}, {stage}"]
    if result["plan"]["seconds"]:
        seconds, spent = sum(result["plan"]["seconds"].values()), iteration_seconds(result)
        cells += [f"{seconds:.3g}", f"{spent:.3g}", f"{seconds / spent:.2f}"]
    else:
        cells += [""] * 3
    return f"| {' | '.join(cells)} |"


def peak_table(results: list[dict[str, Any]]) -> str:
    """Peaks and times of all configurations."""
    head = "| run | peak planned, GB | measured | ratio | where: planned, measured "
    head += "| seconds per iteration planned | measured | ratio |"
    return table(head, [peak_row(result) for result in results])


def parts_table(results: list[dict[str, Any]]) -> str:
    """Bytes of tensors that a run keeps: by the formula, which all processes measured alike."""
    rows = []
    for result in results:
        planned, tensors = result["plan"]["memory"]["kept"], result["tensors"]
        planned = planned | {"gradients": planned["moments"] / 2}
        ratios = [planned[part] / tensors[part] if tensors[part] else float(not planned[part]) for part in PARTS]
        cells = [
            result["name"],
            *(f"{tensors[part] / GB:.3f} ({r:.3f})" for part, r in zip(PARTS, ratios, strict=True)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return table(f"| measured GB (planned / measured) | {' | '.join(PARTS)} |", rows)


if __name__ == "__main__":
    main()
