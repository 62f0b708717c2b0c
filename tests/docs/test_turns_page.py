"""docs/turns.md: its classes play, its settings are real, its tables are those of the code."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from helpers.docs import table_rows
from helpers.turns import called, said, texts
from tokencredit import PPOConfig
from tokencredit.text.turns.environments import load_environments
from tokencredit.text.turns.protocols.episode import TERMINATED, Ending, Problem

PAGE = (Path(__file__).parents[2] / "docs" / "turns.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def section(heading):
    return next(part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(heading))


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The page's files in the current folder."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        if name:
            (tmp_path / name.group(1)).write_text(code)
    monkeypatch.chdir(tmp_path)


def load(key):
    """Environments of the page's settings that hold this text."""
    settings = yaml.safe_load(next(block for block in blocks("yaml") if key in block))
    config = PPOConfig.from_dict(settings)
    return load_environments(config.env, config.tools)


def test_the_shop_of_the_page_plays(in_folder):
    runs = load("Shop")
    row = {
        "prompt": [{"role": "user", "content": "You are in a shop."}],
        "stock": {"tea": 1, "salt": 2},
        "wanted": "tea",
    }
    runs.check_columns(list(row))
    (episode,) = runs.begin([row], [1])
    assert episode.start()[0]["content"] == "You are in a shop.\nBuy one tea."
    reply = episode.reply(called(("look", {}), ("price", {"name": "tea"}), ("buy", {"name": "tea", "count": 2})))
    assert texts(reply) == ["tea: 1, salt: 2", "2.5", "error: buy raised ValueError: there are not 2 of tea"]
    assert texts(episode.reply(called(("buy", {"name": "tea"})))) == ["bought 1 tea"]
    assert episode.reply(said("Here it is.")).ending == "answer"
    (term,) = runs.terms()
    assert (term.name, term.function([episode.environment])) == ("Shop", [1.0])


def test_the_guessing_game_of_the_page_plays(in_folder):
    (episode,) = load("Guess").begin([{}], [3])
    assert episode.start() == "Guess a number from 1 to 9.\nGuess:"
    number = episode.environment.number
    assert episode.reply(said(" no idea")).observation == "\nThe number is higher.\nGuess:"
    if number < 9:
        assert episode.reply(said(" 9")).observation == "\nThe number is lower.\nGuess:"
    reply = episode.reply(said(f" {number}\n"))
    assert (reply.reward, reply.ending) == (1.0, "done")


@pytest.mark.parametrize("block", blocks("yaml"))
def test_settings_are_real(block):
    assert PPOConfig.from_dict(yaml.safe_load(block)).several_turns()


def test_the_endings_are_those_of_the_code():
    rows = {row[0].strip("`"): row[2] for row in table_rows(section("How an episode ends"))[1:]}
    assert list(rows) == list(get_args(Ending))
    assert [name for name, kind in rows.items() if kind.startswith("terminated")] == list(TERMINATED)


def test_the_problems_are_those_of_the_code():
    assert re.findall(r"`env/(\w+)`", section("When user code fails")) == list(get_args(Problem))
