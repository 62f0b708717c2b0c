import re
from importlib.util import find_spec

import pytest

from helpers.turns import said
from tokencredit.errors import ConfigError
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.text.turns.builtin.calculator import evaluate
from tokencredit.text.turns.builtin.reasoning_gym import AGAIN
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import Reply

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="needs reasoning-gym: pip install tokencredit[reasoning-gym]"
)


def begun(name="chain_sum", row=None, seeds=(7,), **kwargs):
    runs = load_environments(EnvironmentConfig(factory=f"reasoning_gym:{name}", kwargs=kwargs), [])
    episodes = runs.begin([row or {}] * len(seeds), list(seeds))
    return episodes, [episode.start() for episode in episodes]


def solution(question):
    return str(evaluate(re.search(r"problem: (.*) =", question).group(1)))


@pytest.mark.slow
def test_a_question_per_seed_and_the_verifiers_score():
    (first, second, other), prompts = begun(seeds=(7, 7, 8))
    assert prompts[0] == prompts[1] != prompts[2]
    assert prompts[0].endswith(" =\n")
    assert first.reply(said(solution(prompts[0]))) == Reply("", 1.0, "done")
    assert second.reply(said("I do not know")) == Reply("", 0.0, "done")
    assert other.reply(said(f"Thus <answer>{solution(prompts[2])}</answer>.")) == Reply("", 1.0, "done")


@pytest.mark.slow
def test_settings_are_the_data_sets():
    _, prompts = begun(min_terms=6, max_terms=6, min_digits=1, max_digits=1)
    assert len(re.findall(r"\d", prompts[0])) == 6


def test_the_question_is_appended_to_the_prompt():
    _, (text,) = begun(row={"prompt": "Be brief. "})
    assert text.startswith("Be brief. State")
    _, (messages,) = begun(
        row={"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Be brief. "}]}
    )
    assert messages[0] == {"role": "system", "content": "s"}
    assert messages[1] == {"role": "user", "content": text}


@pytest.mark.slow
def test_tries_pay_what_they_gain():
    (episode,), (prompt,) = begun(tries=3)
    assert episode.reply(said("0")) == Reply(AGAIN, 0.0)
    assert episode.reply(said(solution(prompt))) == Reply("", 1.0, "done")
    (episode,), _ = begun(tries=2)
    assert [episode.reply(said("0")).ending for _ in range(2)] == [None, "done"]
    (episode,), (prompt,) = begun("letter_counting", tries=2)
    assert episode.reply(said("x 1 x")).ending is None


def test_a_partial_score_stays_a_fraction():
    """Verifiers that give fractions: an answer of the wrong kind is worth a hundredth in some data sets."""
    (episode,), _ = begun("countdown", tries=2)
    first = episode.reply(said("1 + 1"))
    assert 0 < first.reward < 1
    assert episode.reply(said("1 + 1")) == Reply("", 0.0, "done")


def test_an_answer_that_a_verifier_does_not_read_scores_0():
    (episode,), _ = begun("prime_factorization")
    assert episode.reply(said("many apples")) == Reply("", 0.0, "done")


@pytest.mark.parametrize(
    ("name", "kwargs", "problem"),
    [
        (
            "chain_sums",
            {},
            r"reasoning_gym:chain_sums: there is no such data set; did you mean chain_sum\?",
        ),
        ("chain_sum", {"depth": 2}, "env.kwargs do not fit the data set: .*unexpected keyword argument 'depth'"),
        ("chain_sum", {"min_terms": -1}, "env.kwargs do not fit the data set: min_terms must be positive"),
        ("chain_sum", {"seed": 1}, "env.kwargs has seed; each episode's question comes from the run's seed"),
        ("chain_sum", {"tries": 0}, "env.kwargs.tries is 0; it must be a whole number, at least 1"),
    ],
)
def test_mistakes(name, kwargs, problem):
    with pytest.raises(ConfigError, match=problem):
        begun(name, **kwargs)
