"""Memory and time of episodes of several turns, compared with single completions of the same tokens.

    python benchmarks/turns.py [--rounds 3]

32 episodes of 8 turns of 64 tokens each, at the size `mini` of text_step.py: in each turn 48 tokens of the policy and
16 of the environment. A single completion has the same 512 tokens, all of the policy. Each contestant is a process of
one training iteration, warmed up by a short one; memory is the peak of the process above that after the warm-up.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from text_step import make
from text_step_contestants import SHAPES

EPISODES, TURNS, ACTED, OBSERVED = 32, 8, 48, 16
TOKENS = TURNS * (ACTED + OBSERVED)
KINDS = ("turns", "single")


class Clock:
    """An environment that says the same number of words after each turn."""

    def reset(self, row: dict) -> str:
        """Begin."""
        self.taken = 0
        return " ".join(["w1"] * SHAPES["mini"].prompt)

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Answer; the reward is the number of turns."""
        self.taken += 1
        return " ".join(["w2"] * OBSERVED), 1.0, self.taken == TURNS


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def contestant(kind: str, model: str, folder: str) -> None:
    """Train two iterations, a short one for warm-up, and print seconds and peak memory of the second as JSON."""
    from tokencredit import PPOConfig, PPOTrainer

    settings = {
        "model.dtype": "float32",
        "rollout.batch_size": EPISODES,
        "rollout.stop_at_eos": False,
        "rollout.max_new_tokens": TOKENS,
        "ppo.epochs": 1,
        "kl.coef": 0.05,
        "run.iterations": 1,
        "run.save_every": 0,
        "run.trackers": [],
    }
    several = {"env.turn_tokens": ACTED, "env.max_turns": TURNS}

    def run(name: str, changes: dict) -> None:
        args = PPOConfig.from_dict(settings | {"run.dir": f"{folder}/{name}"} | changes)
        words = {"environment_factory": Clock} if kind == "turns" else {}
        rows = {"train_dataset": [{"prompt": Clock().reset({})}], "reward_funcs": length} if kind == "single" else {}
        PPOTrainer(model, args=args, **words, **rows).train()

    def length(completions: list[str], **_: object) -> list[float]:
        return [float(len(completion)) for completion in completions]

    changes = several if kind == "turns" else {}
    run("warm-up", changes | {"rollout.batch_size": 4, "ppo.minibatches": 1})
    before = peak()
    run("measured", changes)
    line = json.loads(Path(folder, "measured", "metrics.jsonl").read_text().splitlines()[-1])
    seconds = {name: line[name] for name in ("seconds", "seconds/rollout", "seconds/update")}
    print(json.dumps(seconds | {"before": before, "peak": peak(), "tokens": line["tokens"]}))


def main() -> None:
    """Let the contestants take turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes per contestant")
    parser.add_argument("--contestant", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant(*options.contestant)
        return
    shape = replace(SHAPES["mini"], new=TOKENS)
    results: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), shape)
        for number in range(options.rounds):
            for kind in KINDS:
                model = str(Path(folder) / "policy")
                command = [sys.executable, __file__, "--contestant", kind, model, f"{folder}/{kind}{number}"]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                results[kind].append(json.loads(out.splitlines()[-1]))
    print("| | tokens of the policy | peak memory, GB | rollout, s | update, s |")
    print("|---|---|---|---|---|")
    for kind, rows in results.items():
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(
            f"| {kind} | {middle['tokens']:,.0f} | {middle['peak'] / 1e9:.2f} | {middle['seconds/rollout']:.1f} "
            f"| {middle['seconds/update']:.1f} |"
        )
    ratio = statistics.median(a["peak"] / b["peak"] for a, b in zip(results["turns"], results["single"], strict=True))
    print(f"\npeak memory of turns: {ratio:.2f} of that of single completions (wanted: at most 1.15)")


if __name__ == "__main__":
    main()
