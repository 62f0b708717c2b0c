"""Returns of trained agents beside Stable-Baselines3: `python benchmarks/control.py --keep FOLDER` prints a table.

Both train each recipe of `recipes/control/` with each seed, one process and one thread per run, `--jobs` at once. A
result is the mean return of the last 100 training episodes; `greedy` is that of fresh episodes with the most likely
actions. Finished runs stay in FOLDER, so that a benchmark that was stopped goes on where it was.

Stable-Baselines3 has the recipe's networks, budget, batch, epochs, minibatches, clip ranges, coefficients, Adam's ε and
learning rate per iteration; its defaults agree with us in orthogonal weights (gains √2, 0.01, 1), zero biases and log
deviations, advantages normalised per minibatch and one gradient norm over actor and critic. Differences that remain:

- Our environments reset in a step of their own, which counts in the budget: one step per episode.
- The last observation of an episode enters our statistics of observations, not theirs.
- Whitening divides by √(σ² + 1e-8) with us, by σ + 1e-8 with them, whose σ² has n − 1 in the divisor.
- The same seed gives other random numbers, and other episodes of the evaluation.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from findings_measures import difference
from scipy import stats

import tokencredit
from tokencredit.learn.optim import schedule
from tokencredit.provenance.environment import repository
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import flat
from tokencredit.settings.reader import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes" / "control"
TARGETS = {"cartpole": 475.0, "acrobot": -90.0, "pendulum": 900.0, "lunarlander": 200.0}
"""Minimum return per seed."""
GREEDY = {"cartpole": (495, 505)}
CLEANRL = {
    "cartpole": (490.04, 6.12, "CartPole-v1, 500,000"),
    "acrobot": (-86.36, 1.32, "Acrobot-v1, 500,000"),
    "lunarlander": None,
    "pendulum": (963.09, 22.20, "InvertedPendulum-v4, 1,000,000"),
    "hopper": (2382.86, 271.74, "Hopper-v4, 1,000,000"),
    "halfcheetah": (1442.64, 46.03, "HalfCheetah-v4, 1,000,000"),
    "walker2d": (2287.95, 571.78, "Walker2d-v4, 1,000,000"),
}
"""PPO's return, deviation over three seeds, environment and steps: its docs/benchmark/ppo.md and
ppo_continuous_action.md at fe8d8a03, steps from the defaults of its scripts."""
ZOO = {
    "cartpole": (500.000, 0.000, "CartPole-v1, 100,000"),
    "acrobot": (-73.506, 18.201, "Acrobot-v1, 1,000,000"),
    "lunarlander": (242.119, 31.823, "LunarLander-v2, 1,000,000"),
    "pendulum": None,
    "hopper": (2410.435, 10.026, "Hopper-v3, 1,000,000"),
    "halfcheetah": (5819.099, 663.530, "HalfCheetah-v3, 1,000,000"),
    "walker2d": (3478.798, 821.708, "Walker2d-v3, 1,000,000"),
}
"""PPO's greedy return, deviation over the episodes of its one run, environment and steps: benchmark.md of
rl-baselines3-zoo at 22e3ff24. Its settings are tuned per environment; LunarLander's are ours."""
READ = {
    "env.id",
    "env.number",
    "env.normalize_observations",
    "env.normalize_rewards",
    "env.clip",
    "steps",
    "agent.hidden",
}
READ |= {"advantage.gamma", "advantage.lam", "ppo.epochs", "ppo.minibatches", "ppo.clip", "ppo.entropy_coef"}
READ |= {"optim.lr", "optim.eps", "optim.schedule", "optim.warmup", "optim.final_scale", "optim.max_grad_norm"}
READ |= {"critic.coef", "eval.episodes", "run.iterations"}
"""Settings that Stable-Baselines3 is given."""
SAME = {"advantage.estimator": "gae", "critic.clip": None}
"""Settings that it has anyway. It has one learning rate, and an evaluation at the end."""


def ours(config: ControlConfig, folder: Path) -> dict[str, float]:
    """Train a recipe, as the command does."""
    from tokencredit.control.control_trainer import ControlTrainer

    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    config.run.dir, config.run.trackers, config.audit.at_end = str(folder), [], False
    ControlTrainer(config).train()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    if last["iteration"] != config.run.iterations:
        sys.exit(f"{folder} was stopped after {last['iteration']} of {config.run.iterations} iterations")
    return {"return": last["train/average_return"], "greedy": last["eval/average_return"]}


