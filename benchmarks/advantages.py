"""How fast is GAE? `python benchmarks/advantages.py` prints a table against the usual loop over time.

The loop is the one that most PPO code has: one Python step a time step, on a column of all rows. It is given what it
needs in the simplest form, [batch, time] without masks or flags; `gae` is measured on the same, and again with a mask,
which the loop does without. Each shape is measured in rounds, every contestant once a round, so that whatever else
the machine does falls on all of them; a row shows medians, and the ratio is the median of the rounds' ratios.

Measured with one thread and with all. On a busy machine only the first means much: PyTorch splits work on large tensors
over its threads and waits for the slowest, while the loop's columns are too short to be split.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokencredit.core.advantages import gae

GAMMA, LAM = 0.99, 0.95
TARGETS = {(512, 1024): 10, (128, 16_384): 20}
LINEARITY = [(128, 4096), (128, 8192), (128, 16_384), (128, 32_768), (256, 16_384)]


def python_loop(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    following = torch.zeros(rewards.shape[0])
    value_after = torch.zeros(rewards.shape[0])
    reversed_advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * value_after - values[:, t]
        following = delta + GAMMA * LAM * following
        reversed_advantages.append(following)
        value_after = values[:, t]
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def warm_up_allocator() -> None:
    """Bring the C allocator to where any training run has it: keeping the memory of large tensors instead of
    handing it back to the system after every call, which would be most of what is measured."""
    for _ in range(3):
        torch.ones(8 * 2**20 - 4096)


def compare(shape: tuple[int, int], rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, *shape, generator=generator)
    lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = torch.arange(shape[1]) < lengths
    contestants: dict[str, Callable[[], object]] = {
        "loop": lambda: python_loop(rewards, values),
        "gae": lambda: gae(rewards, values, gamma=GAMMA, lam=LAM),
        "masked": lambda: gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask),
    }
    expected, found = python_loop(rewards, values), gae(rewards, values, gamma=GAMMA, lam=LAM)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    times = [{name: seconds(run) for name, run in contestants.items()} for _ in range(rounds + 2)][2:]
    loop, plain, masked = (statistics.median(t[name] for t in times) * 1e3 for name in contestants)
    ratio, masked_ratio = (statistics.median(t["loop"] / t[name] for t in times) for name in ("gae", "masked"))
    target = f"{TARGETS[shape]}×" if shape in TARGETS else ""
    print(
        f"{shape[0]:>5} × {shape[1]:>6,} {loop:>10.2f} {plain:>9.2f} {ratio:>7.1f}× {target:>7}"
        f" {masked:>12.2f} {masked_ratio:>7.1f}×"
    )


def linearity(rounds: int) -> None:
    """Nanoseconds an element, which would be the same on every line if time were exactly linear."""
    inputs = {shape: torch.randn(2, *shape) for shape in LINEARITY}
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in LINEARITY}
    for _ in range(rounds + 2):
        for shape, (rewards, values) in inputs.items():
            times[shape].append(seconds(lambda r=rewards, v=values: gae(r, v, gamma=GAMMA, lam=LAM)))
    for shape, measured in times.items():
        element = statistics.median(measured[2:]) / (shape[0] * shape[1])
        print(f"{shape[0]:>5} × {shape[1]:>6,} {element * 1e9:>10.2f} ns an element")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each contestant")
    parser.add_argument("--cold", action="store_true", help="leave the allocator as a fresh process has it")
    arguments = parser.parse_args()
    if not arguments.cold:
        warm_up_allocator()
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        print(f"GAE in float32, torch {torch.__version__}, threads: {threads}, milliseconds")
        print(f"{'shape':>14} {'loop':>10} {'gae':>9} {'ratio':>8} {'target':>7} {'with a mask':>12} {'ratio':>8}")
        for shape in [(64, 128), *TARGETS]:
            compare(shape, arguments.rounds)
        print("How time grows")
        linearity(arguments.rounds)
        print()


if __name__ == "__main__":
    main()
