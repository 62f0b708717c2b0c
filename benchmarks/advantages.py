"""How fast is GAE? `python benchmarks/advantages.py` prints a table against the usual loop over time.

The loop is that of most PPO code: one Python iteration per time step, on a column of all rows. Its inputs are plain
[batch, time] tensors without masks or flags; `gae` is measured on the same inputs, and again with a mask. Each shape is
measured in rounds, every contestant once per round, so that other load on the machine affects all of them; a row shows
medians, and the ratio is the median of the rounds' ratios.

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
    """Warm up the C allocator, so that it keeps the memory of large tensors as in a training run; returning it to the
    system after every call would dominate the measurement."""
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
    """Print nanoseconds per element, which are constant if time is exactly linear."""
    inputs = {shape: torch.randn(2, *shape) for shape in LINEARITY}
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in LINEARITY}
    for _ in range(rounds + 2):
        for shape, (rewards, values) in inputs.items():
            times[shape].append(seconds(lambda r=rewards, v=values: gae(r, v, gamma=GAMMA, lam=LAM)))
    for shape, measured in times.items():
        element = statistics.median(measured[2:]) / (shape[0] * shape[1])
        print(f"{shape[0]:>5} × {shape[1]:>6,} {element * 1e9:>10.2f} ns per element")


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