def theirs(config: ControlConfig, folder: Path) -> dict[str, float]:
    """Train a recipe with Stable-Baselines3."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
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
    batch, iterations = env.number * config.steps, config.run.iterations
    factor = schedule(**optim.rates(iterations))  # Stable-Baselines3 asks for the rate after each rollout
    model = sb3.PPO(
        "MlpPolicy",
        envs,
        learning_rate=lambda left: optim.lr * factor(max(0, round((1 - left) * iterations) - 1)),
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
    model.learn(iterations * batch)
    average = statistics.mean(episode["r"] for episode in model.ep_info_buffer)
    if isinstance(envs, VecNormalize):
        envs.training = False
    greedy, _ = evaluate_policy(model, envs, config.eval.episodes)  # returns are those before normalisation
    return {"return": average, "greedy": float(greedy)}


def one(name: str, library: str, seed: int, keep: Path) -> None:
    """Run once; record the returns, the seconds and the commit."""
    import torch

    torch.set_num_threads(1)
    recipe = flat(read_yaml(RECIPES / f"{name}.yaml"))
    same = SAME | {"critic.lr": recipe.get("optim.lr")}
    other = [key for key, x in recipe.items() if key not in READ | {"eval.every"} and same.get(key, object()) != x]
    if other:
        sys.exit(f"{name}.yaml sets {', '.join(other)}, which Stable-Baselines3 is not given")
    code = repository(Path(tokencredit.__file__).parent) or {"commit": "", "changed_files": 0}
    config = ControlConfig.from_yaml(RECIPES / f"{name}.yaml")
    config.seed = seed
    folder = keep / f"{name}-{library}-{seed}"
    started = time.perf_counter()
    result = {"ours": ours, "theirs": theirs}[library](config, folder)
    commit = code["commit"][:8] + "+" * (code["changed_files"] > 0)
    result |= {"seconds": time.perf_counter() - started, "code": commit}
    (keep / f"{folder.name}.json").write_text(json.dumps(result))


def middle(values: list[float]) -> float:
    """Interquartile mean."""
    return float(stats.trim_mean(values, 0.25))


def spread(results: list[dict[str, float]]) -> str:
    """Interquartile mean of the returns over seeds, and each seed's."""
    values = [result["return"] for result in results]
    return f"{middle(values):.1f} ({', '.join(f'{x:.1f}' for x in values)})"


def verdict(name: str, runs: dict[str, list[dict[str, float]]], at: str) -> str:
    """Each target, and whether it was met; `at` is the environment and the number of steps."""
    own, other = ([result["return"] for result in runs[library]] for library in ("ours", "theirs"))
    _, low, high = difference(own, other)
    beside = "better" if low > 0 else "worse" if high < 0 else "within chance"
    if beside == "within chance" and not high - low < abs(statistics.mean(other)) / 4:
        beside = "cannot tell"
    lines = [f"Stable-Baselines3: {beside}"]
    published = CLEANRL[name]
    if published and published[2] == at:
        lines.append(f"≥ CleanRL's mean: {'yes' if statistics.mean(own) >= published[0] else 'no'}")
    if name in TARGETS:
        lines.append(f"≥ {TARGETS[name]:g} on each seed: {'yes' if min(own) >= TARGETS[name] else 'no'}")
    if name in GREEDY:
        low, high = GREEDY[name]
        met = all(low <= result["greedy"] <= high for result in runs["ours"])
        lines.append(f"greedy within {low} to {high}: {'yes' if met else 'no'}")
    return "; ".join(lines)


def table(names: list[str], seeds: list[int], keep: Path) -> None:
    """Print the results of finished runs."""
    print(
        "Returns are interquartile means (seeds). Beside Stable-Baselines3: better or worse if the 95 % interval of "
        "the difference of means (Welch) excludes 0; else within chance if it is narrower than a quarter of their "
        "mean, and otherwise cannot tell. CleanRL's mean is a target in the same environment after as many steps."
    )
    print(
        "\n| recipe | steps | ours | Stable-Baselines3 | ours − theirs, 95 % | greedy, ours and theirs "
        "| CleanRL, published | zoo, published, greedy | verdicts |\n|" + "---|" * 9
    )
    code = set()
    for name in names:
        config = ControlConfig.from_yaml(RECIPES / f"{name}.yaml")
        steps = config.run.iterations * config.steps * config.env.number
        runs = {
            library: [json.loads((keep / f"{name}-{library}-{seed}.json").read_text()) for seed in seeds]
            for library in ("ours", "theirs")
        }
        _, low, high = difference(*([result["return"] for result in results] for results in runs.values()))
        published = [f"{x[0]:g} ± {x[1]:g} ({x[2]})" if x else "" for x in (CLEANRL[name], ZOO[name])]
        code |= {result.get("code", "before it was recorded") for results in runs.values() for result in results}
        greedy = (f"{middle([result['greedy'] for result in results]):.1f}" for results in runs.values())
        cells = [name, f"{steps:,}", *(spread(results) for results in runs.values())]
        cells += [f"{low:.1f} to {high:.1f}", ", ".join(greedy), *published]
        print(f"| {' | '.join([*cells, verdict(name, runs, f'{config.env.id}, {round(steps, -4):,}')])} |")
    print(f"\nCode: {', '.join(sorted(code))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", choices=list(CLEANRL), default=list(CLEANRL))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.one:
        name, library, seed = args.one
        one(name, library, int(seed), args.keep)
        return
    jobs = [(name, library, seed) for name in args.recipes for seed in args.seeds for library in ("ours", "theirs")]

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

    table(args.recipes, args.seeds, args.keep)


if __name__ == "__main__":
    main()
