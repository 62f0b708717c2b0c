"""Returns of trained agents: `python benchmarks/control.py --keep FOLDER` prints a table beside Stable-Baselines3.

Each recipe of `recipes/control/` is run with each seed, a process with one thread each, as many at once as `--jobs`
says; where a comparison is wanted, Stable-Baselines3's PPO runs with the same networks and settings. A result is the
mean return of the last 100 training episodes. What is done stays in FOLDER, so that a benchmark that was stopped goes
on where it was.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokencredit.settings.control import ControlConfig

RECIPES = Path(__file__).parents[1] / "recipes" / "control"
COMPARED = ("hopper", "halfcheetah")
WANTED = {"cartpole": 475, "acrobot": -90, "pendulum": 900}
GREEDY = {"cartpole": (495, 505)}
CLEANRL = {  # its documentation's tables; the environments there are those of version 4, CartPole and Acrobot aside
    "cartpole": "490.04 ± 6.12",
    "acrobot": "-86.36 ± 1.32",
    "pendulum": "963.09 ± 22.20",
    "hopper": "2382.86 ± 271.74",
    "halfcheetah": "1442.64 ± 46.03",
}


def ours(config: ControlConfig, folder: Path) -> dict[str, float]:
    """Train a recipe, as the command does."""
    from tokencredit.control.control_trainer import ControlTrainer

    config.run.dir, config.run.trackers = str(folder), []
    ControlTrainer(config).train()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {"return": last["train/average_return"], "greedy": last["eval/average_return"]}


def theirs(config: ControlConfig, folder: Path) -> dict[str, float]:
    """Train a recipe with Stable-Baselines3."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize
    from torch import nn

    env, ppo, optim, gamma = config.env, config.ppo, config.optim, config.advantage.gamma
    envs = make_vec_env(env.id, env.number, seed=config.seed)
    if env.normalize_observations or env.normalize_rewards:
        envs = VecNormalize(
            envs,
            env.normalize_observations,
            env.normalize_rewards,
            clip_obs=env.clip,
            clip_reward=env.clip,
            gamma=gamma,
        )
    batch = env.number * config.steps
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: optim.lr * left,
        n_steps=config.steps,
        batch_size=batch // ppo.minibatches,
        n_epochs=ppo.epochs,
        gamma=gamma,
        gae_lambda=config.advantage.lam,
        clip_range=ppo.clip,
        ent_coef=ppo.entropy_coef,
        vf_coef=config.critic.coef / 2,  # its value loss is twice ours
        max_grad_norm=optim.max_grad_norm,
        policy_kwargs={
            "net_arch": {"pi": config.agent.hidden, "vf": config.agent.hidden},
            "activation_fn": nn.Tanh,
            "optimizer_kwargs": {"eps": optim.eps},
        },
        device="cpu",
        seed=config.seed,
    )
    model.learn(config.run.iterations * batch)
    return {"return": statistics.mean(episode["r"] for episode in model.ep_info_buffer)}


def one(name: str, library: str, seed: int, keep: Path) -> None:
    """Run once, and record the returns."""
    import torch

    torch.set_num_threads(1)
    config = ControlConfig.from_yaml(RECIPES / f"{name}.yaml")
    config.seed = seed
    folder = keep / f"{name}-{library}-{seed}"
    result = {"ours": ours, "theirs": theirs}[library](config, folder)
    (keep / f"{folder.name}.json").write_text(json.dumps(result))


def spread(results: list[dict[str, float]], key: str) -> str:
    """Mean and standard deviation over seeds, and each seed's result."""
    values = [result[key] for result in results]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {deviation:.1f} ({', '.join(f'{x:.1f}' for x in values)})"


def verdict(name: str, runs: dict[str, list[dict[str, float]]]) -> str:
    """The target, per seed or relative to the other library, and whether it was met."""
    own = [result["return"] for result in runs["ours"]]
    if name in COMPARED:
        met = statistics.mean(own) >= statistics.mean(result["return"] for result in runs["theirs"])
        return f"as good as Stable-Baselines3: {'yes' if met else 'no'}"
    met = min(own) >= WANTED[name]
    text = f"≥ {WANTED[name]} on each seed: {'yes' if met else 'no'}"
    if name in GREEDY:
        low, high = GREEDY[name]
        met = all(low <= result["greedy"] <= high for result in runs["ours"])
        text += f"; greedy within {low} to {high}: {'yes' if met else 'no'}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", choices=list(CLEANRL), default=list(CLEANRL))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.one:
        name, library, seed = args.one
        one(name, library, int(seed), args.keep)
        return
    jobs = [
        (name, library, seed)
        for name in args.recipes
        for seed in args.seeds
        for library in (("ours", "theirs") if name in COMPARED else ("ours",))
    ]

    def run(job: tuple[str, str, int]) -> None:
        label = "-".join(map(str, job))
        if (args.keep / f"{label}.json").exists():
            return
        command = [sys.executable, __file__, "--keep", str(args.keep), "--one", *map(str, job)]
        with (args.keep / f"{label}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, jobs))

    print("| recipe | steps | return, mean ± deviation (seeds) | greedy | Stable-Baselines3 | CleanRL | wanted |")
    print("|---|---|---|---|---|---|---|")
    for name in args.recipes:
        config = ControlConfig.from_yaml(RECIPES / f"{name}.yaml")
        steps = config.run.iterations * config.steps * config.env.number
        runs = {
            library: [
                json.loads((args.keep / f"{name}-{library}-{seed}.json").read_text())
                for seed in args.seeds
                if (name, library, seed) in jobs
            ]
            for library in ("ours", "theirs")
        }
        own, other = spread(runs["ours"], "return"), spread(runs["theirs"], "return") if runs["theirs"] else ""
        greedy = spread(runs["ours"], "greedy")
        print(f"| {name} | {steps:,} | {own} | {greedy} | {other} | {CLEANRL[name]} | {verdict(name, runs)} |")


if __name__ == "__main__":
    main()
