"""Episodes of the plain protocol: `reset(row)`, then `step(completion)` until done."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import (
    Ending,
    Episode,
    Message,
    Problem,
    Reply,
    Turn,
    clean,
    messages_of,
    readable,
)
from tokencredit.text.turns.protocols.factories import EnvironmentFailed
from tokencredit.user_code.user_objects import described
from tokencredit.user_code.workers import TimedOut, call_within


class MalformedStep(Exception):
    """`step` returned something that is no observation, reward and done."""


class StepEpisode(Episode):
    """An episode whose environment receives each turn's text and returns an observation, a reward and done."""

    _conversational = False

    def start(self) -> Prompt:
        """Reset the environment with the row; returns its prompt."""
        prompt: Any = self.instance.reset(dict(self.row))
        self.environment = self.instance.value
        if isinstance(prompt, dict):
            prompt = [prompt]
        self._conversational = not isinstance(prompt, str)
        if not prompt or not readable(prompt):
            raise EnvironmentFailed(
                f"{self.instance.factory.label}: reset returned {prompt!r:.200}; it must return a text, or messages "
                "with a role and a text"
            )
        return clean(prompt)

    def answer(self, turn: Turn) -> Reply:
        """The observation, reward and end that `step` returns; if it fails, the episode ends with an error."""
        instance = self.instance
        problem: Problem = "failed"
        try:
            return self._read(call_within(instance.workers, instance.timeout, instance.value.step, turn.text))
        except TimedOut as error:
            problem, message = "timeout", f"step {error}"
            instance.hung = True
        except MalformedStep as error:
            message = str(error)
        except BaseException as error:  # SystemExit too; Ctrl-C does not come into threads
            message = f"step {described(error)}"
        return Reply(self._framed(f"error: {message}"), 0.0, "error", (problem,))

    def _read(self, result: Any) -> Reply:
        if not isinstance(result, tuple | list) or len(result) != 3:
            count = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
            raise MalformedStep(f"step returned {count}; it must return (observation, reward, done)")
        observation, reward, done = result
        # Numbers of NumPy and PyTorch as Python's.
        reward, done = (x.item() if hasattr(x, "item") else x for x in (reward, done))
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise MalformedStep(f"step returned the reward {reward!r:.100}; it must be a finite number")
        if not isinstance(done, bool):
            raise MalformedStep(f"step returned {done!r:.100} for done; it must be True or False")
        if not observation and not done:
            raise MalformedStep("step returned no observation, although it is not done")
        ending: Ending | None = "done" if done else None
        if observation is None or isinstance(observation, str):
            return Reply(self._framed(observation or ""), float(reward), ending)
        messages = messages_of(observation)
        if messages is None:
            raise MalformedStep(
                f"step returned an observation of type {type(observation).__name__}; it must be a text, a message with "
                "the role user or tool, or a list of such messages"
            )
        if not self._conversational:
            raise MalformedStep("step returned messages, and reset a text; both must be texts, or both messages")
        cut: tuple[Problem, ...] = ("cut",) if len(messages) > self._tokens else ()
        return Reply(messages[: self._tokens], float(reward), ending, cut)  # each has a token at least

    def _framed(self, text: str) -> str | list[Message]:
        """A text in the format of the prompt."""
        if not self._conversational:
            return text
        return [{"role": "user", "content": text}] if text else []
