"""Sampling engines side by side: 64 completions of up to 256 tokens, of uneven lengths, at the size `mini`.

    python benchmarks/engines.py [--vllm PYTHON] [--rounds 5] [--engines generate local continuous vllm]

PYTHON is the interpreter of an environment with vLLM (`make test-vllm` builds one). Each engine is a process of its own
with the same random model, float32 on two threads; a token ends a completion with a probability of 4 in 256. They take
turns, one rollout each, after a warm-up. The table has medians over the rounds of seconds per rollout and of tokens per
second, and the median of the rounds' ratios to the fastest. A rollout of `local`, `continuous` and `vllm` has log-probs
of the trained model; those of `generate` are not computed. `vllm` counts its weight sync, which the others do not need.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from text_step import make
from text_step_contestants import SHAPES

ROWS, NEW, PROMPT = 64, 256, 32
ENGINES = ("generate", "local", "continuous", "vllm")


def contestant(engine: str, folder: Path) -> Callable[[int], int]:
    """A function that samples a rollout with a seed and returns its number of tokens."""
    from tokencredit.distributed.processes import Processes
    from tokencredit.settings.model import ModelConfig
    from tokencredit.settings.rollout import RolloutConfig
    from tokencredit.settings.run_kind import ModelSource
    from tokencredit.settings.text import PPOConfig
    from tokencredit.text.data.prompts import PromptBatch
    from tokencredit.text.engines.building import build_engine
    from tokencredit.text.models.run_models import load_source

    name = "local" if engine == "generate" else engine
    rollout = RolloutConfig(max_new_tokens=NEW, engine=name, batch_size=ROWS)
    config = PPOConfig(model=ModelConfig(name=str(folder / "policy"), dtype="float32"), rollout=rollout)
    models = load_source(ModelSource(str(folder), config, None, False), "policy", Processes())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    prompts = PromptBatch(prompts=[""] * ROWS, texts=[""] * ROWS, ids=ids, mask=mask, columns={})
    if engine == "generate":
        lm, end = models.policy.lm, models.tokenizer.eos_token_id

        def generate(seed: int) -> int:
            torch.manual_seed(seed)
            options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "eos_token_id": end, "pad_token_id": end}
            tokens = lm.generate(ids, attention_mask=mask.long(), **options)[:, PROMPT:]
            return int((tokens != end).sum()) + int((tokens == end).any(1).sum())

        return generate
    sampler = build_engine(config, models, Processes(), print)

    def sample(seed: int) -> int:
        uniforms = torch.rand(ROWS, NEW, generator=torch.Generator().manual_seed(seed))
        if engine == "vllm":
            sampler.weights_changed()
        return int(sampler.generate(prompts, rollout, uniforms).mask.sum())

    return sample


def serve(engine: str, folder: Path) -> None:
    """Sample a rollout for each line of standard input, a seed; answer with seconds and tokens."""
    torch.set_num_threads(2)
    sample = contestant(engine, folder)
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = sample(int(line))
        print(json.dumps([time.perf_counter() - start, tokens]), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="interpreter with vLLM; without it, vllm is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]))
        return
    engines = [engine for engine in options.engines if engine != "vllm" or options.vllm]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, replace(SHAPES["mini"], prompt=PROMPT, new=NEW))
        processes = {
            engine: subprocess.Popen(
                [options.vllm if engine == "vllm" else sys.executable, __file__, "--serve", engine, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for engine in engines
        }
        results: dict[str, list[tuple[float, int]]] = {engine: [] for engine in engines}
        for seed in range(options.rounds + 1):
            for engine, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{seed}\n")
                process.stdin.flush()
                line = next(line for line in process.stdout if line.startswith("["))
                if seed:
                    results[engine].append(tuple(json.loads(line)))
        for process in processes.values():
            process.communicate()
    rates = {engine: [tokens / seconds for seconds, tokens in rows] for engine, rows in results.items()}
    best = [max(turn) for turn in zip(*rates.values(), strict=True)]
    print("| engine | seconds | tokens | tokens/s | time per token, beside the fastest |")
    print("|---|---|---|---|---|")
    for engine, rows in results.items():
        seconds, tokens = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(top / rate for top, rate in zip(best, rates[engine], strict=True))
        print(f"| {engine} | {seconds:.2f} | {tokens:,.0f} | {statistics.median(rates[engine]):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
