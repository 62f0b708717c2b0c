"""Runs whose engine, filters or samples are wrong on purpose, and healthy ones, and what the diagnosis names.

`make doctor` prints a table. Twenty small runs have one of three faults: an engine in bfloat16 beside training in
float32, filters that cut off a part of the policy, samples of too many updates ago. Twenty others round, filter and
sample ahead as well, within bounds or with a correction. Exits with 1 if a fault is not named, or a healthy run is
accused.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.runs.diagnosis.evidence import Evidence
from tokencredit.runs.diagnosis.policy_checks import engine_distance
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.callbacks import Callback
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.local.local_engine import LocalEngine
from tokencredit.text.models.run_models import load_start
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.scoring_passes import evaluate_rollout

BUILTIN = (0, 0)
"""The built-in model, among sizes of random ones."""


class HalfEngine(LocalEngine):
    """A local engine that samples in bfloat16, beside training in float32."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample in bfloat16, and score in float32."""
        rollout = self.half().generate(prompts, settings, uniforms, per_prompt, started)
        if rollout.behavior_logprobs is None:
            rollout = replace(rollout, behavior_logprobs=rollout.logprobs)
        with torch.no_grad():
            return evaluate_rollout(self.policy, rollout, settings.temperature, None)

    def half(self) -> LocalEngine:
        """The engine that samples."""
        return LocalEngine(self.policy, self.tokenizer, self.end_ids, replace(self.precision, dtype="bfloat16"))


class HalfWeights(HalfEngine):
    """A local engine whose weights are rounded to bfloat16."""

    def half(self) -> LocalEngine:
        """The engine that samples."""
        rounded = deepcopy(self.policy)
        for parameter in rounded.lm.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return LocalEngine(rounded, self.tokenizer, self.end_ids, self.precision)


class Patient(Callback):
    """Begins an update only when all batches ahead are sampled, so that ages do not depend on timing."""

    def before_update(self, trainer: Any) -> None:
        """Wait for the batches ahead."""
        for _, sampled in getattr(trainer.source, "batches", ()):
            sampled.result()


@dataclass(frozen=True)
class Case:
    """A run, and the fault in it."""

    settings: dict[str, Any]
    fault: str | None = None
    """The check that names it; None for a healthy run."""
    size: tuple[int, int] = BUILTIN
    """Layers and width of a random model."""
    engine: type[LocalEngine] | None = None
    """Engine to put in the place of the run's."""
    iterations: int = 5


def ahead(age: int, **settings: Any) -> dict[str, Any]:
    """Settings of a run that samples `age` batches ahead."""
    sampling = {"rollout.engine": "continuous", "rollout.max_age": age, "kl.coef": 0.0}
    return sampling | {key.replace("__", "."): value for key, value in settings.items()}


