import asyncio
import sys
import threading

import pytest

from helpers.turns import called, environments, episode, said, texts
from tokencredit.errors import ConfigError
from tokencredit.text.turns.protocols.episode import Reply
from tokencredit.text.turns.protocols.factories import EnvironmentFailed

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]


class Calculator:
    """Adds to a sum."""

    def reset(self, **row):
        self.total, self.row, self.order = 0, row, []

    def add(self, number: int) -> int:
        """Add a number to the sum.

        Args:
            number: the number
        """
        self.total += number
        self.order.append(number)
        return self.total

    async def add_later(self, number: int) -> int:
        """Add a number to the sum, after a while.

        Args:
            number: the number
        """
        await asyncio.sleep(0)
        return self.add(number)

    @staticmethod
    def pi() -> float:
        """The number pi."""
        return 3.14

    @classmethod
    def build(cls):
        """No tool, as in TRL."""

    def _private(self):
        """No tool."""

    @property
    def broken(self):
        raise ValueError("a property is not to be read")

    def get_reward(self) -> float:
        return float(self.total)


def search(query: str, limit: int = 3) -> list:
    """Search.

    Args:
        query: words
        limit: most results
    """
    return [query] * limit


def names(tools):
    return [tool.__name__ for tool in tools]


def test_public_methods_are_tools_after_the_functions():
    begun, prompt = episode(Calculator, [search], {"prompt": ASKED, "level": 1})
    assert names(begun.tools) == ["search", "add", "add_later", "pi"]
    assert prompt == ASKED
    assert begun.environment.row == {"prompt": ASKED, "level": 1}, "no seed that it does not ask for"


def test_an_episode_of_calls_and_an_answer():
    begun, _ = episode(Calculator, row={"prompt": ASKED})
    assert begun.reply(called(("add", {"number": 2}))) == Reply([{"role": "tool", "name": "add", "content": "2"}])
    assert texts(begun.reply(called(("add", {"number": 3}), ("pi", {})))) == ["5", "3.14"]
    assert begun.reply(said("5")) == Reply(ending="answer")
    assert begun.reply(called()) == Reply(ending="answer")


def test_functions_alone():
    begun, prompt = episode(None, [search], {"prompt": "2 + 3?", "level": 1})
    assert prompt == [{"role": "user", "content": "2 + 3?"}], "tools need a conversation"
    assert (begun.environment, names(begun.tools)) == (None, ["search"])
    assert texts(begun.reply(called(("search", {"query": "a", "limit": 2})))) == ["['a', 'a']"]


def test_calls_are_answered_in_order_and_coroutines_run_at_the_same_time():
    class Meeting(Calculator):
        async def meet(self, number: int) -> str:
            """Meet three others.

            Args:
                number: who
            """
            self.order.append("meet")
            await self.barrier.wait()
            return f"met {number}"

    begun, _ = episode(Meeting, row={"prompt": ASKED})
    begun.environment.barrier = asyncio.Barrier(3)
    calls = [
        ("meet", {"number": 0}),
        ("add", {"number": 1}),
        ("meet", {"number": 2}),
        ("meet", {"number": 3}),
        ("pi", {}),
    ]
    assert texts(begun.reply(called(*calls))) == ["met 0", "1", "met 2", "met 3", "3.14"]
    assert begun.environment.order == [1, "meet", "meet", "meet"]


def test_an_id_of_a_call_is_the_answers():
    begun, _ = episode(Calculator, row={"prompt": ASKED})
    turn = called(("pi", {}))
    turn.message["tool_calls"][0]["id"] = "abc123"
    assert begun.reply(turn).observation[0]["tool_call_id"] == "abc123"


BLOCKS = [{"type": "text", "text": "2 + 3?"}]


@pytest.mark.parametrize(
    ("content", "added", "expected"),
    [
        ("2 + 3?", " Now.", "2 + 3? Now."),
        ("2 + 3?", "", "2 + 3?"),
        ("2 + 3?", [{"type": "text", "text": "!"}], "2 + 3?!"),
        ("2 + 3?", "\ud800", "2 + 3?\ufffd"),
        (BLOCKS, " Now.", [*BLOCKS, {"type": "text", "text": " Now."}]),
        (BLOCKS, [{"type": "text", "text": "\ud800"}], [*BLOCKS, {"type": "text", "text": "\ufffd"}]),
        ([{"type": "text", "text": "\ud800"}], None, [{"type": "text", "text": "\ufffd"}]),
    ],
)
def test_a_text_of_reset_is_appended_to_the_last_message(content, added, expected):
    class Adding(Calculator):
        def reset(self, **row):
            return added

    row = {"prompt": [ASKED[0], {"role": "user", "content": content}]}
    assert episode(Adding, row=row)[1] == [ASKED[0], {"role": "user", "content": expected}]
    assert row["prompt"] == [ASKED[0], {"role": "user", "content": content}], "the data set's row is not touched"


