import asyncio
import json
import math
import re
import runpy
import statistics
import sys
import threading
from ast import literal_eval
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2ForSequenceClassification

from tokencredit.commands.command_line import config_parser, to_config
from tokencredit.core.masked import moments
from tokencredit.errors import ConfigError
from tokencredit.settings.data import ClassifierTerm, FunctionTerm, RewardTerm
from tokencredit.settings.text import PPOConfig
from tokencredit.text.rewards.calls import RewardError
from tokencredit.text.rewards.ready_made import count, length
from tokencredit.text.rewards.terms import (
    NonFiniteScore,
    Term,
    as_terms,
    build_terms,
    load_function,
    score,
    term_metrics,
)
from tokencredit.text.rewards.texts import joined, plain

BUILTIN = "builtin:reviews"
PROMPTS = ["This movie was really", "This movie was really"]
COMPLETIONS = [" wonderful, and I loved every minute.", " awful. I hated the script, and the acting was worse."]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("tokencredit.text.rewards.calls.FIRST_BACKOFF", 0.0)


def rate(terms, prompts=PROMPTS, completions=COMPLETIONS, lengths=(2, 3), finite=True, **columns):
    return score(terms, prompts, completions, columns, lengths, finite=finite)


def gives(*values, name="given", weight=1.0):
    return Term(name, weight, lambda prompts, completions: list(values))


def test_plain_texts_of_messages():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answer = [{"role": "assistant", "content": "Hello"}]
    assert plain(chat) == "Be kind.\nHi"
    assert joined(chat, answer) == "Be kind.\nHi\nHello"
    assert joined("Be", " kind") == "Be kind"
    assert plain([{"role": "assistant", "content": None}]) == ""
    assert plain([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]) == "Hi"


# What cannot be loaded


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"classifier": BUILTIN, "label": "BAD"}, r"has no label 'BAD'; set label: one of NEGATIVE, POSITIVE"),
        ({"reward_model": BUILTIN}, r"'builtin:reviews' has 2 outputs, .* set it as classifier"),
        ({"function": "lenght"}, r"'lenght' is none of the ready-made ones, length, count, .*'path/file\.py:name'"),
        ({"function": "count"}, r"count needs text; give it in kwargs"),
        ({"function": "length", "kwargs": {"units": "words"}}, r"kwargs has 'units', which length does not take"),
        (
            {"function": "regex", "kwargs": {"pattern": "("}},
            r"pattern is '\(', which is not a valid regular expression",
        ),
        ({"function": "nowhere.py:f"}, r"there is no reward file 'nowhere\.py'"),
        ({"function": "no_such_package.rewards:f"}, r"'no_such_package\.rewards' cannot be imported: ModuleNotFound"),
        ({"function": "math:sqr"}, r"'math' has no 'sqr'; did you mean 'sqrt'\?"),
        ({"function": "math:pi"}, r"'pi' of 'math' is a float, not a function"),
    ],
)
def test_a_term_that_cannot_be_loaded_is_refused_by_its_key(term, message):
    with pytest.raises(ConfigError, match=r"^reward\[1\]:? .*" + message):
        build_terms([FunctionTerm(function="length"), RewardTerm.read(term)], "cpu")


def test_two_terms_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"reward\[1\]\.name is 'NEGATIVE', the name of another term"):
        build_terms([ClassifierTerm(classifier=BUILTIN), ClassifierTerm(classifier=BUILTIN, output="logit")], "cpu")


# Functions from files, modules and Python

FILE = """
from dataclasses import dataclass

@dataclass
class Settings:
    factor: float = 2.0

def shout(prompts, completions, factor=Settings().factor, **columns):
    return [factor * c.count("!") for c in completions]
"""


