"""Time and memory of a PPO iteration, compared with TRL 1.9.2: `make bench` prints the tables.

    python benchmarks/text_step.py --trl TRL_PYTHON [--tables tiny mini small growth lengths] [--rounds 5]

TRL_PYTHON is the interpreter of an environment with `torch==2.13.0 trl==1.9.2`; `make bench` builds one. Models and
prompts are random; every response has full length. Each contestant is a process; they take turns, one iteration
each, after a warm-up; the tables show medians, and a ratio is the median of the rounds' ratios. Peak memory is
that of the whole process, libraries included.

`growth` compares long responses with short ones, and `lengths` responses that end where they end (geometric, mean a
quarter of the maximum) with the same model's at full length; both at the size `mini`.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from text_step_contestants import SHAPES, Shape
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

CONTESTANTS = Path(__file__).with_name("text_step_contestants.py")
PROMPTS = 256
TARGETS = {  # speed and memory against TRL of the same work, time over the floor; speed and memory as it comes
    "tiny": {"same_work": (2.0, 0.9, 1.3), "as_it_comes": (2.5, 0.9)},
    "mini": {"same_work": (1.6, 0.40, 1.1), "as_it_comes": (2.5, 0.35)},
    "small": {"same_work": (1.05, 0.75, 1.05), "as_it_comes": (2.0, 0.50)},
}
IN_PAIRS = ("small",)
"""Sizes whose contestants do not fit into 24 GB of memory together: each of ours meets TRL and the floor in turn."""
LABELS = {
    "trl": "TRL 1.9.2",
    "floor": "bare floor",
    "same_work": "Tokencredit, same work, float32",
    "as_it_comes": "Tokencredit, as it comes",
}


OURS = ("same_work", "as_it_comes")


def make(folder: Path, shape: Shape) -> None:
    """A policy, a reward model and prompts of exactly the right length: each word is a token.

    The policy ends a response with a probability of about four over its longest length at every token.
    """
    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(shape.vocabulary - 1)} | {"<end>": shape.vocabulary - 1}
    raw = Tokenizer(WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=max(shape.prompt + shape.new, 64),
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=None,
        pad_token_id=end,
    )
    for name, kind in (("policy", GPT2LMHeadModel), ("reward", GPT2ForSequenceClassification)):
        config.num_labels = 1
        model = kind(config)
        if name == "policy":
            end_sometimes(model, end, 4 / shape.new)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    prompts = [" ".join(f"w{rng.randrange(shape.vocabulary - 1)}" for _ in range(shape.prompt)) for _ in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


@torch.no_grad()
def end_sometimes(model: GPT2LMHeadModel, end: int, probability: float) -> None:
    """Give the end token a nearly constant probability, with a direction of the hidden states reserved for it."""
    weight, bias = model.transformer.wte.weight, model.transformer.ln_f.bias
    direction = torch.zeros_like(bias)
    direction[0] = 1
    others = weight[:, 0].clone()
    weight[end] = 0.2 * direction
    for _ in range(20):  # the bias changes the others' logits too
        wanted = torch.logsumexp(bias[0] * others, 0) + math.log(probability / (1 - probability))
        bias[0] = wanted / 0.2


class Contestant:
    """A process that runs iterations on request."""

    def __init__(self, python: str, name: str, size: str, folder: Path):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.name, self.log = name, folder / f"{name}.log"
        self.process = subprocess.Popen(
            [python, str(CONTESTANTS), name, size, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=environment,
        )
        self.laps: list[dict] = []

    def answer(self) -> dict:
        """Wait for the end of an iteration."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} failed:\n{self.log.read_text()[-2000:]}")
        return json.loads(line)

    def lap(self) -> None:
        """Run one iteration."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.laps.append(self.answer())

    def stop(self) -> None:
        """Close the process."""
        self.process.stdin.close()
        self.process.wait()

    def seconds(self) -> list[float]:
        """Seconds of each lap."""
        return [lap["seconds"] for lap in self.laps]

    def stages(self) -> dict[str, float]:
        """Median seconds of each stage."""
        return {name: statistics.median(lap["stages"][name] for lap in self.laps) for name in self.laps[0]["stages"]}


def race(shape: str, names: Iterable[str], trl_python: str | None, rounds: int) -> dict[str, Contestant]:
    """Measure contestants at one shape."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder, SHAPES[shape])
        runners = {}
        for name in names:
            if name == "trl" and trl_python is None:
                continue
            runners[name] = Contestant(trl_python if name == "trl" else sys.executable, name, shape, folder)
            runners[name].answer()  # the warm-up, alone on the machine
        for _ in range(rounds):
            for runner in runners.values():
                runner.lap()
        for runner in runners.values():
            runner.stop()
    return runners


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def compare(size: str, trl_python: str | None, rounds: int) -> dict[tuple[str, str], dict[str, Contestant]]:
    """Races, by pairs of a contestant of ours and what it is held against; all pairs may come from one race."""
    others = ["trl", "floor"] if trl_python else ["floor"]
    pairs = [(own, other) for own in OURS for other in others]
    if size in IN_PAIRS:
        return {pair: race(size, pair, trl_python, rounds) for pair in pairs}
    return dict.fromkeys(pairs, race(size, LABELS, trl_python, rounds))


