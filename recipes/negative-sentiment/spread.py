"""The classifier's score of a completion as the reward of every one of its tokens, instead of the last one alone."""

from functools import cache

from tokencredit.text.rewards.reward_models import Classifier, load


@cache
def reader(classifier, label):
    """Load a classifier once."""
    return Classifier(classifier, *load(classifier, "cpu"), label)


def every_token(prompts, completions, completion_ids, classifier, label):
    """A dense reward: the whole score, again and again, so that a text of n tokens earns n times its score."""
    scores = reader(classifier, label)(prompts, completions)
    return [[score] * len(ids) for score, ids in zip(scores, completion_ids, strict=True)]