def test_functions_of_a_file(tmp_path):
    file = tmp_path / "math.py"  # hides no module of that name, and is hidden by none
    file.write_text(FILE)
    tripled = FunctionTerm(function=f"{file}:shout", kwargs={"factor": 3}, name="b")
    terms = build_terms([FunctionTerm(function=f"{file}:shout"), tripled], "cpu")
    assert [term.name for term in terms] == ["shout", "b"]
    assert rate(terms, ["", ""], ["oh!", "oh"]).terms == {"shout": [2.0, 0.0], "b": [3.0, 0.0]}
    assert rate(terms[1:], ["", ""], ["oh!", "oh"], factor=[7, 7]).totals == [3.0, 0.0]  # settings before columns
    with pytest.raises(ConfigError, match=r"math\.py' has no 'shoot'; did you mean 'shout'\?"):
        build_terms([FunctionTerm(function=f"{file}:shoot")], "cpu")


def test_a_function_of_a_module():
    (term,) = build_terms([FunctionTerm(function="json:dumps")], "cpu")
    assert (term.name, term.function) == ("dumps", json.dumps)


def test_reward_functions_of_python_become_terms():
    def mine(completions):
        return [1.0] * len(completions)

    terms = as_terms([mine, partial(rate_by, factor=2), count("."), Term("other", 0.5, model_free)])
    names = {"mine": 1.0, "rate_by": 1.0, "count": 1.0, "other": 0.5}
    assert [(term.name, term.weight) for term in terms] == list(names.items())


def test_a_reward_function_of_python_may_be_named_as_in_a_configuration(tmp_path):
    (tmp_path / "mine.py").write_text("def half(completions):\n    return [0.5 for _ in completions]\n")
    terms = as_terms(["repetition", f"{tmp_path}/mine.py:half"])
    assert [term.name for term in terms] == ["repetition", "half"]
    assert rate(terms[1:]).totals == [0.5, 0.5]
    with pytest.raises(ConfigError, match=r"reward_funcs\[0\]: regex needs pattern; give it in kwargs"):
        as_terms("regex")


def test_a_term_of_a_configuration_keeps_its_weight_in_python():
    (term,) = as_terms([FunctionTerm(function="repetition", weight=-2.0)])
    assert (term.name, term.weight) == ("repetition", -2.0)
    assert rate([term]).totals[0] <= 0.0


def rate_by(prompts, completions, factor, **columns):
    return [factor * 1.0 for _ in completions]


def model_free(prompts, completions):
    return [0.0 for _ in completions]


def test_other_objects_of_python_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"reward_funcs\[1\]: an object of type int is neither a function, nor"):
        as_terms([model_free, 3])
    with pytest.raises(ConfigError, match=r"reward_funcs\[1\]\.name is 'model_free'.*Term\(name, weight, function\)"):
        as_terms([model_free, model_free])
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(tokenizer), num_labels=1)
    with pytest.raises(ConfigError, match="no tokenizer for the reward model ''"):
        as_terms(GPT2ForSequenceClassification(config))


# What functions get and give


def test_terms_are_weighted_and_kept_apart():
    scores = rate([gives(1.0, 2.0, name="a", weight=2.0), gives(4, False, name="b", weight=-0.5)])
    assert scores.totals == [0.0, 4.0]
    assert scores.terms == {"a": [1.0, 2.0], "b": [4.0, 0.0]}
    assert scores.dense is None


def test_a_term_without_weight_does_not_decide_what_kind_of_scores_there_are():
    tokens = gives([1.0, 2.0], [0.0, 0.0, 1.0], name="tokens")
    assert not rate([tokens, gives(1.0, 2.0, weight=0.0)]).of_texts
    assert rate([tokens, gives(1.0, 2.0)]).of_texts