def report(size: str, races: dict[tuple[str, str], dict[str, Contestant]]) -> list[str]:
    """The table of one size."""
    shape = SHAPES[size]
    lines = [
        f"### {size}: {shape.layers} layers × {shape.width}, vocabulary {shape.vocabulary:,}; {shape.batch} × "
        f"({shape.prompt} + {shape.new}) tokens; {shape.epochs} epochs × {shape.minibatches} minibatches",
        "",
        "| | seconds | speed against TRL | time over the floor | peak GB | memory against TRL | stages |",
        "|---|---|---|---|---|---|---|",
    ]
    first = {name: runner for runners in reversed(races.values()) for name, runner in runners.items()}
    for name in (name for name in LABELS if name in first):
        runner, stages = first[name], first[name].stages()
        wanted = dict(zip(("speed", "memory", "floor"), TARGETS[size].get(name, ()), strict=False))
        speed, over, memory = "", "", ""
        if (name, "trl") in races:
            own, trl = races[name, "trl"][name], races[name, "trl"]["trl"]
            speed = cell(ratio(trl.seconds(), own.seconds()), wanted.get("speed"), at_least=True)
            memory = cell(own.laps[-1]["peak"] / trl.laps[-1]["peak"], wanted.get("memory"), at_least=False)
        if (name, "floor") in races:
            own, floor = races[name, "floor"][name], races[name, "floor"]["floor"]
            over = cell(ratio(own.seconds(), floor.seconds()), wanted.get("floor"), at_least=False)
        shares = ", ".join(f"{stage} {seconds / sum(stages.values()):.0%}" for stage, seconds in stages.items())
        cells = [LABELS[name], f"{statistics.median(runner.seconds()):.3g}", speed, over]
        lines.append("| " + " | ".join([*cells, f"{runner.laps[-1]['peak']:.2f}", memory, shares]) + " |")
    return [*lines, ""]


def growth(rounds: int) -> list[str]:
    """Time per token of long responses, compared with short ones."""
    lines = ["### growth: 32 × (16 + 64) against 32 × (16 + 1,024) tokens", ""]
    lines += ["| new tokens | seconds | milliseconds per token | peak GB | stages |", "|---|---|---|---|---|"]
    each = {}
    for name in ("short", "long"):
        shape = SHAPES[name]
        runner = race(name, ["same_work"], None, rounds if name == "short" else 1)["same_work"]
        seconds, stages = statistics.median(runner.seconds()), runner.stages()
        each[name] = seconds / shape.batch / shape.new
        shares = ", ".join(f"{stage} {spent / sum(stages.values()):.0%}" for stage, spent in stages.items())
        peak = runner.laps[-1]["peak"]
        lines.append(f"| {shape.new:,} | {seconds:.3g} | {1e3 * each[name]:.3g} | {peak:.2f} | {shares} |")
    return [*lines, "", f"Time a token grows by {cell(each['long'] / each['short'], 1.5, at_least=False)}.", ""]


def lengths(rounds: int) -> list[str]:
    """Responses of varying length, compared with responses of full length."""
    runners = race("uneven", ["as_it_comes", "as_they_end"], None, rounds)
    lines = [
        "### lengths: 32 × (16 + at most 256) tokens",
        "",
        "| responses | mean length | seconds |",
        "|---|---|---|",
    ]
    for label, runner in zip(("full length", "as they end"), runners.values(), strict=True):
        length = statistics.mean(lap["length"] for lap in runner.laps)
        lines.append(f"| {label} | {length:.0f} | {statistics.median(runner.seconds()):.3g} |")
    faster = ratio(runners["as_it_comes"].seconds(), runners["as_they_end"].seconds())
    return [*lines, "", f"Faster by {cell(faster, 2.5, at_least=True)}.", ""]


def cell(value: float | None, target: float | None, at_least: bool) -> str:
    """A ratio, with its target and whether it was met."""
    if value is None:
        return ""
    if target is None:
        return f"{value:.2f}"
    met = value >= target if at_least else value <= target
    return f"{value:.2f} ({'≥' if at_least else '≤'} {target}{'' if met else ', missed'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", help="the Python of TRL's environment; without it TRL is left out")
    tables = [*TARGETS, "growth", "lengths"]
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads\n")
    for table in args.tables:
        if table in TARGETS:
            lines = report(table, compare(table, args.trl, args.rounds))
        else:
            lines = {"growth": growth, "lengths": lengths}[table](args.rounds)
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
