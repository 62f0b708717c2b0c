"""The model card of a trained policy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tokencredit.runs.summary import averaged
from tokencredit.runs.untrusted import visible
from tokencredit.settings.text import PPOConfig


def model_card(
    args: PPOConfig,
    terms: Sequence[str],
    summary: Mapping[str, Any],
    environment: str | None = None,
) -> str:
    """The README of a model repository: what was trained, on which prompts or environment and reward, and the results.

    Args:
        args: the run's configuration; parts from Python are listed by their labels.
        terms: names of the reward terms.
        summary: of the run.
        environment: name of the environment of episodes of several turns.
    """
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["tokencredit", "ppo", "reinforcement-learning"]}
    if not args.model.name.startswith("builtin:"):
        header["base_model"] = args.model.name
    python = {key: [part] if isinstance(part, str) else list(part) for key, part in args.python.items()}
    terms = python.pop("reward_funcs", terms)
    own = None if environment or "train_dataset" in python else str(args.prompts.texts())
    prompts = args.prompts.dataset or own
    source = f"- prompts: {code(prompts)}\n" if prompts else ""
    if environment:
        source += f"- environment: {code(environment)}, at most {args.env.max_turns} turns\n"
    source += "".join(f"- {key} from Python: {', '.join(map(code, parts))}\n" for key, parts in python.items())
    figures = {name: value for name, value in summary.items() if isinstance(value, float)}
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in figures.items())
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n"
        f"# {code(args.model.name)}, trained with PPO\n\n"
        f"Trained by Tokencredit for {summary['iterations']} iterations of {args.rollout.batch_size} "
        f"{'episodes' if environment else 'completions'}.\n\n"
        f"{source}"
        f"- reward: {', '.join(map(code, terms))}\n"
        f"- KL coefficient: {args.kl.coef:g}, kl.place {args.kl.place}\n"
        f"- ended by: {summary['stopped_by']}\n\n"
        f"| result | |\n|---|---|\n{rows}\n\n"
        "`reward_first` is the mean reward of the starting model, `reward_last` that at the end "
        f"({averaged(summary['iterations'])})"
        + (
            "; `kl_last` is the divergence from the starting model over the same iterations, in nats per completion"
            if "kl_last" in figures
            else ""
        )
        + (
            "; `attainable_last` is the estimated share of what the reward allows at this KL price"
            if "attainable_last" in figures
            else ""
        )
        + ".\n"
    )


def code(text: str) -> str:
    """Untrusted text as inline Markdown code: no link, no image, no HTML."""
    text = visible(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
