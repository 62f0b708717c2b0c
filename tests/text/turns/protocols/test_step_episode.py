import math
import threading

import numpy as np
import pytest
import torch

from helpers.turns import environments, episode, said
from tokencredit.text.turns.protocols.episode import Reply
from tokencredit.text.turns.protocols.factories import EnvironmentFailed

HALF = "\ud800"


class Countdown:
    """Counts turns; done at the third."""

    def reset(self, row):
        self.row, self.left = row, 3
        return f"{self.left} left."

    def step(self, completion):
        self.left -= 1
        return f" {self.left} left, {completion}.", 0.5, self.left == 0


def returning(result, prompt="Go."):
    """An environment whose step returns this, or raises it."""

    class Returning:
        def reset(self, row):
            return prompt

        def step(self, completion):
            if isinstance(result, BaseException):
                raise result
            return result

    return Returning


def chat(result):
    return returning(result, [{"role": "user", "content": "Go."}])


def test_an_episode():
    begun, prompt = episode(Countdown, row={"level": 2})
    assert (prompt, begun.tools) == ("3 left.", ())
    assert begun.environment.row == {"level": 2, "seed": 7}
    assert begun.reply(said("a")) == Reply(" 2 left, a.", 0.5)
    assert begun.reply(said("b")) == Reply(" 1 left, b.", 0.5)
    assert begun.reply(said("c")) == Reply(" 0 left, c.", 0.5, "done")


def test_a_column_seed_comes_before_the_seed_of_the_run():
    assert episode(Countdown, row={"seed": 1})[0].environment.row == {"seed": 1}


def test_an_async_environment():
    class Async:
        async def reset(self, row):
            return "Go."

        async def step(self, completion):
            return "", 1.0, True

    begun, prompt = episode(Async)
    assert prompt == "Go."
    assert begun.reply(said("")) == Reply("", 1.0, "done")


@pytest.mark.parametrize(
    ("result", "reply"),
    [
        ((None, 1, True), Reply("", 1.0, "done")),
        (("", 1, True), Reply("", 1.0, "done")),
        (["on", True, False], Reply("on", 1.0)),
        (("on", np.float32(0.5), np.bool_(False)), Reply("on", 0.5)),
        (("on", torch.tensor(0.5), torch.tensor(True)), Reply("on", 0.5, "done")),
        ((f"ha{HALF}lf", -2, False), Reply("ha\ufffdlf", -2.0)),
    ],
)
def test_results_of_a_step_on_plain_texts(result, reply):
    assert episode(returning(result))[0].reply(said("")) == reply


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ("on", [{"role": "user", "content": "on"}]),
        ({"role": "user", "content": "on"}, [{"role": "user", "content": "on"}]),
        (
            [
                {"role": "tool", "name": "map", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "y"}]},
            ],
            [{"role": "tool", "name": "map", "content": "x"}, {"role": "user", "content": "y"}],
        ),
        (({"role": "user", "content": HALF},), [{"role": "user", "content": "\ufffd"}]),
    ],
)
def test_observations_in_a_conversation(observation, messages):
    assert episode(chat((observation, 0, False)))[0].reply(said("")) == Reply(messages, 0.0)


def test_the_end_of_a_conversation_needs_no_message():
    for nothing in (None, "", [], ()):
        assert episode(chat((nothing, 0, True)))[0].reply(said("")) == Reply([], 0.0, "done")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "step returned a NoneType; it must return (observation, reward, done)"),
        ("abc", "step returned a str; it must return (observation, reward, done)"),
        (("on", 1, False, False, {}), "step returned 5 values"),
        (("on", math.nan, False), "step returned the reward nan; it must be a finite number"),
        (("on", None, False), "step returned the reward None"),
        (("on", "1", False), "step returned the reward '1'"),
        (("on", 1, None), "step returned None for done; it must be True or False"),
        (("on", 1, 0), "step returned 0 for done"),
        (("", 1, False), "step returned no observation, although it is not done"),
        ((None, 1, False), "step returned no observation"),
        ((3, 1, False), "step returned an observation of type int; it must be a text, a message"),
        (({"role": "user", "content": "on"}, 1, False), "step returned messages, and reset a text"),
        ((b"on", 1, False), "step returned an observation of type bytes"),
        ((["on"], 1, False), "step returned an observation of type list"),
        (([{"role": "system", "content": "on"}], 1, False), "step returned an observation of type list"),
        (([{"role": "user", "content": 3}], 1, False), "step returned an observation of type list"),
        (ValueError("bad\x1b move"), r"step raised ValueError: bad\x1b move at "),
        (SystemExit(3), "step raised SystemExit: 3 at "),
        (KeyboardInterrupt(), "step raised KeyboardInterrupt at "),
        (RecursionError("deep"), "step raised RecursionError: deep at "),
    ],
)
def test_a_step_that_fails_ends_the_episode_with_the_reason(result, problem):
    reply = episode(returning(result))[0].reply(said(""))
    assert (reply.ending, reply.problems, reply.reward) == ("error", ("failed",), 0.0)
    assert reply.observation.startswith(f"error: {problem}")