def test_functions_get_what_they_name():
    got = {}

    def everything(prompts, completions, **columns):
        got["everything"] = (prompts, completions, columns)
        return [0.0, 0.0]

    def named(completions, answer):
        got["named"] = (completions, answer)
        return [0.0, 0.0]

    def placed(p, c, answer=None):
        got["placed"] = (p, c, answer)
        return [0.0, 0.0]

    def by_position(prompts, completions, answer, n=1, /, **columns):
        got["by_position"] = (prompts, completions, answer, columns)
        return [0.0, 0.0]

    class Callable:
        def __call__(self, completions, missing="default"):
            got["callable"] = (completions, missing)
            return [0.0, 0.0]

    functions = {"everything": everything, "named": named, "placed": placed}
    functions |= {"by_position": by_position, "callable": Callable()}
    rate([Term(name, 1.0, function) for name, function in functions.items()], answer=["a", "b"])
    assert got == {
        "everything": (PROMPTS, COMPLETIONS, {"answer": ["a", "b"]}),
        "named": (COMPLETIONS, ["a", "b"]),
        "placed": (PROMPTS, COMPLETIONS, ["a", "b"]),
        "by_position": (PROMPTS, COMPLETIONS, ["a", "b"], {}),
        "callable": (COMPLETIONS, "default"),
    }


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(
        ConfigError, match=r"the reward 'f' needs answer; there are completions, label, prompts; others .*dataset"
    ):
        rate([Term("f", 1.0, lambda completions, answer: [0.0, 0.0])], label=[1, 2])
    with pytest.raises(ConfigError, match=r"the reward 'f' needs texts"):
        rate([Term("f", 1.0, lambda texts: [0.0, 0.0])])


def test_none_means_that_the_term_does_not_apply():
    scores = rate([gives(None, 2.0, name="a"), gives(1.0, 1.0, name="b", weight=0.5)])
    assert scores.totals == [0.5, 2.5]
    assert scores.terms["a"] == [None, 2.0]


def test_a_list_a_completion_is_a_reward_a_token():
    terms = [
        gives([1.0, 2.0], [0.0, 0.0, 5.0], name="a", weight=2.0),
        gives(torch.tensor([1.0, 1.0]), None, name="b"),
        gives(0.5, [1.0, 0.0, 0.0], name="mixed"),
    ]
    scores = rate(terms)
    assert scores.totals == [0.5, 0.0]
    assert scores.dense == [[3.0, 5.0], [1.0, 0.0, 10.0]]
    assert scores.terms == {"a": [3.0, 5.0], "b": [2.0, None], "mixed": [0.5, 1.0]}


def test_tensors_and_arrays_are_numbers_too():
    scores = rate([Term("t", 1.0, lambda completions: torch.tensor([1.0, 2.0]))])
    assert scores.totals == [1.0, 2.0]
    assert rate([gives(torch.tensor(1.0), torch.tensor(3).numpy())]).totals == [1.0, 3.0]
    column = torch.tensor([[1.0], [2.0]])
    for scores in (column, column.numpy()):
        assert rate([Term("t", 1.0, lambda completions, given=scores: given)]).totals == [1.0, 2.0], "as a model gives"


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_function_may_return_the_coroutine_of_another(timeout):
    async def judge(completions):
        await asyncio.sleep(0)
        return [float(len(completion)) for completion in completions]

    async def broken(completions):
        raise ValueError("no key")

    def decorated(function):
        return lambda *args, **columns: function(*args)

    async def slow(completions):
        await asyncio.sleep(0.01)
        return await judge(completions)

    if timeout is not None:
        timeout = math.inf  # as long as the platform waits
        assert rate([Term("f", 1.0, slow, timeout=timeout)]).totals == [float(len(c)) for c in COMPLETIONS]
    functions = (lambda completions, **columns: judge(completions), lambda completions: decorated(judge)(completions))
    for function in (*functions, partial(judge), partial(functions[0], style="short")):
        term = Term("f", 1.0, function, timeout=timeout)
        assert rate([term]).totals == [float(len(c)) for c in COMPLETIONS]
    with pytest.raises(RewardError, match="raised ValueError: no key"):
        rate([Term("f", 1.0, lambda completions: broken(completions), retries=0, timeout=timeout)])


def test_coroutine_functions_run_together():
    """Each waits for the other, so that one after the other would never end."""
    arrived = []

    def waiting(name):
        async def function(prompts, completions, **columns):
            arrived.append(name)
            while len(arrived) < 2:
                await asyncio.sleep(0.001)
            return [float(len(c)) for c in completions]

        return Term(name, 1.0, function)

    terms = [waiting("a"), Term("sync", 1.0, model_free), waiting("b")]
    expected = [2.0 * len(c) for c in COMPLETIONS]
    assert rate(terms).totals == expected

    async def in_a_notebook():
        return rate(terms).totals

    assert asyncio.run(in_a_notebook()) == expected


