"""Seconds of a run's stages on this machine, by passes timed on a model of the same shape with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.utils.benchmark import Timer

from tokencredit.distributed.processes import Processes, return_freed_memory, threads
from tokencredit.learn.optim import clip_gradients
from tokencredit.learn.state import trainable
from tokencredit.tools.plan.memory import Sizes
from tokencredit.tools.plan.passes import SkeletonPasses
from tokencredit.tools.plan.work import Work

SECONDS = 2.0
"""Each pass is repeated until this time is spent."""
TOKENS = 2048
"""Tokens of a timed pass on a CPU, at most; more rows take proportionally longer."""
STEPS = 8
"""Decoding steps of a timed rollout."""
ALL_REDUCE = 2e8
"""Bytes per second of an all-reduce by gloo between processes of one machine: 1.7e8 to 2.6e8 were measured."""


def estimate(work: Work, sizes: Sizes) -> dict[str, float]:
    """Seconds of each stage of an iteration; communication between GPUs is left out."""
    if work.sharded:
        return_freed_memory()  # as in such a run, whose passes then take longer
    rows, on_cpu = work.micro_rows(-(-work.mean.rows // work.config.ppo.minibatches), work.mean), work.device == "cpu"
    if on_cpu:
        rows = max(1, min(rows, TOKENS // work.mean.length))
    with threads(max(1, torch.get_num_threads() // work.processes) if on_cpu else None):
        stages = stage_seconds(work, timed(work, Processes().device, rows), rows, sizes.prefixes)
    if work.processes > 1 and on_cpu:
        stages["communication"] = exchanged_bytes(work, sizes) / ALL_REDUCE
    return stages


def stage_seconds(
    work: Work, timings: Mapping[str, float], rows: int, prefixes: float | None = None
) -> dict[str, float]:
    """Seconds of each stage of an iteration.

    With R rows per process, r rows per timed pass, and passes of similar speed per row: a pass over all rows takes
    R / r times as long as the timed one. The rollout is a pass over the prompts and a decoding step per further token,
    as long as with half of the completion in the cache; a full pass follows in bfloat16, and one for the entropies that
    a part of the user reads. A backward pass takes twice as long as a forward pass, which counts for the training of a
    separate critic alone. Reward models that score prefixes are as fast as the policy, per weight that a token meets.
    """
    batch, config, minibatches = work.mean, work.config, work.config.ppo.minibatches
    passes = {name: batch.rows / rows * seconds for name, seconds in timings.items()}
    prompts = batch.prompt / batch.length / config.rollout.per_prompt * passes["scoring"]
    critic, steps = passes.get("critic", 0.0), minibatches * timings["optimizer"]
    own = config.critic.kind == "separate"
    alone = config.critic.epochs * ((3 if own else 1) * critic + steps)
    return {
        "rollout": prompts + (batch.new - 1) * timings["step"] + passes["scoring"] * work.full_passes + critic * own,
        "reference": passes.get("reference", 0.0),
        **({} if prefixes is None else {"prefixes": prefixes * passes["scoring"]}),
        "update": config.ppo.epochs * (passes["training"] + steps) + alone,
    }


def timed(work: Work, device: torch.device, rows: int) -> dict[str, float]:
    """Seconds of passes over `rows` rows, a decoding step of the whole rollout in its middle, and an optimizer step."""
    config, batch = work.config, work.mean
    with torch.random.fork_rng():
        torch.manual_seed(0)
        passes = SkeletonPasses(work, device)
        inputs = passes.inputs(rows, batch)

    def optimize() -> None:
        clip_gradients(trainable(passes.policy), config.optim.max_grad_norm)
        passes.optimizer.step()

    calls: dict[str, Callable[[], None]] = {
        "scoring": partial(passes.score, inputs),
        "training": partial(passes.train, inputs),
        "optimizer": optimize,
    }
    if config.kl.coef > 0:
        calls["reference"] = partial(passes.refer, inputs)
    if config.critic.kind == "separate" or config.critic.epochs:
        calls["critic"] = partial(passes.value, inputs)
    seconds = {name: timer(call).blocked_autorange(min_run_time=SECONDS).median for name, call in calls.items()}
    # A short completion is timed earlier, so that the steps stay within the model's context.
    prompt = max(1, batch.prompt + min(batch.new // 2, batch.new - 2 * STEPS))
    with passes.sampling(replace(batch, prompt=prompt, new=2 * STEPS)) as sampling:
        sampling.prefill()
        return seconds | {"step": timer(sampling.step).timeit(STEPS).median}


def timer(call: Callable[[], None]) -> Timer:
    """PyTorch's timer of a call, which warms up, and waits for a GPU."""
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def exchanged_bytes(work: Work, sizes: Sizes) -> float:
    """Bytes of all-reduces that take as long as an iteration's communication.

    Gradients of whole models are all-reduced once per minibatch. Sharded models are gathered for each pass, which is
    half an all-reduce; a pass that trains gathers them twice and scatters gradients, three halves.
    """
    config, batch = work.config, work.batch
    minibatches = config.ppo.minibatches * (config.ppo.epochs + config.critic.epochs)
    if not work.sharded:
        return 4.0 * sizes.trained * minibatches
    updates = minibatches * -(-work.minibatch_rows // work.micro_rows(work.minibatch_rows, batch))
    read = (1 if config.sharding.sampling == "gathered" else batch.new) + work.full_passes + config.kl.passes
    kept = sizes.parts["kept"]
    models = work.processes * (kept["weights"] + kept["critic"])
    return models * (1.5 * updates + 0.5 * read)
