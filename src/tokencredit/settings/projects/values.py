"""Values here of other projects' values: by our keys for all projects, and functions that several tables share."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args


class Without(str):
    """The reason that a rule gives no value; empty if the key keeps its default."""

    __slots__ = ()


DEFAULT = Without()
Tracker = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]
CHOICES = {
    **{"bf16": "bfloat16", "fp32": "float32", "float16": "", "fp16": "", "hf": "local", "vanilla": "clip"},
    **{"grpo": "group_relative", "group_norm": "group_relative", "reinforce_baseline": "group_relative"},
    **{"dr_grpo": "group_relative", "rloo": "leave_one_out", "reinforce": "reward_to_go"},
    **{"reinforce_plus_plus": "reward_to_go", "kl": "k1", "mse": "k2", "low_var_kl": "k3", "left": "truncate"},
    **{"delete": "drop", "raise": "error", "token-mean": "token", "seq-mean-token-mean": "sequence"},
    **{"seq-mean-token-sum-norm": "constant", "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "adam": "adamw",
}
"""The choice here by another name of it; empty for one that is not among them, whatever is spelt alike."""


def choice(value: Any) -> Any:
    """The choice here; one that is not known stays as it is, and the key refuses it."""
    name = str(getattr(value, "value", value))
    return CHOICES.get(name.lower()) or name


def first(*values: Any) -> Any:
    """The first value that is set."""
    return next((value for value in values if value not in (None, "")), DEFAULT)


def product(*values: Any) -> int:
    """The product of the numbers that are set."""
    return math.prod(int(value) for value in values if value is not None)


def number(whole: Any, part: Any) -> Any:
    """The number of minibatches or iterations of size `part`, at least 1."""
    return max(1, math.ceil(whole / part))


def iterations(epochs: Any, rows: Any, batch: Any, total: Any = None) -> Any:
    """Iterations of epochs over prompts, or of a total of completions."""
    if total or rows:
        return number(total or epochs * rows, batch)
    times = "once" if epochs == 1 else f"{epochs:g} times"
    return Without(f"{times} through the prompts, {batch} per iteration; give migrate their number with --rows")


def warmup(steps: Any, ratio: Any, total: Any, schedule: Any = None) -> Any:
    """Warm-up in iterations, of steps or of a share of them; Transformers' schedule `constant` has none."""
    steps, ratio = (0, 0) if schedule == "constant" else (max(steps or 0, 0), ratio)
    if steps >= 1 or not (steps or ratio):
        return int(steps)
    unknown = Without(f"{steps or ratio} of run.iterations, which is not known yet")
    return unknown if total is None else math.ceil((steps or ratio) * total)


def final_scale(schedule: Any, name: Any, options: Any, rate: Any, low: Any, lr: Any) -> Any:
    """The fraction of the learning rate at which Transformers' schedules end."""
    if schedule in (None, "constant"):
        return DEFAULT
    options = json.loads(options) if isinstance(options, str) else options or {}
    options = {key: x for key, x in ({"min_lr_rate": rate, "min_lr": low} | options).items() if x is not None}
    minimum = name.endswith("with_min_lr")
    if minimum and list(options) in (["min_lr_rate"], ["min_lr"]):
        return float(options["min_lr"] / lr if "min_lr" in options else options["min_lr_rate"])
    reason = f"{name} with lr_scheduler_kwargs {options}; one of min_lr_rate and min_lr of cosine_with_min_lr is read"
    return Without(reason) if minimum or options else 0.0


def dtype(bf16: Any, fp16: Any = None, *names: Any) -> Any:
    """The dtype of the passes, of two flags and of names such as `torch.bfloat16`."""
    name = "fp16" if fp16 else "bf16" if bf16 else first(*names, "float32" if bf16 is False else "auto")
    name = choice(str(name).rpartition(".")[2])
    return Without("float16 is not supported; bfloat16 or float32") if name in ("float16", "fp16") else name


def trackers(names: Any) -> Any:
    """The experiment trackers; `console` is always there."""
    names = [names] if isinstance(names, str) else list(names)
    wanted = [name for name in names if name not in ("none", "console", "all")]
    unknown = [name for name in wanted if name not in get_args(Tracker)]
    refused = Without(f"{', '.join(unknown)} is none of {', '.join(get_args(Tracker))}")
    return DEFAULT if "all" in names else refused if unknown else wanted


def every(strategy: Any, steps: Any = None) -> Any:
    """Iterations between saves or evaluations."""
    strategy = str(getattr(strategy, "value", strategy))
    if strategy in ("no", "False"):  # as YAML reads no
        return 0
    if strategy == "epoch" or (steps and 0 < steps < 1):
        return Without(f"every {strategy if strategy == 'epoch' else f'{steps} of the run'} there; give iterations")
    return DEFAULT if steps is None else max(int(steps), 0)


def layers(names: Any) -> Any:
    """Layers with an adapter."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or [])
    return DEFAULT if names in (["all"], ["all-linear"], []) else names


def reward_models(names: Any) -> Any:
    """Reward terms of reward models."""
    names = names.split(",") if isinstance(names, str) else names
    return [{"reward_model": name.strip()} for name in names]


def one_dataset(names: Any) -> Any:
    """The name of a data set, which is one here; `#` and a number of rows may follow it."""
    listed = names if isinstance(names, list) else names.split(",")
    if len(listed) > 1:
        return Without(f"{len(listed)} data sets there, one here; join them in a file")
    return str(listed[0]).partition("#")[0].strip()


def whitened(on: Any) -> Any:
    """`score.normalize` for rewards that are divided by their deviation."""
    return "batch" if on else DEFAULT


def rows_per_pass(rows: Any) -> Any:
    """The reason that a number of rows per pass has no value here."""
    reason = Without("ppo.micro_batch_tokens limits a pass, in tokens; set it only if memory runs out")
    return DEFAULT if rows is None else reason


CONVERSIONS = {
    "critic.pretrain": lambda steps: max(int(steps), 0),
    "eval.dataset": one_dataset,
    "eval.every": lambda steps: every("steps", steps),
    "eval.samples": lambda _: Without("rows per pass there; eval.samples is the number of prompts of an evaluation"),
    "model.dtype": lambda name: dtype(name) if isinstance(name, bool) else dtype(None, None, name),
    "model.lora.target_modules": layers,
    "model.quantization": lambda bits: {0: DEFAULT, 1: "nf4", 4: "nf4", 8: "int8"}.get(
        int(bits), Without(f"{bits} bits; 4 and 8 are supported")
    ),
    "optim.name": lambda name: "adamw" if "adamw" in str(name) else choice(name),
    "ppo.entropy_coef": lambda coef: coef or 0.0,
    "ppo.micro_batch_tokens": rows_per_pass,
    "prompts.dataset": one_dataset,
    "reward": reward_models,
    "rollout.top_k": lambda k: k if k > 0 else None,
    "rollout.top_p": lambda p: p if p < 1 else None,
    "run.save_every": lambda steps: every("steps", steps),
    "run.shard": lambda kind: "full" if kind else DEFAULT,
    "run.trackers": trackers,
    **dict.fromkeys(["advantage.estimator", "kl.estimator", "optim.schedule", "ppo.loss", "ppo.reduction"], choice),
    **dict.fromkeys(("prompts.overlong", "rollout.engine"), choice),
}
"""By key here, the function of a value of any project's, where ours is another."""
