"""Reward functions."""


def vowels(completions, **columns):
    """The share of vowels in each completion."""
    return [sum(text.count(v) for v in "aeiou") / max(len(text), 1) for text in completions]
