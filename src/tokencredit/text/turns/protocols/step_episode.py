"""Episodes of the plain protocol: `reset(row)`, then `step(completion)` until done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import (
    Message,
    Problem,
    Reply,
    Turn,
    clean,
    clean_messages,
    messages_of,
    readable,
    shorten,
)
from tokencredit.text.turns.protocols.factories import Instance
from tokencredit.text.user_code.user_objects import described
from tokencredit.text.user_code.workers import TimedOut, call_within


class MalformedStep(Exception):
    """`step` returned something that is no observation, reward and done."""


class StepEpisode:
    """An episode whose environment receives each turn's text and returns an observation, a reward and done."""

    def __init__(self, instance: Instance, row: Mapping[str, Any], tokens: int):
        """Keep what an episode needs; `tokens` is the longest observation, in tokens."""
        self.instance, self._row, self._tokens = instance, row, tokens
        self._conversational = False
        self.environment: Any = None
        self.tools: Sequence[Callable[..., Any]] = ()

    def start(self) -> Prompt:
        """Reset the environment with the row; returns its prompt."""
        prompt: Any = self.instance.reset(dict(self._row))
        self.environment = self.instance.value
        if isinstance(prompt, dict):
            prompt = [prompt]
        self._conversational = not isinstance(prompt, str)
        if not prompt or not readable(prompt):
            raise ConfigError(
                f"{self.instance.factory.label}: reset returned {prompt!r:.200}; it must return a text, or messages "
                "with a role and a text"
            )
        return clean(prompt)

    def reply(self, turn: Turn) -> Reply:
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
        text, _ = shorten(f"error: {message}", self._tokens)
        return Reply(self._framed(text), 0.0, "error", (problem,))

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
        framed, cut = self._bounded(observation)
        return Reply(framed, float(reward), "done" if done else None, ("cut",) if cut else ())

    def _bounded(self, observation: Any) -> tuple[str | list[Message], bool]:
        """The observation in the format of the prompt; true if it was cut."""
        if observation is None or isinstance(observation, str):
            text, cut = shorten(observation or "", self._tokens)
            return self._framed(text), cut
        messages = messages_of(observation)
        if messages is None:
            raise MalformedStep(
                f"step returned an observation of type {type(observation).__name__}; it must be a text, a message with "
                "the role user or tool, or a list of such messages"
            )
        if not self._conversational:
            raise MalformedStep("step returned messages, and reset a text; both must be texts, or both messages")
        kept = messages[: self._tokens]  # each has a token at least
        shortened = [shorten(message["content"], self._tokens) for message in kept]
        framed = [{**message, "content": text} for message, (text, _) in zip(kept, shortened, strict=True)]
        return clean_messages(framed), len(kept) < len(messages) or any(cut for _, cut in shortened)

    def _framed(self, text: str) -> str | list[Message]:
        """A text in the format of the prompt."""
        if not self._conversational:
            return text
        return [{"role": "user", "content": text}] if text else []
