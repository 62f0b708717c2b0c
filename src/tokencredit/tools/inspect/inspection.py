"""`tokencredit inspect`: load a run's policy and the model it is compared with, and read both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.report.templating import rounded
from tokencredit.settings.run_kind import ModelSource, read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import Batch
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.critic import FITTED
from tokencredit.text.models.peft_models import attached, merge
from tokencredit.text.models.run_models import load_source
from tokencredit.text.rewards.terms import build_terms
from tokencredit.tools.inspect.parts import read_parts
from tokencredit.tools.inspect.question import Text, refuse_overlap, token_ids
from tokencredit.tools.inspect.readings import ModelPair, compare
from tokencredit.tools.scoring_options import SamplingOptions
from tokencredit.tools.trained_policy import Policy

SAMPLES = 8
"""Completions sampled: the first is inspected; all give the means of ablation, and the answer's share elsewhere."""
LONGEST = 64
"""Longest completion in tokens, which bounds the cost of patching."""


def inspect_run(
    source: ModelSource,
    prompt: str | None = None,
    against: str = "base",
    up: Sequence[str] = (),
    down: Sequence[str] = (),
    seed: int = 1,
    no_code: bool = False,
) -> dict[str, Any]:
    """The contents of inspect.json: a run's policy compared with the model it started from, or another.

    Both are read in float32 on the run's device; adapters are merged into the weights. Nothing is written.

    Args:
        source: the run.
        prompt: the prompt; None for the run's own.
        against: `base`, or the folder of another run or of a model.
        up: words whose log-odds are explained; empty to choose them.
        down: words against which.
        seed: seed of the completions.
        no_code: refuse user code that another run's configuration would execute.

    Raises:
        ConfigError: a model cannot be loaded or read, the two have other shapes, or a word is several tokens.
    """
    started = time.perf_counter()
    policy, config, name = Policy(source), source.config, source.name
    tokenizer = policy.tokenizer
    up_ids, down_ids = token_ids(tokenizer, "--up", up), token_ids(tokenizer, "--down", down)
    refuse_overlap(up_ids, down_ids, tokenizer)
    base, other = _other(source, against, no_code)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"{against!r} has another vocabulary than {name!r}; --against needs the same tokenizer")
    batch = _sample(policy, config, prompt, seed)
    texts = _texts(batch.rollout)
    score, reason = _score(policy, config, batch)
    tuned = _merged(policy.model.lm)
    torch.nn.Module.to(base, tuned.device)
    pair = ModelPair(name, read_parts(against, base), read_parts(name, tuned), tokenizer, texts[0])
    critic, shape = policy.model.critic, tuned.config.get_text_config()
    before = "before training" if against == "base" else f"in {against}"
    result = compare(pair, up_ids, down_ids, others=texts[1:], critic=critic, before=before)
    if critic is not None:
        fitted = FITTED in critic.about
        result["critic"]["score"] = None if fitted else score
        result["critic"]["note"] += "; they are what the fit to scores of prefixes leaves" if fitted else reason
    about = {
        "run": Path(name).resolve().name,
        "base": (config.model.name or "the model that the run started from") if against == "base" else against,
        "tuned": name,
        "prompt": batch.prompts.texts[0],
        "completion": batch.completions[0],
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "model": {
            "layers": len(pair.tuned.layers),
            "heads": pair.tuned.heads,
            "width": shape.hidden_size,
            "family": shape.model_type,
            "parameters": sum(p.numel() for p in tuned.parameters()),
        },
    }
    contents: dict[str, Any] = rounded(about | result, digits=6)
    return contents


def _sample(policy: Policy, config: PPOConfig, prompt: str | None, seed: int) -> Batch:
    """Prompts and their completions, sampled as in the run."""
    longest = min(config.rollout.max_new_tokens, LONGEST)
    sampling = SamplingOptions(max_new_tokens=longest).sampling(config.rollout)
    prompts = policy.prompts(prompt, SAMPLES, longest)
    uniforms = torch.rand(SAMPLES, longest, generator=torch.Generator().manual_seed(seed))
    return policy.pipeline.sample(prompts, sampling, uniforms)


def _texts(rollout: Rollout) -> list[Text]:
    """The rows of a rollout without padding."""
    texts = []
    for prompt, mask, response, sampled in zip(
        rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.mask, strict=True
    ):
        before = prompt[mask]
        texts.append(Text(torch.cat([before, response[sampled]]), len(before)))
    return texts


def _score(policy: Policy, config: PPOConfig, batch: Batch) -> tuple[float | None, str]:
    """The first completion's reward and nothing, or None and the reason, as a part of a note."""
    if policy.model.critic is None:
        return None, ""
    if "reward_funcs" in policy.given:
        return None, "; no score: the reward came from Python (reward_funcs), and the run's folder does not hold it"
    try:
        terms = build_terms(config.reward, policy.pipeline.precision.device)
        scored = replace(policy.pipeline, terms=terms).scored(batch, config.rollout)
        return float(scored.total_scores()[0]), ""
    except (ConfigError, RunStopped) as error:
        return None, f"; no score: {error}"


def _other(source: ModelSource, against: str, no_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to compare with, and its tokenizer."""
    if against != "base":
        source = read_source(against, no_code)
    models = load_source(source, "base" if against == "base" else "policy", Processes())
    return _merged(models.policy.lm), models.tokenizer


def _merged(lm: PreTrainedModel) -> PreTrainedModel:
    """A model with its adapter merged into the weights, frozen and without dropout."""
    merged = lm if attached(lm) is None else merge(lm)
    merged.eval().requires_grad_(False)
    return merged