HALF, CUT, OLD = "engine_mismatch", "truncated_support", "stale_samples"
CASES = [
    Case({}, HALF, engine=HalfEngine),
    Case({"rollout.per_prompt": 4}, HALF, engine=HalfEngine),
    Case({"rollout.temperature": 0.7}, HALF, engine=HalfWeights),
    Case({"rollout.max_new_tokens": 24}, HALF, engine=HalfWeights),
    Case({}, HALF, (2, 64), HalfEngine),
    Case({}, HALF, (4, 128), HalfWeights),
    Case({}, HALF, (8, 128), HalfEngine),
    Case({"rollout.top_p": 0.9}, CUT),
    Case({"rollout.top_p": 0.7}, CUT),
    Case({"rollout.top_k": 5}, CUT),
    Case({"rollout.top_k": 20, "rollout.temperature": 1.3}, CUT),
    Case({"rollout.min_p": 0.1}, CUT),
    Case({"rollout.min_p": 0.2}, CUT, (4, 128)),
    Case({"rollout.top_p": 0.8, "rollout.top_k": 20, "rollout.temperature": 0.7}, CUT),
    Case(ahead(4, optim__lr=1e-3), OLD, iterations=10),
    Case(ahead(8, optim__lr=1e-3), OLD, iterations=14),
    Case(ahead(4, optim__lr=3e-3), OLD, iterations=10),
    Case(ahead(6, optim__lr=1e-3, ppo__epochs=8), OLD, iterations=12),
    Case(ahead(4, optim__lr=3e-3), OLD, (2, 64), iterations=10),
    Case(ahead(6, optim__lr=2e-3, off_policy__proximal="interpolated"), OLD, iterations=12),
    Case({"model.dtype": "bfloat16"}),
    Case({"model.dtype": "bfloat16", "rollout.temperature": 0.7}),
    Case({"model.dtype": "bfloat16"}, size=(4, 128)),
    Case({"model.dtype": "bfloat16"}, size=(8, 128)),
    Case({"rollout.engine": "continuous"}),
    Case({"rollout.engine": "continuous", "rollout.per_prompt": 4}),
    Case({"rollout.engine": "continuous"}, size=(4, 128)),
    Case({"rollout.engine": "continuous", "model.dtype": "bfloat16"}, size=(2, 64)),
    Case({"rollout.top_p": 0.995}),
    Case({"rollout.top_k": 1000}),
    Case({"rollout.min_p": 0.0005}),
    Case({"rollout.top_p": 0.99, "rollout.temperature": 0.7}),
    Case({"rollout.top_p": 0.8, "off_policy.correct": "clip"}),
    Case({"rollout.top_k": 5, "off_policy.correct": "mask"}),
    Case({"rollout.min_p": 0.2, "off_policy.proximal": "behavior"}),
    Case({"rollout.top_p": 0.7, "off_policy.correct": "clip", "off_policy.level": "geometric"}, size=(4, 128)),
    Case(ahead(1), iterations=8),
    Case(ahead(2), iterations=8),
    Case(ahead(4), iterations=10),
    Case(ahead(4, off_policy__proximal="interpolated", off_policy__correct="clip"), iterations=10),
]


def random_model(layers: int, width: int, vocabulary: int) -> LlamaForCausalLM:
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def metrics_of(case: Case, seed: int, folder: Path) -> tuple[Sequence[Any], dict[str, Any]]:
    """Metrics and configuration of the run of a case."""
    small = {
        "seed": seed,
        "model.dtype": "float32",
        "rollout.batch_size": 32,
        "rollout.max_new_tokens": 12,
        "optim.warmup": 0,
        "run.dir": str(folder),
        "run.iterations": case.iterations,
        **{"run.trackers": [], "run.show_every": 0, "run.save_every": 0},
    }
    args = PPOConfig.from_dict(small | case.settings)
    model, tokenizer = None, None
    if case.size != BUILTIN:
        _, tokenizer = load_start(ModelConfig())
        model = random_model(*case.size, len(tokenizer))
    with redirect_stdout(StringIO()):
        trainer = PPOTrainer(model=model, processing_class=tokenizer, args=args, callbacks=[Patient()])
        if case.engine is not None:
            engine = trainer.pipeline.engine
            assert isinstance(engine, LocalEngine)
            trainer.pipeline.engine = case.engine(**vars(engine))
        trainer.train()
    run = read_run(folder)
    return run.metrics, run.config


def main(cases: Sequence[Case] = CASES) -> int:
    """Print a line for each run; returns the exit code."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            rows, config = metrics_of(case, number + 1, Path(folder) / str(number))
            named = {finding.name for finding in diagnose(rows, config)} & {HALF, CUT, OLD}
            good = named == (set() if case.fault is None else {case.fault})
            wrong += not good
            now = Evidence(rows, config, ended=True)
            figures = {"distance": engine_distance(now)} | {x: now.last(x) for x in ("behavior_ratio", "age_mean")}
            numbers = "  ".join(f"{name} {x:8.2g}" for name, x in figures.items())
            engine = "" if case.engine is None else case.engine.__name__
            settings = " ".join(f"{key}={value}" for key, value in case.settings.items())
            layers, width = case.size
            model = "builtin" if case.size == BUILTIN else f"{layers}×{width}"
            verdict = (", ".join(sorted(named)) or "nothing") + ("" if good else "  WRONG")
            print(
                f"{case.fault or 'healthy':17} {model:7} {numbers}  named: {verdict}  {engine} {settings}", flush=True
            )
    print(f"{wrong} of {len(cases)} runs judged wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
