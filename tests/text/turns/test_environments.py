import threading

import pytest

from helpers.turns import environments, said
from tokencredit.errors import ConfigError
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.settings.run_kind import foreign_code
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import Turn

PROMPT = [{"role": "user", "content": "Hello."}]
FILE = '''
class Words:
    """Tools on words."""

    def __init__(self, level=1):
        self.level = level

    def reset(self, **row):
        self.row = row

    def upper(self, word: str) -> str:
        """Write a word in capitals.

        Args:
            word: the word
        """
        return word.upper()

    def get_reward(self):
        return 1.0


class Steps:
    def reset(self, row):
        return "Go."

    def step(self, completion):
        return "", 1.0, True


def search(query: str) -> str:
    """Search.

    Args:
        query: words
    """
    return isinstance(WORDS, Words)


WORDS = Words()
BOTH = {"words": Words, "steps": Steps}
NUMBER = 3
'''


class Steps:
    """The plain protocol."""

    def reset(self, row):
        self.row = row
        return "Go."

    def step(self, completion):
        return "", 1.0, True


class Tools:
    """TRL's form."""

    def reset(self, **row):
        self.row = row

    def echo(self, word: str) -> str:
        """Say a word again.

        Args:
            word: the word
        """
        return word


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return path


def load(tools=(), **settings):
    return load_environments(EnvironmentConfig(**settings), list(tools))


def names(tools):
    return [tool.__name__ for tool in tools]


def test_an_environment_and_a_tool_are_loaded_from_a_file(file):
    runs = load([f"{file}:search"], factory=f"{file}:Words", kwargs={"level": 2})
    assert (runs.name, names(runs.tools)) == ("Words", ["search", "upper"])
    assert [term.name for term in runs.terms()] == ["Words"]
    (begun,) = runs.begin([{"prompt": PROMPT}], [1])
    assert begun.start() == PROMPT
    assert begun.environment.level == 2
    search = begun.tools[0]
    assert search("x"), "a file is run once for its class and its function"


def test_each_environment_has_its_own_copy_of_the_arguments(tmp_path):
    source = (
        "class Deck:\n    def __init__(self, cards): self.cards = cards\n    def reset(self, row): return 'Draw.'\n"
    )
    (tmp_path / "deck.py").write_text(f"{source}    def step(self, text): return '', self.cards.pop(), True\n")
    runs = load(factory=f"{tmp_path / 'deck.py'}:Deck", kwargs={"cards": [1.0, 2.0]})
    episodes = runs.begin([{}, {}], [1, 2])
    for begun in episodes:
        begun.start()
    assert [begun.reply(Turn([], "")).reward for begun in episodes] == [2.0, 2.0]


def test_an_environment_with_step_has_no_tools(file):
    runs = load(factory=f"{file}:Steps")
    assert (runs.name, runs.tools, [term.name for term in runs.terms()]) == ("Steps", [], ["Steps"])


def test_tools_without_an_environment_need_prompts(file):
    runs = load([f"{file}:search"])
    assert (runs.name, names(runs.tools), runs.terms()) == ("search", ["search"], [])
    rows = Tasks([{"prompt": PROMPT, "environment": {"size": 3}}], name="rows", seed=1)  # no name: one is not selected
    runs.check_columns(rows.columns, rows.values("environment"))
    with pytest.raises(ConfigError, match="the tools search are given without prompts and without an environment"):
        runs.check_columns(["anything"])


def test_a_dict_of_factories_is_selected_by_the_column(file):
    runs = load(factory=f"{file}:BOTH")
    assert runs.name == "Words, Steps"
    assert [term.name for term in runs.terms()] == ["Words", "Steps"]
    runs.check_columns(["prompt", "environment", "level"], ["words", "steps"])
    words, steps = runs.begin(
        [{"prompt": PROMPT, "environment": "words", "level": 1}, {"environment": "steps", "level": 2}], [5, 6]
    )
    assert (words.start(), steps.start()) == (PROMPT, "Go.")
    assert words.environment.row == {"prompt": PROMPT, "level": 1}
    assert (names(words.tools), names(steps.tools)) == (["upper"], [])


@pytest.mark.parametrize(
    ("columns", "values", "problem"),
    [
        (["prompt"], [], "there are several environments, a, b, and the data set has no column 'environment'"),
        (["environment"], ["a", "c"], "the column 'environment' is 'c'; it must be one of 'a', 'b'"),
        (["environment"], [None], "the column 'environment' is None"),
        (["environment"], [["a"]], "the column 'environment' is "),
    ],
)
def test_rows_that_select_no_environment_are_refused(columns, values, problem):
    runs = environments({"a": Steps, "b": Tools})
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        runs.check_columns(columns, values)
    if values:
        with pytest.raises(ConfigError, match="the column 'environment' is "):
            runs.begin([{"environment": value} for value in values], [1] * len(values))


