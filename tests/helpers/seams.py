"""A program for two processes: where a run's parts meet. Arguments: a model's folder, and a folder for results."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from safetensors import SafetensorError

from helpers.sharded_cases import SMALL
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.runs.recorder import RunRecord
from tokencredit.settings.run_kind import TEXT
from tokencredit.settings.training import AuditConfig
from tokencredit.text.audit.continuations import run_in_all
from tokencredit.text.engines.requests import EngineFailure
from tokencredit.text.rewards.calls import RewardError
from tokencredit.tools.audit_run import audit_completions


def run_settings(model, folder):
    """Settings of a run that the command can audit, with more samples than one process has rows."""
    own = {"model.name": str(model), "run.dir": str(folder), "run.save_every": 1, "run.samples": 7, "optim.eps": 1e-4}
    return SMALL | own | {"run.iterations": 2, "run.trackers": [], "run.show_every": 0, "ppo.micro_batch_tokens": None}


def audited(model, folder):
    """Trains with sharded models; returns the rewards that an audit of the run finds."""
    config = PPOConfig.from_dict(run_settings(model, folder) | {"run.shard": "full"})
    PPOTrainer(args=config).train()
    audit = audit_completions(folder, config, AuditConfig(every=1, completions=2, continuations=2, states=1))
    return [sample["reward"] for sample in audit["samples"]]


def failed(processes):
    """The error in each process if a reward of a continuation fails in the second one."""

    def work():
        if not processes.main:
            raise RewardError("the service is down")

    try:
        run_in_all(processes, SimpleNamespace(), work)
    except RewardError as error:
        return str(error)


def unscored(processes, model, folder):
    """The scores of each process if only the first one's completions have any, and the error if none has."""
    applies = [processes.main]

    def some(completions, **columns):
        return [1.0 if all(applies) else None for _ in completions]

    trainer = PPOTrainer(reward_funcs=some, args=PPOConfig.from_dict(run_settings(model, folder)))
    scores = trainer.collect().scores.tolist()
    applies.append(False)
    try:
        trainer.collect()
    except RewardError as error:
        return scores, str(error)


def sampling_failed(processes, model, folder):
    """The error in each process if the second one's engine fails at its second call; the run then goes on."""
    settings = run_settings(model, folder) | {"run.save_every": 100, "run.shard": "full"}
    trainer = PPOTrainer(args=PPOConfig.from_dict(settings))
    engine, calls = trainer.pipeline.engine, []
    generate = engine.generate

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2 and not processes.main:
            raise EngineLost("the engine is gone")
        return generate(*args, **kwargs)

    engine.generate = failing
    try:
        trainer.train()
    except EngineLost as error:
        PPOTrainer(args=PPOConfig.from_dict(settings)).train(resume_from_checkpoint=True)
        return str(error)


def evaluated_without(processes, model, folder):
    """Trains with an engine that the second process loses in the first evaluation, and whose next sync fails too."""
    settings = run_settings(model, folder) | {"rollout.engine": "continuous", "eval.every": 1, "eval.samples": 2}
    trainer = PPOTrainer(args=PPOConfig.from_dict(settings | {"eval.max_new_tokens": 6, "run.iterations": 3}))
    sampler, failures = trainer.pipeline.engine.sampler, []
    complete, evaluate = sampler.complete, trainer.evaluate

    def failing(*args, **kwargs):
        if failures:
            raise EngineFailure(failures.pop())
        complete(*args, **kwargs)

    def lost():
        if not processes.main and not len(trainer.record.history):
            failures.extend(["no answer", "no answer"])
        return evaluate()

    sampler.complete, trainer.evaluate = failing, lost
    return trainer.train()["iterations"]


def skipped(processes, model, folder):
    """Reward of a batch of which the second process scores nothing; tokens of one that is skipped for its NaN."""
    settings, other = run_settings(model, folder) | {"rollout.stop_at_eos": False}, [None, math.nan]

    def score(completions):
        return [1.0 if processes.main else other[0]] * len(completions)

    trainer = PPOTrainer(args=PPOConfig.from_dict(settings), reward_funcs=score)
    trainer.record.begin(trainer.args, 0, 0)
    reward = trainer.iteration(1)[0]["reward"]
    other.pop(0)
    return reward, trainer.iteration(2)[0]["tokens"]


def disk_full(processes, model, folder):
    """The error in each process if the first one cannot write the policy at the end."""
    settings = run_settings(model, folder) | {"run.shard": "full", "run.iterations": 1, "critic.kind": "separate"}
    trainer = PPOTrainer(args=PPOConfig.from_dict(settings))

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device")

    trainer.policy.lm.save_pretrained = full
    try:
        trainer.train()
    except OSError as error:
        return str(error)


def graver(processes):
    """The error in each process if the first one loses its engine, and the second one has to stop."""
    try:
        with processes.agreed(EngineLost, RunStopped):
            raise EngineLost("no answer") if processes.main else RunStopped("another run")
    except RunStopped as error:
        return type(error).__name__, str(error)


def no_memory(processes):
    """The error in each process if the second one has no memory."""
    try:
        with processes.agreed(RunStopped, MemoryError):
            if not processes.main:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    except MemoryError as error:
        return str(error)


def folders(processes, folder):
    """The folder that each process chooses if none is given, and the error of one that it does not see."""
    os.chdir(folder)
    chosen = RunRecord(PPOConfig().run, processes, TEXT).folder.path
    here = folder / f"machine {processes.rank}"
    here.mkdir()
    os.chdir(here)  # as on two machines, with a folder of the same name
    config = PPOConfig.from_dict({"run.dir": "run", "run.trackers": []})
    try:
        RunRecord(config.run, processes, TEXT).begin(config, reserve=0, weights=0)
    except ConfigError as error:
        return str(chosen), str(error)


def main(model, folder):
    processes = Processes(timeout=300)
    results = {"audit": audited(model, folder / "run"), "failed": failed(processes)}
    results["unscored"] = unscored(processes, model, folder / "unscored")
    results["rollout"] = sampling_failed(processes, model, folder / "rollout")
    results["evaluated"] = evaluated_without(processes, model, folder / "evaluated")
    results["skipped"] = skipped(processes, model, folder / "skipped")
    results["disk"] = disk_full(processes, model, folder / "disk")
    results |= {"graver": graver(processes), "memory": no_memory(processes)}
    results["chosen"], results["unseen"] = folders(processes, folder)
    (folder / f"{processes.rank}.json").write_text(json.dumps(results))
    processes.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
