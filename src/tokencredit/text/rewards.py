"""Rewards: a term takes prompts and completions, as texts, and gives one number a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tokencredit.runs.config import RewardTerm
from tokencredit.runs.errors import ConfigError
from tokencredit.text.models import resolve

RewardFunction = Callable[[Sequence[str], Sequence[str]], list[float]]


class NonFiniteReward(ArithmeticError):
    """A reward that is NaN or infinite."""


class Classifier:
    """What a sequence classifier says of one label, on prompt and completion together.

    It reads text, so its tokenizer and vocabulary need not be the policy's.
    """

    def __init__(self, name: str, label: str, output: str = "probability", device: torch.device | str = "cpu"):
        """Load a classifier.

        Args:
            name: hub id, folder, or `builtin:reviews`.
            label: the label that is rewarded.
            output: `probability`, `logit`, or `log_odds` (the logit of the probability).
            device: where it runs.

        Raises:
            ConfigError: no classifier has that name, or it has no such label.
        """
        folder = resolve(name, "sentiment")
        try:
            self.model = (
                AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device).eval()
            )
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"cannot load a classifier from {name!r}: {error}") from error
        labels = self.model.config.label2id
        if label not in labels:
            raise ConfigError(f"{name!r} has no label {label!r}; its labels are {', '.join(sorted(labels))}")
        self.label, self.output = labels[label], output

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Score each prompt with its completion."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        limit = self.model.config.max_position_embeddings
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=limit)
        logits = self.model(**inputs.to(self.model.device)).logits.float()
        if self.output == "logit":
            return logits[:, self.label].tolist()
        logprobs = logits.log_softmax(-1)
        if self.output == "probability":
            return logprobs[:, self.label].exp().tolist()
        others = logprobs.clone()
        others[:, self.label] = -torch.inf
        return (logprobs[:, self.label] - others.logsumexp(-1)).tolist()


@dataclass
class Term:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction


def build_terms(config: Sequence[RewardTerm], device: torch.device | str) -> list[Term]:
    """The reward's terms, loaded.

    Raises:
        ConfigError: a term that cannot be loaded, by its key, or two terms of one name.
    """
    terms: list[Term] = []
    for number, term in enumerate(config):
        try:
            function = Classifier(term.classifier, term.label, term.output, device)
        except ConfigError as error:
            raise ConfigError(f"reward[{number}]: {error}") from error
        name = term.name or term.label
        if name in {earlier.name for earlier in terms}:
            raise ConfigError(f"reward[{number}].name is {name!r}, as another term's is; give it a name of its own")
        terms.append(Term(name, term.weight, function))
    return terms


def score(
    terms: Sequence[Term], prompts: Sequence[str], completions: Sequence[str]
) -> tuple[list[float], dict[str, list[float]]]:
    """Weighted sum of the terms for each completion, and each term by itself.

    Raises:
        NonFiniteReward: a term gave NaN or infinity; the message names it and the text.
    """
    columns = {term.name: term.function(prompts, completions) for term in terms}
    for name, rewards in columns.items():
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
            if not -torch.inf < reward < torch.inf:
                raise NonFiniteReward(f"reward term {name!r} is {reward} for the text {prompt + completion!r}")
    weights = [term.weight for term in terms]
    totals = [sum(w * r for w, r in zip(weights, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return totals, columns
