"""Environment steps per second, compared with Stable-Baselines3: `python benchmarks/control_speed.py`.

Both train in this process and take turns, some iterations each; the table shows medians, and the ratio is the median of
the turns' ratios. Settings are the same: environments, network, batch, epochs, minibatches, optimiser. Both use
one thread: these networks are too small for two.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import stable_baselines3 as sb3
import torch
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.settings.control import AgentCriticConfig, AgentRunConfig, AgentUpdateConfig, ControlConfig, EnvConfig

# id, copies, steps, epochs, minibatches, iterations per turn, target ratio
SETTINGS = [
    ("CartPole-v1", 4, 128, 4, 4, 20, 2.0),
    ("CartPole-v1", 40, 128, 4, 4, 4, None),
    ("HalfCheetah-v5", 1, 2_048, 10, 32, 1, 1.5),
]


def ours(folder: Path, env: str, copies: int, steps: int, epochs: int, minibatches: int) -> Callable[[int], None]:
    """Prepare this library; the result runs some iterations."""
    trainer = ControlTrainer(
        ControlConfig(
            env=EnvConfig(env, number=copies),
            steps=steps,
            critic=AgentCriticConfig(clip=None, coef=1.0),
            ppo=AgentUpdateConfig(epochs=epochs, minibatches=minibatches, entropy_coef=0.0),
            run=AgentRunConfig(dir=str(folder), iterations=10**6, trackers=[]),
        )
    )

    def run(iterations: int) -> None:
        for number in range(1, iterations + 1):
            trainer.iteration(number)

    return run


def theirs(env: str, copies: int, steps: int, epochs: int, minibatches: int) -> Callable[[int], None]:
    """Prepare Stable-Baselines3; the result runs some iterations."""
    batch = copies * steps
    model = sb3.PPO(
        "MlpPolicy",
        make_vec_env(env, copies, seed=1),
        learning_rate=2.5e-4,
        n_steps=steps,
        batch_size=batch // minibatches,
        n_epochs=epochs,
        vf_coef=0.5,
        ent_coef=0.0,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
        device="cpu",
        seed=1,
    )
    return lambda iterations: model.learn(iterations * batch, reset_num_timesteps=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, Stable-Baselines3 {sb3.__version__}, one thread\n")
    print("| environment | copies × steps, epochs × minibatches | steps/s | Stable-Baselines3 | ratio | wanted |")
    print("|---|---|---|---|---|---|")
    for env, copies, steps, epochs, minibatches, iterations, wanted in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            contestants = [
                ours(Path(folder) / "run", env, copies, steps, epochs, minibatches),
                theirs(env, copies, steps, epochs, minibatches),
            ]
            rates: list[list[float]] = [[], []]
            for turn in range(turns + 1):  # the first is a warm-up
                for run, rate in zip(contestants, rates, strict=True):
                    started = time.perf_counter()
                    run(iterations)
                    if turn:
                        rate.append(iterations * copies * steps / (time.perf_counter() - started))
        ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
        mine, other = (f"{statistics.median(rate):,.0f}" for rate in rates)
        shape = f"{copies} × {steps:,}, {epochs} × {minibatches}"
        print(f"| {env} | {shape} | {mine} | {other} | {ratio:.2f} | {f'≥ {wanted}' if wanted else ''} |", flush=True)


if __name__ == "__main__":
    main()
