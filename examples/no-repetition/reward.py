"""A review of the kind that its row of the data set asks for."""

import functools

from tokencredit.text.rewards.models import Classifier


@functools.cache
def classifier(label):
    """What the built-in classifier says of a label, reading the completion alone."""
    return Classifier("builtin:reviews", label, "probability", text="completion")


def wanted_verdict(prompts, completions, wanted, **columns):
    """The probability of the label in the column `wanted`."""
    by_label = {label: classifier(label)(prompts, completions) for label in set(wanted)}
    return [by_label[label][row] for row, label in enumerate(wanted)]
