import asyncio
import threading

import pytest

from helpers.turns import environments
from tokencredit.errors import ConfigError
from tokencredit.text.rewards import calls
from tokencredit.text.rewards.calls import NonFiniteScore, RewardError
from tokencredit.text.rewards.terms import score


class Paying:
    """Pays its row's number."""

    def reset(self, **row):
        self.pay = row["pay"]

    def get_reward(self):
        if isinstance(self.pay, Exception):
            raise self.pay
        return self.pay


class Later(Paying):
    async def get_reward(self):
        await asyncio.sleep(0)
        return super().get_reward()


class Free:
    """Pays nothing."""

    def reset(self, **row): ...


class Steps:
    """Pays by turn."""

    def reset(self, row):
        return "Go."

    def step(self, completion):
        return "", 1.0, True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(calls, "FIRST_BACKOFF", 0.0)


def scored(runs, rows, turn_rewards=None, lengths=None):
    begun = runs.begin([{"prompt": "Go."} | row for row in rows], [0] * len(rows))
    for episode in begun:
        episode.start()
    count = len(rows)
    columns = {
        "environments": [episode.environment for episode in begun],
        "turn_rewards": turn_rewards or [[(1, 0.0)]] * count,
    }
    terms = runs.terms()
    return score(terms, ["Go."] * count, [""] * count, columns, lengths or [1] * count)


@pytest.mark.parametrize("kind", [Paying, Later])
def test_get_reward_is_a_term_named_after_its_class(kind):
    runs = environments(kind)
    assert [(term.name, term.weight) for term in runs.terms()] == [(kind.__name__, 1.0)]
    result = scored(runs, [{"pay": 1}, {"pay": 0.5}, {"pay": None}])
    assert (result.totals, result.terms, result.of_texts) == ([1.0, 0.5, 0.0], {kind.__name__: [1.0, 0.5, None]}, True)


def test_rewards_of_turns_are_paid_at_their_last_tokens():
    result = scored(environments(Steps), [{}, {}], [[(2, 0.5), (3, 1.0)], [(1, -2.0)]], [5, 1])
    assert result.dense == [[0.0, 0.5, 0.0, 0.0, 1.0], [-2.0]]
    assert (result.terms, result.of_texts) == ({"Steps": [1.5, -2.0]}, False)


def test_each_class_pays_for_its_own_episodes():
    runs = environments({"paying": Paying, "later": Later, "free": Free, "steps": Steps, "again": Paying})
    rows = [{"environment": name, "pay": 2} for name in ("paying", "later", "free", "steps", "again")]
    result = scored(runs, rows, [[(1, 3.0)]] * 5)
    assert result.terms == {
        "Paying": [2.0, None, None, None, 2.0],
        "Later": [None, 2.0, None, None, None],
        "Steps": [None, None, None, 3.0, None],
    }, "a subclass is another class"
    assert environments(Free).terms() == []


@pytest.mark.parametrize("base", [Paying, Steps])
def test_a_class_that_a_factory_defines_anew_pays_each_time(base):
    def create():
        class Local(base): ...

        return Local()

    result = scored(environments(create), [{"pay": 2}] * 3, [[(1, 2.0)]] * 3)
    assert result.terms == {"Local": [2.0] * 3}


def test_a_factory_of_several_classes_is_refused():
    kinds = iter([Paying, Later])
    problem = "environment_factory gives a Later, and gave a Paying before; give one class, or a dict"
    with pytest.raises(ConfigError, match=problem):
        scored(environments(lambda: next(kinds)()), [{"pay": 2}] * 2)


def test_each_reward_is_asked_for_once_though_another_fails():
    asked = []

    class Counting(Paying):
        def get_reward(self):
            asked.append(self.pay)
            return super().get_reward()

    with pytest.raises(RewardError):
        scored(environments(Counting), [{"pay": 1}, {"pay": OSError("no judge")}])
    assert asked[0] == 1
    assert len(asked) == 2


def test_rewards_are_asked_for_at_the_same_time():
    barrier = threading.Barrier(4)

    class Meeting(Paying):
        def get_reward(self):
            return float(barrier.wait(60) >= 0)

    assert scored(environments(Meeting), [{"pay": 1}] * 4).totals == [1.0] * 4


@pytest.mark.parametrize("kind", [Paying, Later])
def test_a_reward_that_fails_names_its_class(kind):
    problem = rf"reward term '{kind.__name__}': get_reward raised OSError: no judge at .*test_own_reward\.py:\d+"
    with pytest.raises(RewardError, match=problem):
        scored(environments(kind), [{"pay": 1}, {"pay": OSError("no judge")}])
    with pytest.raises(RewardError, match=f"reward term '{kind.__name__}' returned 'good'"):
        scored(environments(kind), [{"pay": "good"}])
    with pytest.raises(NonFiniteScore, match=f"reward term '{kind.__name__}' is nan"):
        scored(environments(kind), [{"pay": float("nan")}])


def test_a_reward_that_hangs():
    over = threading.Event()

    class Hanging(Paying):
        def get_reward(self):
            over.wait()

    with pytest.raises(RewardError, match=r"'Hanging': get_reward exceeded the timeout of 0\.02 s; raise env\.timeout"):
        scored(environments(Hanging, timeout=0.02), [{"pay": 1}])
    over.set()


def test_the_columns_that_the_terms_need_are_those_of_episodes():
    for kind in (Paying, Steps):
        calls.check_columns(environments(kind).terms(), ["prompts", "completions", "environments", "turn_rewards"])
    with pytest.raises(ConfigError, match="the reward 'Paying' needs environments"):
        calls.check_columns(environments(Paying).terms(), ["prompts", "completions"])
