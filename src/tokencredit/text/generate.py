"""`tokencredit generate`: text from a trained policy, or from the model it started as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tokencredit.errors import ConfigError
from tokencredit.runs.console import visible
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import load_prompts
from tokencredit.text.engines.sampling import sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.loading import end_ids, load_language_model, room_for_prompts


def generate(
    run: Path,
    config: PPOConfig,
    *,
    prompt: str | None,
    chat: bool,
    samples: int,
    base: bool,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Print completions after their prompts, a line each, and return them.

    Args:
        run: the run's folder.
        config: its configuration.
        prompt: what to continue; None takes the run's own prompts in turn.
        chat: the prompt is a user's message, for the tokenizer's chat template to put into words.
        samples: how many.
        base: write from the model that the run started from.
        max_new_tokens: longest completion.
        temperature: divides the logits.
        seed: of the sampling.

    Raises:
        ConfigError: the run has no policy yet, or the prompt does not fit.
    """
    if not base and not (run / "policy").is_dir():
        raise ConfigError(f"{str(run)!r} has no policy: the run has not ended; --base writes from its starting model")
    lm, tokenizer = load_language_model(replace(config.model, name=config.model.name if base else str(run / "policy")))
    if prompt is None:
        asked, rows = config.prompts, None
    elif chat:
        asked = replace(config.prompts, column="prompt")
        rows = [{"prompt": [{"role": "user", "content": prompt}]}]
    else:
        asked, rows = PromptsConfig(text=prompt, add_bos=config.prompts.add_bos), None
    room = room_for_prompts(lm, max_new_tokens)
    prompts = load_prompts(asked, tokenizer, seed=config.seed, room=room, dataset=rows, dataset_name="--prompt").batch(
        0, samples
    )
    uniforms = torch.rand(samples, max_new_tokens, generator=torch.Generator().manual_seed(seed))
    model = ActorCritic(lm)
    settings = replace(config.rollout, max_new_tokens=max_new_tokens, temperature=temperature)
    rollout = sample(model, prompts.ids, prompts.mask, uniforms, settings, tokenizer, end_ids(lm, tokenizer))
    written = [text + completion for text, completion in zip(prompts.texts, rollout.texts(tokenizer), strict=True)]
    for text in written:
        print(visible(text))
    return written
