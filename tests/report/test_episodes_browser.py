"""Episodes of several turns on a page in a real browser."""

import json
import shutil

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from helpers.browser import complaints, contrast
from helpers.episodes import HOSTILE, episode, grid
from helpers.proofs import proofs
from tokencredit.report.page import write_report

CALLS = (
    ("assistant", ["<tool_call>", "search("], None, ["malformed", "timeout", "timeout"]),
    ("tool", ["error: ", "no closing bracket"]),
    ("user", ["line\n"] * 600),
    ("assistant", ["Bears", " live", " in", " Alaska", "."]),
)
ATTACK = (
    ("assistant", ["look"], 0.5),
    ("environment", [HOSTILE]),
    ("assistant", [HOSTILE], -0.5),
    ("environment", ["x" * 1_000_000]),
    ("assistant", ["end"], 0.0),
)


def written(run_folder, path, *rows, unit="token"):
    """A copy of the run whose samples are these episodes, with its report."""
    copy = shutil.copytree(run_folder, path)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("unit: token", f"unit: {unit}"))
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(copy).resolve().as_uri()


@pytest.fixture
def page(browser, run_folder, place):
    """A function that opens the page of a run whose samples are episodes."""

    def opened(*rows, width=1600, unit="token"):
        browser.set_window_size(width, 1000)
        browser.get(written(run_folder, place / "copy", *rows, unit=unit))
        return browser

    return opened


@pytest.fixture(scope="module")
def read(browser, run_folder, tmp_path_factory):
    """A function that opens one of two pages for tests that only read: `grid` and `calls`."""
    folder = tmp_path_factory.mktemp("episodes")
    called = episode(*CALLS, ending="max_turns", after="No more turns.", reward=0.25)
    pages = {name: written(run_folder, folder / name, row) for name, row in (("grid", grid()), ("calls", called))}

    def opened(name):
        browser.set_window_size(1600, 1000)
        browser.read(pages[name])
        return browser

    return opened


