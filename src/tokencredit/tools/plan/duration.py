"""Seconds of a run's stages, from the timings of its passes."""

from __future__ import annotations

from tokencredit.distributed.processes import Processes, return_freed_memory
from tokencredit.tools.plan.calibration import Timings, calibrate
from tokencredit.tools.plan.communication import exchange_of, exchange_rates
from tokencredit.tools.plan.work import Work


def stage_seconds(work: Work, timings: Timings) -> dict[str, float]:
    """Seconds of each stage of an iteration; those that the work does not have are left out.

    With R rows per process, r rows per timed pass, and passes of similar speed per row: a pass over all rows takes
    R / r times as long as the timed one. The rollout is the prompts' pass and a decoding step per further token, whose
    time grows evenly with the cache; in bfloat16 a full pass follows.
    """
    batch, setup, config = work.mean, work.setup, work.config
    passes = batch.rows / timings.rows
    rollout = timings.prefill + (batch.new - 1) * sum(timings.steps) / 2
    rollout += passes * (timings.scoring if setup.half else 0.0) + passes * timings.critic
    updates = config.ppo.epochs * (passes * timings.training + batch.minibatches * timings.optimizer)
    alone = config.critic.epochs * (1 + config.critic.buffer)
    updates += alone * (passes * timings.critic_training + batch.minibatches * timings.optimizer)
    shown = min(config.run.samples, batch.rows) / timings.rows
    stages = {
        "rollout": rollout,
        "reference": passes * timings.reference,
        "update": updates,
        "samples": shown * timings.scoring,
    }
    return {stage: seconds for stage, seconds in stages.items() if seconds > 0}


def estimate(work: Work, memory: float | None) -> dict[str, float] | None:
    """Seconds of each stage of an iteration, by a calibration on this machine; None if it has too little memory.

    Communication is timed between processes on a CPU; that between GPUs is left out.
    """
    if work.setup.shard == "full":
        return_freed_memory()  # as in such a run, whose passes then take longer
    timings = calibrate(work, Processes(), memory)
    if timings is None:
        return None
    stages = stage_seconds(work, timings)
    if work.setup.processes > 1 and work.setup.device == "cpu":
        config = work.config
        alone = config.critic.epochs * (1 + config.critic.buffer)
        exchange = exchange_of(work.model.shape, work.mean, work.setup, config.ppo.epochs, alone)
        stages["communication"] = exchange.seconds(exchange_rates(work.setup))
    return stages