def test_keys_that_are_none_are_left_out_of_a_prompt():
    """Arrow tables fill them in, and chat templates take them as set."""
    call = {"function": {"name": "pi", "arguments": {}}}
    prompt = [
        {"role": "user", "content": "pi?", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
    ]
    assert episode(Calculator, row={"prompt": prompt})[1] == [
        {"role": "user", "content": "pi?"},
        {"role": "assistant", "tool_calls": [call]},
    ]


@pytest.mark.parametrize(
    "prompt", [3, ["a"], [{"role": "user"}], [{"role": "user", "content": 3}], [{"content": "a"}], b"a"]
)
def test_a_row_without_a_readable_prompt(prompt):
    with pytest.raises(ConfigError, match=r"the prompt of a row is .*; it must be a text, or messages with a text"):
        episode(Calculator, row={"prompt": prompt})


def test_arguments_and_columns_may_have_any_name():
    class Named(Calculator):
        def reset(self, function, timeout, workers, args, kwargs, name, value, prompt):
            return f"{function}{timeout}{workers}{args}{kwargs}{name}{value}"

        def search(self, function: int, timeout: int, workers: int, args: int, kwargs: int) -> str:
            """Search.

            Args:
                function: one
                timeout: two
                workers: three
                args: four
                kwargs: five
            """
            return f"{function}{timeout}{workers}{args}{kwargs}"

        async def search_later(self, function: int, timeout: int) -> str:
            """Search.

            Args:
                function: one
                timeout: two
            """
            return f"{function}{timeout}"

    names = ("function", "timeout", "workers", "args", "kwargs", "name", "value")
    row = {name: number for number, name in enumerate(names, 1)}
    begun, prompt = episode(Named, row={"prompt": ASKED, **row})
    assert prompt[-1]["content"] == "2 + 3?1234567"
    given = {name: row[name] for name in names[:5]}
    later = {name: row[name] for name in names[:2]}
    assert texts(begun.reply(called(("search", given), ("search_later", later)))) == ["12345", "12"]


def test_the_environment_may_own_the_data():
    class Own(Calculator):
        def reset(self, seed, **row):
            return f"{seed} + 1?"

    assert episode(Own)[1] == [{"role": "user", "content": "7 + 1?"}]
    assert episode(Own, row={"seed": 3})[1] == [{"role": "user", "content": "3 + 1?"}]
    with pytest.raises(EnvironmentFailed, match="an episode has no prompt, neither of the data set nor of reset"):
        episode(Calculator)


def test_without_tools_a_plain_prompt_stays_plain():
    class Scorer:
        def reset(self, **row):
            return " Go."

        def get_reward(self):
            return 1.0

    begun, prompt = episode(Scorer, row={"prompt": "Ready?"})
    assert (prompt, list(begun.tools)) == ("Ready? Go.", [])
    assert begun.reply(said("x")).ending == "answer"


@pytest.mark.parametrize("returned", [3, {"role": "user"}, [], [{"type": "image", "image": None}], b"x"])
def test_a_reset_that_returns_something_else_is_a_mistake(returned):
    class Wrong(Calculator):
        def reset(self, **row):
            return returned

    with pytest.raises(EnvironmentFailed, match="it must return a text, or None"):
        episode(Wrong, row={"prompt": ASKED})


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("subtract", {}), "error: there is no tool 'subtract'; the tools are search(query: string; limit: integer, "),
        (("_private", {}), "error: there is no tool '_private'"),
        (("get_reward", {}), "error: there is no tool 'get_reward'"),
        (("add", {}), "error: add: number is missing; it takes add(number: integer)"),
        (("add", {"number": "2"}), "error: add: number has the wrong type or value; it takes add(number: integer)"),
        (("add", {"number": 2, "self": 3}), "error: add: self is no argument"),
        (("add", [2]), "error: add: the arguments must be a JSON object"),
        (("\ud800", {}), r"error: there is no tool '\ud800'"),
    ],
)
def test_a_wrong_call_is_answered_with_what_the_tools_take(call, answer):
    begun, _ = episode(Calculator, [search], {"prompt": ASKED})
    reply = begun.reply(called(call, ("pi", {})))
    first, second = texts(reply)
    assert first.startswith(answer)
    assert (second, reply.problems, reply.ending) == ("3.14", ("failed",), None)
    reply.observation[0]["name"].encode()  # of no lone surrogate