def all_of(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def texts(browser, selector):
    return [element.text for element in all_of(browser, selector)]


def test_it_shows_who_speaks_and_what_each_turn_was_credited(read):
    browser = read("grid")
    assert complaints(browser) == []
    assert texts(browser, "#pane0 .turn .who") == ["prompt", "assistant", "environment", "assistant", "end"]
    assert texts(browser, "#pane0 .turn .margin")[1:4] == ["credit -0.40\nreward 0", "", "credit +0.40\nreward 1"]
    assert texts(browser, "#pane0 .turn.ending .note") == ["the environment ended the episode"]
    assert texts(browser, "#pane0 .about span") == ["reward 1", "2 turns, 4 tokens"]
    assert len(all_of(browser, "#pane0 .line line.start")) == 1
    shown = " ".join(texts(browser, "#compared p")[0].split())
    assert texts(browser, "#compared .asked")[0] == "You are at the start."
    said = "assistant › go right environment › ⏎ A hole is near.⏎ assistant › down."
    assert shown == said


def test_observations_are_not_shaded_and_not_walked_through(read):
    browser = read("grid")
    spans = all_of(browser, "#pane0 .tokens span[tabindex]")
    assert [span.text.strip() for span in spans] == ["go", "right", "down", "."]
    assert all(span.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)" for span in spans)
    for observation in all_of(browser, "#pane0 .turn.observation .tokens"):
        assert observation.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
        assert observation.value_of_css_property("border-left-width") == "3px"
    spans[1].send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == spans[2]
    said = browser.find_element(By.ID, "numbers").text
    assert said.startswith("turn 2 of 2, token 3 of 4, “down”: advantage 0.10, value 0.60")


def test_other_estimators_credit_the_same_turns(read):
    browser = read("grid")
    assert complaints(browser) == []
    first = all_of(browser, "#alternatives .sample")[0]
    assert "mean 0.11, deviation 0.13" in first.text
    assert [credit.text for credit in first.find_elements(By.CLASS_NAME, "credit")] == ["credit +0.079", "credit +0.38"]


def test_problems_and_a_reward_at_the_end_are_named(read):
    browser = read("calls")
    assert texts(browser, "#pane0 .turn .who") == [
        *("prompt", "assistant", "tool", "user", "assistant", "after the end", "end"),
    ]
    assert texts(browser, "#pane0 .turn .problem") == ["a tool call could not be parsed", "a call timed out"]
    assert texts(browser, "#pane0 .turn .paid") == ["reward 0.25"]
    assert texts(browser, "#pane0 .turn.ending .note") == ["truncated: the last turn that env.max_turns allows"]
    assert complaints(browser) == []


def test_a_long_observation_is_folded(read):
    browser = read("calls")
    (fold,) = all_of(browser, "#pane0 details")
    assert fold.size["height"] < 200
    assert "3,000 characters" in fold.text
    fold.find_element(By.TAG_NAME, "summary").click()
    whole = fold.find_element(By.CLASS_NAME, "whole")
    assert whole.is_displayed()
    assert whole.size["height"] <= 320
    assert whole.text.count("line") == 400
    assert whole.text.endswith("… and 1,000 more characters")
    fold.find_element(By.TAG_NAME, "summary").click()  # closed, as others read it


@pytest.mark.proof
def test_the_scale_and_the_figures_are_of_acted_tokens(page):
    sample = grid()
    for name in ("advantages", "rewards", "values"):
        sample[name][3] = 50.0
    browser = page(sample)
    assert texts(browser, "#pane0 .legend span") == ["≤ -0.30", "≥ 0.30"]
    assert texts(browser, "#pane0 .line .ends span") == ["0.65", "0"]
    Select(browser.find_element(By.ID, "quantity")).select_by_value("reward")
    assert texts(browser, "#pane0 .legend span") == ["≤ -0.99", "≥ 0.99"]
    assert texts(browser, "#pane0 .turn .credit") == ["credit -0.40", "credit +0.40"], "whatever is shaded"


@pytest.mark.proof
def test_with_turns_as_steps_the_line_has_a_value_per_turn(page):
    browser = page(grid(), unit="turn")
    line = browser.find_element(By.CSS_SELECTOR, "#pane0 .line polyline").get_attribute("points")
    assert [point.split(",")[0] for point in line.split()] == ["0", "2"]
    spans = all_of(browser, "#pane0 .tokens span[tabindex]")
    for span, known in ((spans[0], True), (spans[1], False)):
        browser.execute_script("arguments[0].focus()", span)
        assert (" value " in browser.find_element(By.ID, "numbers").text) == known
    assert complaints(browser) == []


@pytest.mark.proof
def test_a_long_prompt_is_folded_behind_its_end(page):
    browser = page(grid(prompt="system: You have tools.\n" * 50 + "user: Where is the goal?\nassistant:"))
    (fold,) = all_of(browser, "#pane0 details")
    assert "user: Where is the goal?⏎\nassistant:" in fold.text
    assert fold.text.count("You have tools") == 2


@pytest.mark.parametrize(("width", "schemes"), [(400, ("dark", "light")), *proofs((1600, ("light", "dark")))])
def test_a_hostile_episode_does_nothing_and_fits(browser, page, view, width, schemes):
    view(width, schemes[0])
    page(episode(*ATTACK, ending="error", prompt=HOSTILE, after=HOSTILE), width=width)
    for scheme in schemes:
        view(width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert max(turn.size["height"] for turn in all_of(browser, "#pane0 .turn")) < 1000
        ground = browser.execute_script("return getComputedStyle(document.querySelector('.sample')).backgroundColor")
        for selector in (".turn.observation .tokens", ".turn .who", ".turn .credit"):
            assert contrast(all_of(browser, selector)[0].value_of_css_property("color"), ground) > 4.5
    assert complaints(browser) == []
    assert browser.title.startswith("copy")
    assert not all_of(browser, "img")
    assert len(all_of(browser, "body > main > section")) == 6
    body = browser.find_element(By.TAG_NAME, "body").text
    assert "</script><script>document.title" in body.replace("\n", "")
    assert not {"\u202e", "\u2066", "\x1b", "\x07"} & set(body)
    assert texts(browser, "#pane0 .turn .who").count("assistant") == 3