def test_instances_are_created_once_and_reset_often():
    created = []

    class Counting(Steps):
        def __init__(self):
            created.append(self)

    runs = environments(Counting)
    assert len(created) == 1
    seen = []
    for size in (2, 3, 1):
        begun = runs.begin([{}] * size, range(size))
        for one in begun:
            one.start()
        seen.append([one.environment for one in begun])
        runs.release(reversed(begun))
    assert len(created) == 3
    assert seen[0] == seen[1][:2] == [created[0], seen[0][1]]
    assert seen[2] == [created[0]]


def test_an_environment_is_used_by_nobody_else_until_it_is_released():
    runs = environments({"a": Steps, "b": Tools})
    rows = [{"environment": "a"}, {"environment": "b"}, {"environment": "a"}]
    first, second = runs.begin(rows, range(3)), runs.begin(rows, range(3))
    assert len({id(one.instance) for one in (*first, *second)}) == 6
    runs.release([first[1], second[0]])
    third = runs.begin(rows, range(3))
    assert third[0].instance is second[0].instance
    assert third[1].instance is first[1].instance
    assert third[2].instance not in [one.instance for one in (*first, *second)]


def test_episodes_that_are_scored_again_take_no_environment_from_later_ones():
    runs = environments(Steps)
    first = runs.begin([{}] * 2, range(2))
    runs.release(first)
    runs.require(first)
    runs.release(first)  # learned as sampled, though scored before
    second = runs.begin([{}] * 2, range(2))
    assert len({id(one.instance) for one in second}) == 2
    with pytest.raises(ConfigError, match="cannot be scored again, since later ones have their environments"):
        runs.require(first[:1])
    runs.release(first)
    assert not {id(one.instance) for one in runs.begin([{}], [0])} & {id(one.instance) for one in second}


def test_episodes_of_a_batch_do_not_share_an_environment():
    begun = environments(Steps).begin([{"n": i} for i in range(4)], range(4))
    for one in begun:
        one.start()
    assert [one.environment.row for one in begun] == [{"n": i, "seed": i} for i in range(4)]
    assert len({id(one.environment) for one in begun}) == 4


def test_episodes_run_at_the_same_time():
    barrier = threading.Barrier(8)

    class Meeting(Steps):
        def step(self, completion):
            barrier.wait(60)
            return super().step(completion)

    begun = environments(Meeting).begin([{}] * 8, range(8))
    for one in begun:
        one.start()
    replies = []
    threads = [threading.Thread(target=lambda one=one: replies.append(one.reply(said("")))) for one in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.ending for reply in replies] == ["done"] * 8


class NoReset:
    def echo(self): ...


class Row:
    def reset(self, row): ...


class PaidTwice(Steps):
    def get_reward(self): ...


class StepsOfTools(Tools):
    def step(self, action: str) -> str:
        """Act.

        Args:
            action: what to do
        """
        return action


class Undescribed(Tools):
    def step(self, completion):
        return "", 1.0, True


class Argument(Tools):
    def __init__(self, level):
        self.level = level


class Exits(Tools):
    def __init__(self):
        raise SystemExit(2)


class Fails(Tools):
    def __init__(self):
        raise ValueError("no licence")


def echo(word: str) -> str:
    """Say.

    Args:
        word: the word
    """
    return word


@pytest.mark.parametrize(
    ("factory", "functions", "problem"),
    [
        (3, None, r"environment_factory is 3; it must be a class, or a function that returns an environment"),
        ({}, None, "environment_factory is an empty dict"),
        ({3: Steps}, None, "environment_factory has the name 3; names of environments must be texts"),
        ({"a": 3}, None, r"environment_factory\['a'\] is 3; it must be a class"),
        (Argument, None, "environment_factory needs level"),
        (Fails, None, r"created no environment, it raised ValueError: no licence at .*test_env.*:\d+"),
        (Exits, None, "environment_factory created no environment, it raised SystemExit: 2"),
        (
            lambda: None,
            None,
            "environment_factory gives a NoneType, which has no method reset; see docs page .Several turns: ",
        ),
        (NoReset, None, "environment_factory gives a NoReset, which has no method reset"),
        (Row, None, r"reset takes a row, as environments with step\(completion\) do, and Row has no step"),
        (PaidTwice, None, "PaidTwice has step, which returns the reward, and get_reward, which would not be called"),
        (Steps, [echo], "tools are given, and environment_factory has step, which receives whole completions"),
        (Tools, [echo], "two tools are named 'echo': a function and a method of Tools"),
        (None, [echo, echo], "two tools are named 'echo'"),
        (None, "echo", "tools is 'echo'; it must be a list of functions"),
        (None, ["echo"], "the tool is 'echo'; a tool must be a function"),
        (None, [Tools], r"the tool Tools is <class .*; a tool must be a function"),
        (Undescribed, None, r"Undescribed\.step cannot be a tool: .*reset takes one argument named row"),
        ({"a": Steps, "b": type("Steps", (Steps,), {})}, None, "two classes named 'Steps', and so would their rewards"),
    ],
)
def test_factories_and_tools_that_cannot_be_used_are_refused_before_the_first_episode(factory, functions, problem):
    with pytest.raises(ConfigError, match=problem):
        environments(factory, functions)


