"""Reward reviews with the verdict that the dataset row specifies."""

import functools

from tokencredit.text.rewards.reward_models import Classifier, load


@functools.cache
def classifier(label):
    """The built-in classifier's probability of a label, from the completion only."""
    return Classifier("builtin:reviews", *load("builtin:reviews", "cpu"), label, "probability", text="completion")


def wanted_verdict(prompts, completions, wanted, **columns):
    """The probability of the label in the column `wanted`."""
    by_label = {label: classifier(label)(prompts, completions) for label in set(wanted)}
    return [by_label[label][row] for row, label in enumerate(wanted)]