# What goes wrong


BROKEN = """import json, statistics


def helper(completion):
    return json.loads(completion)["score"]


def parsed(completions):
    return [helper(completion) for completion in completions]
"""


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_an_exception_is_located_in_user_code(timeout, tmp_path):
    """The json module raises; line 5 is the innermost of the user's."""
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    terms = build_terms([FunctionTerm(function=f"{file}:parsed", retries=0, timeout=timeout)], "cpu")
    with pytest.raises(RewardError, match=rf"JSONDecodeError: .* at {re.escape(str(file))}:5; its prompt was"):
        rate(terms)


def test_an_exception_without_user_code_has_no_place():
    count_words = Term("count", 1.0, partial(statistics.mean, []), retries=0)
    with pytest.raises(RewardError, match=r"raised \w+: [^/]*; its prompt was"):
        rate([count_words])


def test_an_exception_without_a_message():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def raising(completions):
        raise error

    for error in (Silent(), StopIteration()):
        with pytest.raises(RewardError, match=rf"^reward term 'silent' raised {type(error).__name__} at /[^ ]*;"):
            rate([Term("silent", 1.0, raising, retries=0)])


def test_a_failure_without_a_message_is_retried(monkeypatch):
    monkeypatch.setattr("tokencredit.text.rewards.calls.FIRST_BACKOFF", 0.01)
    tries = []

    def busy(completions):
        tries.append(1)
        if len(tries) < 2:
            raise ConnectionError
        return [1.0] * len(completions)

    rate([Term("busy", 1.0, busy)])
    assert len(tries) == 2


def test_a_function_without_a_signature_is_refused():
    with pytest.raises(ConfigError, match=r"^the reward 'max': no signature found .*; call it in a function of compl"):
        rate(as_terms(max))


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_function_that_exits_fails_its_call_and_not_the_process(timeout, tmp_path):
    def leaves(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match=r"^reward term 'leaves' called sys\.exit\(0\)$"):
        rate([Term("leaves", 1.0, leaves, retries=0, timeout=timeout)])
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match=r"leaves\.py' raised SystemExit: 3 at .*leaves\.py:1$"):
        build_terms([FunctionTerm(function=f"{tmp_path}/leaves.py:reward")], "cpu")


def test_rewards_whose_squares_float32_cannot_sum_are_not_finite():
    with pytest.raises(NonFiniteScore, match=r"^the weighted sum of the rewards reaches 2e\+15; .* within ±1e\+15$"):
        rate([gives(0.0, [1e14, -1e14, 0.0], weight=10.0)])
    with pytest.raises(NonFiniteScore, match=r"^reward term 'huge' is -1e\+20 for the text .*; it must lie within ±1e"):
        rate([gives(0.0, -1e20, name="huge")])
    total = torch.tensor(rate([gives(0.0, -1e15)]).totals)
    assert moments(total, torch.ones(2, dtype=torch.bool))[2].isfinite()


def test_a_function_that_raises_on_the_whole_only():
    def small(completions):
        if len(completions) > 1:
            raise ValueError("too many")
        return [0.0]

    with pytest.raises(
        RewardError,
        match=r"ValueError: too many at .* on a batch of 2 completions, but on none of them alone",
    ):
        rate([Term("small", 1.0, small)])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"reward term 'odd' returned 1 numbers for 2 completions"),
        (None, r"returned None for 2 completions; it must return a list"),
        ("ab", r"returned 'ab' for 2 completions; it must return a list"),
        (
            [1.0, "good"],
            r"reward term 'odd' returned 'good' for the text 'This movie was really awful.*it must be a number",
        ),
        ([[1.0, 2.0], [1.0]], r"'odd' gave a list of 1 for the 3 tokens of the text 'This movie was really awful"),
        ([[1.0, None], None], r"'odd' returned None for the text .*wonderful"),
    ],
)
def test_results_that_are_no_rewards(result, message):
    with pytest.raises(RewardError, match=message):
        rate([Term("odd", 1.0, lambda completions: result)])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_reward_that_is_not_finite_names_term_and_text(bad):
    with pytest.raises(NonFiniteScore, match=rf"reward term 'odd' is {bad} for the text .*hated"):
        rate([gives(0.5, bad, name="odd")])
    with pytest.raises(NonFiniteScore, match=rf"reward term 'odd' is {bad} for the text .*loved"):
        rate([gives([0.5, bad], None, name="odd")])


