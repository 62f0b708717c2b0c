"""The model card of a trained policy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tokencredit.runs.summary import averaged
from tokencredit.runs.untrusted import visible
from tokencredit.settings.text import PPOConfig

AUDITED = {
    "correlation": "correlation of the shown advantages with the true ones",
    "trust": "true-credit score: share of their variance that is real",
    "explained_variance": "share of the true values' variance that the values explain",
}
"""Figures of an audit on the card, and their meanings."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Names of models that the hub accepts as `base_model`; it refuses a card with a path."""


def model_card(
    args: PPOConfig,
    terms: Sequence[str],
    summary: Mapping[str, Any],
    environment: str | None = None,
    *,
    handed: Sequence[str] = (),
    name: str = "MODEL",
    base: str = "",
    adapter: bool = False,
    evaluation: Mapping[str, float] = MappingProxyType({}),
    audit: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """The README of a model repository: what was trained, on which prompts or environment and reward, and the results.

    Args:
        args: the run's configuration; parts from Python are listed by their labels.
        terms: names of the reward terms.
        summary: of the run.
        environment: name of the environment of episodes of several turns.
        handed: what came from calls in Python: prompts, completions.
        name: the repository or folder to load the model from.
        base: the model that training started from; below an adapter, the model that it is loaded with.
        adapter: it is a PEFT adapter.
        evaluation: metrics of the last evaluation on held-out prompts.
        audit: metrics of an audit at the end.
    """
    tags = ["tokencredit", "ppo", "reinforcement-learning"]
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "tags": tags}
    header["pipeline_tag"] = "text-generation"
    base = base or args.model.name
    if HUB_ID.fullmatch(base) and not Path(base).exists():
        header["base_model"] = base
    python = {key: [part] if isinstance(part, str) else list(part) for key, part in args.python.items()}
    terms = python.pop("reward_funcs", terms)
    own = None if environment or "train_dataset" in python else str(args.prompts.texts())
    prompts = args.prompts.dataset or own
    source = f"- prompts: {code(prompts)}\n" if prompts and not handed else ""
    source += f"- {' and '.join(handed)} from calls in Python\n" if handed else ""
    if environment:
        source += f"- environment: {code(environment)}, at most {args.env.max_turns} turns\n"
    source += "".join(f"- {key} from Python: {', '.join(map(code, parts))}\n" for key, parts in python.items())
    needs = "  # needs peft, and the base model" if adapter else ""
    kind, rollout = "episodes" if environment else "completions", args.rollout
    adapted = "" if args.kl.target is None else f" at first, adapted to {args.kl.target:g} nats per sequence"
    filters = {name: getattr(rollout, name) for name in rollout.filters()}
    drawn = ", ".join([f"temperature {rollout.temperature:g}", *(f"{name} {x:g}" for name, x in filters.items())])
    sampling = "" if "completions" in handed else f"- sampling: {drawn}, up to {rollout.max_new_tokens} tokens\n"
    options = {"temperature": float(rollout.temperature), "top_k": 0} | filters
    version = str((summary.get("environment") or {}).get("versions", {}).get("tokencredit", ""))
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n"
        f"# {code(args.model.name)}, trained with PPO\n\n"
        f"Trained by Tokencredit for {summary['iterations']} iterations"
        f"{'' if handed else f' of {rollout.batch_size} {kind}'}.\n\n"
        f"{source}"
        f"- reward: {', '.join(map(code, terms)) or 'scores from calls in Python'}\n"
        f"- KL coefficient: {args.kl.coef:g}{adapted}, kl.place {args.kl.place}\n"
        f"{sampling}"
        f"- ended by: {summary['stopped_by']}\n\n"
        "```python\nfrom transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model={visible(name)!r}){needs}\n'
        f'print(generate("Your prompt", max_new_tokens={rollout.max_new_tokens}, do_sample=True, '
        f'{", ".join(f"{name}={x}" for name, x in options.items())})[0]["generated_text"])\n```\n\n'
        f"{results(args, summary, evaluation, audit)}\n"
        "## Cite\n\n" + "\n".join(bibtex(version)) + "\n"
    )


def results(
    args: PPOConfig, summary: Mapping[str, Any], evaluation: Mapping[str, float], audit: Mapping[str, float]
) -> str:
    """A table of a run's figures, with intervals where they are known, and their meanings."""
    figures = {name: value for name, value in summary.items() if isinstance(value, float)}
    since = summary.get("since", 0)
    meanings = {
        "reward_first": f"mean reward {'after what is scored changed' if since else 'of the starting model'}",
        "reward_last": f"that at the end ({averaged(summary['iterations'], since)})",
        "kl_last": "divergence from the starting model over the same iterations, in nats per completion",
        "attainable_last": "estimated share of what the reward allows at this KL price",
    }
    prompts = args.eval.samples
    size = prompts * args.eval.best_of
    held_out = args.held_out_prompts() is not None or "eval_dataset" in args.python
    count = f"{size} {'episodes' if args.several_turns() else 'completions'}{' of held-out prompts' * held_out}"
    greedy = args.eval.temperature == 0
    if args.eval.temperature is not None:
        count += ", most likely tokens" if greedy else f", temperature {args.eval.temperature:g}"
    if args.eval.max_new_tokens is not None:
        count += f", up to {args.eval.max_new_tokens} tokens"
    rows = [(name, f"{value:.4g}", meanings.get(name, "")) for name, value in figures.items()]
    for name, measured in evaluation.items():
        deviation = evaluation.get(name.replace("eval/reward/", "eval/reward_std/")) if "/reward/" in name else None
        # Completions of one prompt count as one, since they share its difficulty; of most likely tokens they are equal.
        error = None if deviation is None or prompts < 2 or greedy else f"{deviation / math.sqrt(prompts - 1):.2g}"
        rows.append((name, f"{measured:.4g}{f' ± {error} (standard error)' if error else ''}", count))
    for name, meaning in AUDITED.items():
        value, low, high = (audit.get(f"audit/{name}{end}") for end in ("", "_low", "_high"))
        bounds = [f"{name} {x:.2f}" for name, x in (("from", low), ("to", high)) if x is not None]
        interval = f" ({' '.join(bounds)})" if bounds else ""
        if value is not None:
            rows.append((f"audit/{name}", f"{value:.3g}{interval}", f"{meaning}; intervals of 95 %"))
    return "| result | | |\n|---|---|---|\n" + "".join(f"| {a} | {b} | {c} |\n" for a, b, c in rows)


def bibtex(version: str) -> list[str]:
    """The software's entry."""
    return [
        "```bibtex",
        "@software{tokencredit,",
        "  author  = {{The Tokencredit authors}},",
        "  title   = {Tokencredit: {PPO} for language models with the credit of every token in view},",
        f"  version = {{{version}}},",
        "  license = {Apache-2.0},",
        "}",
        "```",
    ]


def code(text: str) -> str:
    """Untrusted text as inline Markdown code: no link, no image, no HTML."""
    text = visible(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