def test_a_tool_may_be_called_step():
    assert names(environments(StepsOfTools).tools) == ["echo", "step"]


def test_a_factory_that_hangs_is_refused():
    over = threading.Event()
    with pytest.raises(ConfigError, match=r"environment_factory took longer than env\.timeout, 0\.05 s, to create"):
        environments(lambda: over.wait() and Tools(), timeout=0.05)
    over.set()


class Named(Tools):
    def reset(self, prompt, level=1): ...


class Seeded(Tools):
    def reset(self, seed, prompt): ...


class Nothing(Tools):
    def reset(self): ...


@pytest.mark.parametrize(
    ("factory", "columns"),
    [
        (Tools, []),
        (Tools, ["a"]),
        (Named, ["prompt"]),
        (Named, ["prompt", "level"]),
        (Seeded, ["prompt"]),
        (Seeded, ["prompt", "seed"]),
        (Nothing, []),
        (Steps, ["a"]),
    ],
)
def test_columns_that_reset_takes_pass(factory, columns):
    environments(factory).check_columns(columns)


@pytest.mark.parametrize(
    ("factory", "columns", "problem"),
    [
        (Named, [], r"reset\(prompt, level=1\) does not take no argument: missing a required argument: 'prompt'"),
        (Named, ["prompt", "answer"], "does not take answer, prompt: got an unexpected keyword argument 'answer'"),
        (Nothing, ["prompt"], "got an unexpected keyword argument 'prompt'"),
        (Seeded, [], "does not take seed: missing a required argument: 'prompt'"),
    ],
)
def test_columns_that_reset_does_not_take_are_refused(factory, columns, problem):
    with pytest.raises(ConfigError, match=f"environment_factory: .*{problem}.*by name, or "):
        environments(factory).check_columns(columns)


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("Words", "env.factory Words: it must be one of builtin:grid, builtin:calculator, 'pkg.module:name'"),
        ("builtin:chess", "env.factory builtin:chess: it must be one of builtin:grid"),
        ("nowhere.py:Words", "env.factory nowhere.py:Words: there is no environment file 'nowhere.py'"),
        ("no_such.module:Words", "the environment module 'no_such.module' cannot be imported: ModuleNotFoundError"),
        ("{file}:Word", "has no 'Word'; did you mean 'Words'?"),
        ("{file}:NUMBER", "NUMBER is 3; it must be a class, or a function that returns an environment"),
    ],
)
def test_a_setting_that_names_no_environment_is_refused(file, factory, problem):
    with pytest.raises(ConfigError) as raised:
        load(factory=factory.format(file=file))
    assert problem in str(raised.value)


def test_arguments_that_the_factory_does_not_take_are_refused(file):
    with pytest.raises(ConfigError, match=r"env\.factory .*my\.py:Words: kwargs has 'depth', which .* it takes level"):
        load(factory=f"{file}:Words", kwargs={"depth": 2})
    with pytest.raises(ConfigError, match=r"env\.kwargs is given, and this takes no arguments"):
        load(factory=f"{file}:BOTH", kwargs={"depth": 2})


def test_a_setting_that_names_no_tool_is_refused(file):
    with pytest.raises(ConfigError, match=r"tools\[1\]: .* has no 'serch'; did you mean 'search'\?"):
        load([f"{file}:search", f"{file}:serch"])
    with pytest.raises(ConfigError, match=r"tools\[0\]: there is no tool file 'nowhere\.py'"):
        load(["nowhere.py:search"])


def test_environments_and_tools_given_twice_are_refused(file):
    with pytest.raises(ConfigError, match=r"environment_factory and env\.factory are both given"):
        load_environments(EnvironmentConfig(factory="builtin:grid"), [], factory=Steps)
    with pytest.raises(ConfigError, match="tools are given as an argument and as a setting"):
        load_environments(EnvironmentConfig(), [f"{file}:search"], functions=[echo])


def test_no_code_names_the_environment_and_the_tools():
    def lines(**settings):
        return foreign_code(PPOConfig.from_dict({"reward": [{"function": "length"}], **settings}))

    assert lines(**{"env.factory": "a.py:A", "tools": ["b.py:b", "c:d"]}) == [
        "env.factory runs a.py:A",
        "tools[0] runs b.py:b",
        "tools[1] runs c:d",
    ]
    foreign = lines(**{"env.factory": "gymnasium:my_package:Maze-v0"})
    assert foreign == ["env.factory imports the module my_package"]
    for ours in ("builtin:grid", "gymnasium:Taxi-v4", "reasoning_gym:chain_sum", "openenv:http://localhost:8000"):
        assert lines(**{"env.factory": ours}) == []
