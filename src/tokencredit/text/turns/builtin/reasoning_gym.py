"""reasoning-gym: questions from procedural generators, scored by their verifiers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tokencredit.errors import ConfigError, importing
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import appended

AGAIN = "\nThat is not the answer. Try again.\n"
"""Observation after a wrong answer, if there is another try."""


class ReasoningGym:
    """A question per episode, made from the episode's seed, and its verifier's score.

    The question is appended to the row's prompt. The answer is the text inside the last `<answer>…</answer>` of a turn,
    or else the whole turn. Rewards of an episode add up to its best score, from 0 to 1: a turn pays what it gains.
    """

    def __init__(self, name: str, tries: int = 1, **settings: Any):
        """Check the settings of a data set of reasoning-gym; the seed and the size are the run's.

        `tries` are turns in which the policy may answer; the episode ends earlier with a full score.
        """
        with importing("env.factory reasoning_gym", "reasoning-gym", "tokencredit[reasoning-gym]"):
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=1)
            raise ConfigError(f"there is no such data set{f'; did you mean {near[0]}?' if near else ''}")
        if type(tries) is not int or tries < 1:
            raise ConfigError(f"env.kwargs.tries is {tries!r}; it must be a whole number, at least 1")
        for key in ("seed", "size"):
            if key in settings:
                raise ConfigError(f"env.kwargs has {key}; each episode's question comes from the run's seed")
        self._create, self._name, self._settings, self._tries = reasoning_gym.create_dataset, name, settings, tries
        try:
            self._draw(0)
        except (TypeError, ValueError, AssertionError, AttributeError) as error:
            raise ConfigError(f"env.kwargs do not fit the data set: {error}") from error

    def reset(self, row: Mapping[str, Any]) -> Prompt:
        """Draw a question from the row's seed and append it to the row's prompt."""
        self._draw(row["seed"])
        self._best, self._turns = 0.0, 0
        return appended(row.get("prompt") or "", self._question["question"] + "\n")

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Score an answer; the reward is by how much it is better than those before."""
        self._turns += 1
        gain = max(self._score(completion) - self._best, 0.0)
        self._best += gain
        done = self._best >= 1 or self._turns >= self._tries
        return "" if done else AGAIN, gain, done

    def _draw(self, seed: int) -> None:
        self._dataset = self._create(self._name, seed=seed, size=1, **self._settings)
        self._question = self._dataset[0]

    def _score(self, completion: str) -> float:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(completion) or completion.strip()
        try:
            return float(self._dataset.score_answer(answer, entry=self._question))
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError):
            return 0.0  # some verifiers raise for answers in another format