def test_a_malformed_call_is_answered_by_a_user_message_after_the_others():
    begun, _ = episode(Calculator, row={"prompt": ASKED})
    reply = begun.reply(called(("pi", {}), malformed="it is no JSON"))
    assert [message["role"] for message in reply.observation] == ["tool", "user"]
    assert texts(reply)[1].startswith("error: it is no JSON; the tools are add(number: integer), add_later(")
    assert (reply.problems, reply.ending) == (("malformed",), None)


def trouble(over):
    """Tools that fail in every way, by name; `over` ends those that hang."""

    class Unprintable:
        def __str__(self):
            raise ValueError("no text")

    def raises():
        raise ValueError("out of\norder")

    async def raises_later():
        raises()

    def leaves():
        sys.exit(3)

    def escapes():
        raise type("Escaping", (BaseException,), {})("out")

    async def leaves_later():
        sys.exit(3)

    def interrupts():
        raise KeyboardInterrupt

    def recurses():
        return recurses()

    def nests():
        inner = []
        for _ in range(10**5):
            inner = [inner]
        return inner

    def hangs():
        over.wait()

    async def hangs_later():
        await asyncio.sleep(3600)

    def long():
        return "x" * 10**7

    def half():
        return "a\ud800b\0c"

    def nothing(): ...

    def unprintable():
        return Unprintable()

    def blocks():
        return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    def coroutine():
        return raises_later()

    tools = {name: tool for name, tool in locals().items() if callable(tool) and name != "Unprintable"}
    for tool in tools.values():
        tool.__doc__ = "A tool."
    return tools


@pytest.mark.parametrize(
    ("name", "answer", "problems"),
    [
        ("raises", r"error: raises raised ValueError: out of\norder", ("failed",)),
        ("raises_later", r"error: raises_later raised ValueError: out of\norder", ("failed",)),
        ("leaves", "error: leaves raised SystemExit: 3", ("failed",)),
        ("escapes", "error: escapes raised Escaping: out", ("failed",)),
        ("leaves_later", "error: leaves_later raised SystemExit: 3", ("failed",)),
        ("interrupts", "error: interrupts raised KeyboardInterrupt", ("failed",)),
        ("hangs", "error: hangs exceeded its timeout of 0.1 s", ("timeout",)),
        ("hangs_later", "error: hangs_later exceeded its timeout of 0.1 s", ("timeout",)),
        ("long", "x" * 16 * 8 + " [cut]", ("cut",)),
        ("half", "a\ufffdb\0c", ()),
        ("nothing", "None", ()),
        ("unprintable", "error: unprintable raised ValueError: no text", ("failed",)),
        ("blocks", "one two", ()),
        ("coroutine", r"error: coroutine raised ValueError: out of\norder", ("failed",)),
    ],
)
def test_a_tool_in_trouble_is_an_observation_and_the_episode_goes_on(name, answer, problems):
    over = threading.Event()
    settings = {"timeout": 0.1 if "hangs" in name else 60, "observation_tokens": 8}
    begun, _ = episode(None, list(trouble(over).values()), {"prompt": ASKED}, **settings)
    reply = begun.reply(called((name, {})))
    assert reply == Reply([{"role": "tool", "name": name, "content": answer}], problems=problems)
    assert texts(begun.reply(called(("nothing", {})))) == ["None"]
    over.set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurses", "nests"])
def test_a_tool_that_exhausts_the_stack_is_an_observation(name):
    begun, _ = episode(None, list(trouble(None).values()), {"prompt": ASKED}, observation_tokens=64)
    reply = begun.reply(called((name, {})))
    assert reply.problems == ("failed",)
    assert texts(reply)[0].startswith(f"error: {name} raised RecursionError: maximum recursion depth exceeded")


def test_an_environment_whose_tool_hung_is_replaced():
    over = threading.Event()

    class Hanging(Calculator):
        def hang(self) -> str:
            """Hang."""
            over.wait()

    runs = environments(Hanging, timeout=0.05)
    (begun,) = runs.begin([{"prompt": ASKED}], [1])
    begun.start()
    assert begun.reply(called(("hang", {}), ("add", {"number": 2}))).problems == ("timeout",)
    assert begun.environment.total == 2, "the episode goes on with it"
    (again,) = runs.begin([{"prompt": ASKED}], [1])
    again.start()
    assert again.environment is not begun.environment
    over.set()
