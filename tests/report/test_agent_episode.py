"""An agent's episode on its page."""

import base64
import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from helpers.browser import complaints, requests
from helpers.configs import control_config
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.errors import ConfigError
from tokencredit.report.agent_episode import STEPS, read_episode, view
from tokencredit.report.page import write_report
from tokencredit.report.reading import read_run
from tokencredit.settings.control import EnvConfig

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(9)).decode()
EPISODE = {"iteration": 3, "greedy": True, "terminated": False, "return": 2.5, "length": 1500}
EPISODE |= {"actions": [1, [0.25, -1]], "rewards": [1.0, None], "values": [0.5, 0.25], "advantages": [2.0, -1.0]}
EPISODE |= {"frames": [{"step": 0, "png": PNG}]}


def written(folder, **changes):
    file = folder / "episode.json"
    file.write_text(json.dumps(EPISODE | changes))
    return file


def test_it_is_told_in_words_with_actions_of_any_form(tmp_path):
    found = view(read_episode(written(tmp_path)))
    assert found["about"] == (
        "Played after iteration 3 with the most likely actions: return 2.50 in 1,500 steps, ended by a time limit. "
        "The first 2 are shown."
    )
    assert (found["actions"], found["marks"]) == (["1", "(0.25, -1)"], ["1", "·"])
    assert found["frames"] == [{"step": 0, "src": f"data:image/png;base64,{PNG}"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": [json.loads("[" * 600 + "]" * 600), 1]}, r"actions\[0\] is not a number or a list of numbers"),
        ({"actions": ["<b>", 1]}, r"actions\[0\] is not a number or a list of numbers"),
        ({"frames": [{"step": 0, "png": "x' onerror='alert(1)"}]}, r"frames\[0\]\.png is not a PNG file in base64"),
        ({"frames": [{"step": 1501, "png": PNG}]}, "a frame is of a step after the end"),
        ({"rewards": [1.0]}, f"its lists must have one length, from 1 to {STEPS}"),
        ({"greedy": 1}, "greedy is not true or false"),
    ],
)
def test_a_file_of_another_form_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_episode(written(tmp_path, **changes))


@pytest.mark.slow
def test_squares_pictures_and_numbers_follow_the_chosen_step(browser, place):
    ControlTrainer(control_config(place / "run", 1, env=EnvConfig(kwargs={"max_episode_steps": 12}))).train()
    episode = read_run(place / "run").episode
    browser.set_window_size(1600, 1000)
    requests(browser)
    browser.get(write_report(place / "run").resolve().as_uri())
    assert complaints(browser) == []
    assert all(url.startswith(("file:", "data:", "blob:", "chrome:")) for url in requests(browser))
    squares = browser.find_elements(By.CSS_SELECTOR, "#steps span")
    assert [square.text for square in squares] == [str(action) for action in episode["actions"]]
    browser.execute_script("arguments[0].focus()", squares[0])
    squares[0].send_keys(Keys.ARROW_RIGHT)
    numbers = browser.find_element(By.ID, "step").text
    assert numbers.startswith(f"step 2 of {len(squares)}: action {episode['actions'][1]}, advantage ")
    assert numbers.endswith(", reward 1")
    pictures = browser.find_elements(By.CSS_SELECTOR, "#film button")
    assert [picture.get_attribute("class") for picture in pictures[:3]] == ["", "now", ""]
    assert pictures[-1].text == "the end"
    width = "return arguments[0].querySelector('img').naturalWidth"
    assert all(browser.execute_script(width, picture) > 100 for picture in pictures)
    pictures[-1].click()
    assert browser.find_element(By.ID, "step").text.startswith(f"step {len(squares)} of ")
    charts = browser.find_elements(By.CSS_SELECTOR, "#step-charts .js-plotly-plot")
    assert len(charts) == 3
