"""Episodes whose turns may call tools: methods of an environment in TRL's form, and functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import (
    Episode,
    Message,
    Problem,
    Reply,
    Turn,
    appended,
    as_text,
    clean,
    is_text_blocks,
    readable,
)
from tokencredit.text.turns.protocols.factories import EnvironmentFailed, NoEnvironment
from tokencredit.user_code.user_objects import summarized
from tokencredit.user_code.workers import TimedOut, begin, call_within, is_coroutine_function

Call = tuple[str, Any, dict[str, str]]
"""A call's tool, its arguments, and its id for the answer, if it has one."""
Answer = tuple[str, Problem | None]
"""A tool's answer as text, and the problem with it."""


class ToolEpisode(Episode):
    """An episode that goes on until a turn has no tool call."""

    def start(self) -> Prompt:
        """Reset the environment with the row; returns the row's prompt, with the text that `reset` returned."""
        prompt = copy.deepcopy(self.row.get("prompt")) or ""
        if not readable(prompt):
            raise ConfigError(f"the prompt of a row is {prompt!r:.200}; it must be a text, or messages with a text")
        added, instance = self.instance.reset(**self.row), self.instance
        self.environment = None if isinstance(instance.value, NoEnvironment) else instance.value
        self._callables = instance.factory.callables(instance.value)
        self.tools = list(self._callables.values())
        if not (added is None or isinstance(added, str) or is_text_blocks(added)):
            raise EnvironmentFailed(
                f"{instance.factory.label}: reset returned {added!r:.200}; it must return a text, or None"
            )
        if not prompt and not added:
            raise EnvironmentFailed(
                f"{instance.factory.label}: an episode has no prompt, neither of the data set nor of reset"
            )
        if self.instance.factory.tools and not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        return clean(prompt if added is None else appended(prompt, as_text(added)))

    def answer(self, turn: Turn) -> Reply:
        """The tools' answers to a turn's calls, in order; without a call the episode ends."""
        calls = [_read(call) for call in (turn.message or {}).get("tool_calls") or []]
        if not calls and turn.malformed is None:
            return Reply(ending="answer")
        messages: list[Message] = []
        problems: list[Problem] = []
        for (name, _, identity), (text, problem) in zip(calls, self._answers(calls), strict=True):
            messages.append({"role": "tool", "name": name, **identity, "content": text})
            problems += [problem] if problem else []
        if turn.malformed is not None:
            # By the user: a message of a tool belongs to a call with a name, and there is none.
            messages.append({"role": "user", "content": f"error: {turn.malformed}; {self._usage()}"})
            problems.append("malformed")
        return Reply(messages, problems=tuple(problems))

    def _answers(self, calls: Sequence[Call]) -> list[Answer]:
        """Answers to calls: functions are called one after the other, then coroutine functions all at once."""
        answers: dict[int, Answer] = {}
        coroutines = []
        for place, (name, arguments, _) in enumerate(calls):
            if mistake := self._mistake(name, arguments):
                answers[place] = f"error: {mistake}", "failed"
            elif is_coroutine_function(self._callables[name]):
                coroutines.append((place, name, arguments))
            else:
                answers[place] = self._answer(name, self._begin(name, arguments))
        started = [(place, name, self._begin(name, arguments)) for place, name, arguments in coroutines]
        for place, name, result in started:
            answers[place] = self._answer(name, result)
        return [answers[place] for place in range(len(calls))]

    def _mistake(self, name: str, arguments: Any) -> str | None:
        """What is wrong with a call, and what the tools take; None if nothing is."""
        tools = self.instance.factory.tools
        if name not in tools:
            return f"there is no tool {name!r}; {self._usage()}"
        mistake = tools[name].mistake(arguments)
        return None if mistake is None else f"{name}: {mistake}"

    def _usage(self) -> str:
        return f"the tools are {', '.join(tool.usage() for tool in self.instance.factory.tools.values())}"

    def _begin(self, name: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        return begin(self.instance.workers, self.instance.timeout, self._callables[name], **arguments)

    def _answer(self, name: str, result: Callable[[], Any]) -> Answer:
        """A result as text; a failure or a timeout as a text that says so."""
        instance = self.instance
        try:
            # In a thread, because `str` of an object is the user's code too.
            return call_within(instance.workers, instance.timeout, as_text, result()), None
        except TimedOut:
            instance.hung = True
            return f"error: {name} exceeded its timeout of {instance.timeout:g} s", "timeout"
        except BaseException as error:  # SystemExit too; Ctrl-C does not come into threads
            # Without the place, which depends on the machine.
            return f"error: {name} {summarized(error)}", "failed"


def _read(call: Any) -> Call:
    """The name, arguments and id of a parsed call, from the forms in which templates have it."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict):
        function = {}
    identity = {"tool_call_id": call["id"]} if isinstance(call, dict) and isinstance(call.get("id"), str) else {}
    return str(function.get("name", "")), function.get("arguments", {}), identity
