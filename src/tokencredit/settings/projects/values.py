"""Values here of other projects' values: functions that several tables share."""

from __future__ import annotations

import math
from typing import Any

from tokencredit.settings.projects.translation import DEFAULT, Without

TRACKERS = ("tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab")
SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
QUANTIZED = {4: "nf4", 8: "int8"}


def first(*values: Any) -> Any:
    """The first value that is set."""
    return next((value for value in values if value not in (None, "")), DEFAULT)


def product(*values: Any) -> int:
    """The product of the numbers that are set."""
    return math.prod(int(value) for value in values if value is not None)


def number(value: Any) -> Any:
    """The number of minibatches, updates or tokens that a quotient gives, at least 1."""
    return max(1, math.ceil(value))


def optimizer_steps(parts: Any, size: Any, accumulated: Any) -> int:
    """Optimizer steps per epoch of TRL's PPO: one per `accumulated` micro-batches, which are rows of one part."""
    each = int(size * accumulated // parts)
    return max(1, int(parts * math.ceil(each / size) // accumulated))


def iterations(total: Any, epochs: Any, rows: Any, batch: Any, per_prompt: Any = 1) -> Any:
    """Iterations of a total of completions, or of epochs over prompts."""
    if total:
        return number(total / batch)
    if rows:
        return number(epochs * rows * (per_prompt or 1) / batch)
    times = f" × {per_prompt}" if (per_prompt or 1) != 1 else ""
    return Without(f"{epochs:g} × the number of prompts{times} / {batch}; give --rows for it")


def share(ratio: Any, total: Any, what: str = "a share of run.iterations") -> Any:
    """A share of the iterations."""
    if not ratio:
        return 0
    return Without(f"{ratio} is {what}, which is open") if total is None else math.ceil(ratio * total)


def warmup(steps: Any, ratio: Any, total: Any) -> Any:
    """Warm-up in iterations, of steps or of a share of them."""
    steps = max(steps or 0, 0)
    return int(steps) if steps >= 1 else share(steps or ratio, total)


def schedule(name: Any) -> Any:
    """The schedule of the learning rate."""
    name = str(getattr(name, "value", name)).lower()
    name = SCHEDULES.get(name, name)
    known = ("constant", "linear", "cosine")
    return name if name in known else Without(f"{name} is not among {', '.join(known)}")


def final_scale(name: Any, _: Any = None) -> Any:
    """Down to 0, as Transformers' schedules go."""
    return DEFAULT if name in (None, "constant") else 0.0


def dtype(bf16: Any, fp16: Any, name: Any = None) -> Any:
    """The dtype of the passes."""
    name = {None: None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
        name, str(name).rpartition(".")[2]
    )
    if fp16 or name == "float16":
        return Without("float16 is not supported; bfloat16 or float32")
    return "bfloat16" if bf16 else name if name in ("bfloat16", "float32") else "float32" if bf16 is False else "auto"


def trackers(names: Any) -> Any:
    """The experiment trackers; `console` is always there."""
    names = [names] if isinstance(names, str) else list(names)
    wanted = [name for name in names if name not in ("none", "console", "all")]
    if "all" in names:
        return DEFAULT
    unknown = [name for name in wanted if name not in TRACKERS]
    return Without(f"{unknown[0]} is none of {', '.join(TRACKERS)}") if unknown else wanted


def every(strategy: Any, steps: Any) -> Any:
    """Iterations between saves or evaluations."""
    strategy = str(getattr(strategy, "value", strategy))
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return Without("an epoch is not a unit here; give iterations")
    return (
        int(steps)
        if steps and steps >= 1
        else DEFAULT
        if steps is None
        else Without(f"{steps} is a share; give iterations")
    )


def repository(push: Any, name: Any) -> Any:
    """The repository to which the policy is pushed."""
    return Without("the name of the repository is not given") if push and not name else name if push else DEFAULT


def quantization(four: Any, eight: Any, bits: Any = None) -> Any:
    """The quantization of the base model."""
    bits = 4 if four else 8 if eight else bits
    return DEFAULT if not bits else QUANTIZED.get(int(bits)) or Without(f"{bits} bits are not among 4 and 8")


def rank(use: Any, number: Any) -> Any:
    """The rank of the adapter, 0 for none."""
    return int(number) if use else DEFAULT


def layers(use: Any, names: Any) -> Any:
    """Layers with an adapter."""
    if not (use and names):
        return DEFAULT
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    return DEFAULT if names in (["all"], ["all-linear"], []) else names


def reward_models(names: Any) -> Any:
    """Reward terms of reward models."""
    names = names.split(",") if isinstance(names, str) else names
    return [{"reward_model": name.strip()} for name in names]


def whitened(on: Any) -> Any:
    """`score.normalize` for rewards that are divided by their deviation."""
    return "batch" if on else DEFAULT