def test_a_whole_number_that_no_float_holds_is_infinite():
    with pytest.raises(NonFiniteScore, match=r"reward term 'odd' is inf for the text .*hated"):
        rate([gives(0.5, 10**400, name="odd")])


def test_scores_that_are_not_finite_can_be_returned():
    scores = rate([gives(0.5, math.inf, name="odd"), gives(1.0, 1.0, name="one", weight=2.0)], finite=False)
    assert scores.totals == [2.5, math.inf]


# Statistics


def test_statistics_by_hand():
    """b is 2a + 1 where both apply. With c it shares three completions: deviations −8/3, −2/3, 10/3 and 1, −1, 0."""
    terms = {"a": [1.0, 2.0, 6.0, None], "b": [3.0, 5.0, None, 9.0], "c": [2.0, 0.0, 1.0, 1.0], "k": [0.1] * 4}
    metrics = term_metrics(terms, lambda x: x)
    expected = {
        "reward/a": 3.0,
        "reward_std/a": math.sqrt((4 + 1 + 9) / 3),
        "reward/b": 17 / 3,
        "reward_std/c": math.sqrt(0.5),
        "reward_std/k": 0.0,
        "reward_corr/a/b": 1.0,
        "reward_corr/b/c": -2 / math.sqrt(168 / 9 * 2),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert math.isnan(metrics["reward_corr/a/k"])
    assert len(metrics) == 4 + 4 + 6


@pytest.mark.parametrize("count", [7, 8, 31])
@pytest.mark.parametrize("score", [0.3, 1 / 3, 100.7, 98765.43])
def test_a_constant_term_has_no_deviation_however_its_mean_is_rounded(score, count):
    assert term_metrics({"a": [score] * count}, lambda x: x)["reward_std/a"] == 0


def test_statistics_of_two_processes_are_those_of_one():
    torch.manual_seed(0)
    a, b = torch.randn(20).tolist(), torch.randn(20).tolist()
    b[3] = a[15] = None
    whole = term_metrics({"a": a, "b": b}, lambda x: x)
    sums = []

    def record(x):
        sums.append(x)
        return x

    halves = [{"a": a[:8], "b": b[:8]}, {"a": a[8:], "b": b[8:]}]
    for half in halves:
        term_metrics(half, record)
    first = sums[0] + sums[2]  # the second pass needs the means of the whole, so it is asked for again with them

    def both(half, second=None):
        seen = []

        def reduce(x):
            seen.append(x)
            return first if len(seen) == 1 else (x if second is None else second)

        return term_metrics(half, reduce), seen[1]

    second = sum(both(half)[1] for half in halves)
    for half in halves:
        assert both(half, second)[0] == pytest.approx(whole, abs=1e-6)


def test_a_term_that_never_applies_has_no_statistics():
    metrics = term_metrics({"a": [None, None], "b": [1.0, 3.0]}, lambda x: x)
    assert math.isnan(metrics["reward/a"])
    assert math.isnan(metrics["reward_corr/a/b"])
    assert metrics["reward/b"] == 2.0


# From the command line and from files


def test_terms_from_yaml_and_from_flags(tmp_path):
    parser = config_parser(PPOConfig)
    file = tmp_path / "run.yaml"
    terms = [{"function": "count", "kwargs": {"text": "."}, "weight": 0.1}, {"classifier": BUILTIN, "output": "logit"}]
    file.write_text(yaml.safe_dump({"reward": terms}))
    config = to_config(parser.read(["--config", str(file)]), PPOConfig)
    assert config.reward == [RewardTerm.read(term) for term in terms]
    flag = "[{function: length, weight: 0.1, retries: 5, timeout: 1.5}, {function: distinct, kwargs: {n: 3}}]"
    built = build_terms(to_config(parser.read(["--reward", flag]), PPOConfig).reward, "cpu")
    assert [(term.retries, term.timeout) for term in built] == [(5, 1.5), (2, None)]
    scores = rate(built)
    assert scores.terms == {"length": [6.0, 10.0], "distinct": [1.0, 1.0]}
    assert scores.totals == pytest.approx([1.6, 2.0])


def test_a_ready_made_function_mistakes_no_column_for_a_setting():
    """A ready-made function's settings are its own, whatever the data set's columns are called."""
    assert rate([Term("length", 1.0, length())], unit=["x", "y"]).totals == [6.0, 10.0]


def test_the_example_of_the_docs(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "as_terms" in block)
    (tmp_path / "example.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "example.py"))
    claims = re.findall(r"^scores\.(\w+) +# (.+)$", code, re.MULTILINE)
    assert len(claims) == 2
    for name, value in claims:
        assert getattr(names["scores"], name) == literal_eval(value)


def test_a_function_that_changes_its_arguments_changes_them_for_itself():
    tries = []

    def changing(completions, **columns):
        completions[0][0]["content"] = "changed"
        completions.pop()
        columns["rows"][0].append(3)
        tries.append(len(completions))
        if len(tries) == 1:
            raise OSError("not yet")
        return [1.0, 1.0]

    def reading(completions, **columns):
        return [float(len(completions[0][0]["content"])), float(len(columns["rows"][0]))]

    messages = [[{"role": "assistant", "content": "ab"}], [{"role": "assistant", "content": "c"}]]
    terms = [Term("changing", 1.0, changing, retries=1), Term("reading", 1.0, reading)]
    found = score(terms, [messages[0]] * 2, messages, {"rows": [[1, 2], []]}, [1, 1])
    assert tries == [1, 1]
    assert found.terms["reading"] == [2.0, 2.0]


CARELESS = """
import os
import torch


def change():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    os.chdir("/")


def reward(completions, **columns):
    change()
    return [1.0] * len(completions)


async def judge(completions, **columns):
    return reward(completions)
"""


@pytest.mark.parametrize("changes", ["reward", "judge", "when it is loaded"])
@pytest.mark.parametrize("timeout", [None, 10.0])
def test_state_that_a_reward_changes_is_restored(changes, timeout, tmp_path):
    (tmp_path / "mine.py").write_text(CARELESS if changes in CARELESS else f"{CARELESS}\nchange()\n")

    def state():
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), Path.cwd()

    before = state()
    name = changes if changes in CARELESS else "reward"
    function = load_function(f"{tmp_path}/mine.py:{name}", {})
    assert state() == before
    assert score([Term("careless", 1.0, function, timeout=timeout)], ["a"], ["b"], {}, [1]).totals == [1.0]
    assert state() == before


def test_a_reward_is_called_from_a_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert score([Term("one", 1.0, lambda completions, **_: [1.0])], ["a"], ["b"], {}, [1]).totals == [1.0]


def test_a_call_in_another_thread_does_not_move_the_process(tmp_path, monkeypatch):
    def moving(completions, **columns):
        monkeypatch.chdir(tmp_path)  # as another thread would meanwhile
        return [1.0]

    thread = threading.Thread(target=score, args=([Term("moving", 1.0, moving)], ["a"], ["b"], {}, [1]))
    thread.start()
    thread.join()
    assert Path.cwd() == tmp_path


def test_a_reward_file_may_spawn_processes(tmp_path):
    (tmp_path / "pooled.py").write_text(
        "import multiprocessing\n\n\ndef size(text):\n    return float(len(text))\n\n\n"
        "def judge(completions, **columns):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map(size, completions)\n"
    )
    function = load_function(f"{tmp_path / 'pooled.py'}:judge", {})
    assert score([Term("judge", 1.0, function, retries=0, timeout=60)], ["a"], ["bcd"], {}, [1]).totals == [3.0]