def test_objects_that_raise_when_they_are_read():
    class Trap:
        def __float__(self):
            raise ValueError("trap")

        def __len__(self):
            raise ValueError("trap")

        item = property(lambda self: 1 / 0)

    for result in ((Trap(), 1, True), ("on", Trap(), False), ("on", 1, Trap())):
        assert episode(returning(result))[0].reply(said("")).ending == "error"


def test_an_observation_of_10_mb_is_cut():
    reply = episode(returning(("x" * 10**7, 0, False)), observation_tokens=4)[0].reply(said(""))
    assert reply == Reply("x" * 64 + " [cut]", 0.0, None, ("cut",))
    reply = episode(chat(("x" * 10**7, 0, False)), observation_tokens=4)[0].reply(said(""))
    assert reply == Reply([{"role": "user", "content": "x" * 64 + " [cut]"}], 0.0, None, ("cut",))


def test_an_observation_of_many_messages_is_cut():
    message = {"role": "user", "content": "x"}
    reply = episode(chat(([message] * 10**5, 0, False)), observation_tokens=4)[0].reply(said(""))
    assert reply == Reply([message] * 4, 0.0, None, ("cut",))


def test_an_environment_that_hangs_ends_its_episode_and_is_replaced():
    over = threading.Event()

    class Hanging(Countdown):
        def step(self, completion):
            if completion == "hang":
                over.wait()
            return super().step(completion)

    runs = environments(Hanging, timeout=0.05)
    first, second = runs.begin([{}, {}], [1, 2])
    first.start(), second.start()
    reply = first.reply(said("hang"))
    assert (reply.ending, reply.problems) == ("error", ("timeout",))
    assert reply.observation == "error: step exceeded the timeout of 0.05 s"
    runs.release([first, second])
    again, other = runs.begin([{}, {}], [3, 4])
    again.start(), other.start()
    assert again.environment is not first.environment, "the abandoned call may still change it"
    assert other.environment is second.environment
    over.set()


def test_prompts_may_be_messages():
    message = {"role": "user", "content": f"G{HALF}o"}
    for prompt in ([message], message):
        assert episode(returning(None, prompt))[1] == [{"role": "user", "content": "G\ufffdo"}]


@pytest.mark.parametrize("prompt", [None, "", [], 3, ["Go"], [{"content": "Go"}], [{"role": "user", "content": 3}], ()])
def test_a_reset_that_returns_no_prompt_is_a_mistake(prompt):
    with pytest.raises(
        EnvironmentFailed, match=r"environment_factory: reset returned .*; it must return a text, or messages"
    ):
        episode(returning(None, prompt))


def test_a_reset_is_tried_three_times_each_with_a_new_environment_and_its_own_row():
    resets = []

    class Flaky(Countdown):
        def reset(self, row):
            resets.append((self, row.pop("level")))
            if len(resets) < 3:
                raise OSError("no answer")
            return super().reset(row)

    row = {"level": [2]}
    assert episode(Flaky, row=row)[1] == "3 left."
    assert [level for _, level in resets] == [[2]] * 3
    assert len({id(environment) for environment, _ in resets}) == 3
    assert row == {"level": [2]}


def test_a_reset_that_keeps_failing_stops_the_run_with_its_place():
    class Broken(Countdown):
        def reset(self, row):
            raise OSError("no answer")

    with pytest.raises(
        EnvironmentFailed,
        match=r"environment_factory: raised OSError: no answer at .*test_step_episode\.py:\d+ \(the last of 3 tries\)",
    ):
        episode(Broken)


def test_a_reset_that_hangs_stops_the_run():
    over = threading.Event()

    class Hanging(Countdown):
        def reset(self, row):
            over.wait()

    with pytest.raises(EnvironmentFailed, match=r"exceeded the timeout of 0\.02 s; raise env\.timeout"):
        episode(Hanging, timeout=0.02)
    over.set()


def test_a_row_belongs_to_its_episode():
    class Greedy(Countdown):
        def reset(self, row):
            row["items"].clear()
            row["mine"] = True
            return "Go."

    row = {"items": [1, 2]}
    runs = environments(Greedy)
    for begun in runs.begin([row, row], [1, 1]):
        begun.start()
    assert row == {"items": [1, 2]}
