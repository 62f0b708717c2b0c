"""Reward valid JSON with the expected keys."""

import json

KEYS = {"film", "verdict", "stars"}


def parses(prompts, completions, **columns):
    """1 for a JSON object with the right keys, 0 for anything else."""
    return [
        1.0 if is_record(prompt + completion) else 0.0 for prompt, completion in zip(prompts, completions, strict=True)
    ]


def graded(prompts, completions, **columns):
    """1 for a JSON object with the right keys; else up to ½, by the share of the text that parses."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [1.0 if is_record(text) else 0.5 * share_parsed(text) for text in texts]


def is_record(text):
    """True if the text is a JSON object with the right keys."""
    try:
        record = json.loads(text)
    except ValueError:
        return False
    return isinstance(record, dict) and record.keys() == KEYS


def share_parsed(text):
    """Share of the text before the first parse error."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos / len(text)
    return 1.0
