"""The page of a real run in a real browser: Debian's chromium, without a screen."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from helpers.browser import complaints, requests
from helpers.files import read_jsonl
from tokencredit.report.page import write_report
from tokencredit.report.reading import read_run


def opened(browser, folder, width=1600):
    browser.set_window_size(width, 1000)
    browser.get((folder / "report.html").resolve().as_uri())
    return browser


def tokens(browser, pane=0):
    return browser.find_elements(By.CSS_SELECTOR, f"#pane{pane} .tokens span[tabindex]")


def colours(browser):
    return [span.value_of_css_property("background-color") for span in tokens(browser)]


def test_it_opens_without_a_word_and_without_the_network(browser, run_folder):
    requests(browser)
    opened(browser, run_folder)
    assert complaints(browser) == []
    asked = requests(browser)
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:", "chrome:")) for url in asked), asked
    assert browser.find_elements(By.CSS_SELECTOR, "#plots .main-svg")


def test_the_credit_view_says_what_the_samples_say(browser, run_folder):
    opened(browser, run_folder)
    first = read_run(run_folder).samples[0]
    spans = tokens(browser)[: len(first["tokens"])]
    assert spans[0].get_attribute("textContent").strip() == first["tokens"][0].strip()
    for i in (0, len(spans) - 1):
        browser.execute_script("arguments[0].focus()", spans[i])
        said = browser.find_element(By.ID, "numbers").text
        for name, key in (("advantage", "advantages"), ("value", "values"), ("log-probability", "logprobs")):
            number = float(said.split(f"{name} ")[1].split(",")[0])
            assert number == pytest.approx(first[key][i], abs=1e-3)


def test_the_keyboard_walks_along_the_tokens(browser, run_folder):
    opened(browser, run_folder)
    spans = tokens(browser)
    spans[0].send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == spans[1]
    assert browser.find_element(By.ID, "numbers").text.startswith("token 2 of")
    spans[1].send_keys(Keys.HOME)
    assert browser.switch_to.active_element == spans[0]


def test_quantity_order_and_iterations_can_be_chosen(browser, run_folder):
    opened(browser, run_folder)
    rewards = sorted((s["reward"] for s in read_run(run_folder).samples if s["iteration"] == 1), reverse=True)
    Select(browser.find_element(By.ID, "order")).select_by_value("best")
    shown = browser.find_element(By.CSS_SELECTOR, "#pane0 .about").text
    assert float(shown.split()[1]) == pytest.approx(rewards[0], abs=1e-3)
    before = colours(browser)
    Select(browser.find_element(By.ID, "quantity")).select_by_value("ratio after the update")
    assert "around 1" in browser.find_element(By.ID, "unit").text
    Select(browser.find_element(By.ID, "quantity")).select_by_value("log-probability")
    assert colours(browser) != before
    Select(browser.find_element(By.CSS_SELECTOR, "#pane1 select")).select_by_value("2")
    browser.find_element(By.ID, "both").click()
    assert not browser.find_element(By.ID, "pane1").is_displayed()
    Select(browser.find_element(By.ID, "if-iteration")).select_by_value("1")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#alternatives .sample")) == 6
    assert complaints(browser) == []


def test_curves_are_smoothed(browser, run_folder):
    opened(browser, run_folder)
    slider = browser.find_element(By.ID, "smooth")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.find_element(By.ID, "smoothed").text == "3"
    last = browser.execute_script("return document.querySelector('#plots > div').data[0].y.at(-1)")
    mean = sum(row["reward"] for row in read_run(run_folder).metrics) / 3
    assert last == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_in_light_and_dark(browser, run_folder, width, scheme):
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened(browser, run_folder)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    ink, ground = (
        browser.execute_script(f"return getComputedStyle(document.body).{name}")
        for name in ("color", "backgroundColor")
    )
    assert contrast(ink, ground) > 7
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(one, other):
    """WCAG's contrast ratio."""

    def luminance(colour):
        parts = [int(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_names_of_metrics_are_text_in_plots_too(browser, run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    rows = [json.loads(line) | {"reward/<b>x</b>&lt;": 1.0} for line in (copy / "metrics.jsonl").open()]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(copy)
    opened(browser, copy)
    legends = [text.get_attribute("textContent") for text in browser.find_elements(By.CSS_SELECTOR, ".legendtext")]
    assert "reward/<b>x</b>&lt;" in legends


def test_hostile_output_does_nothing(browser, run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    hostile = "</script><img src=x onerror=\"document.title='owned'\">\u202e\x1b[31m\ud800"
    rows = read_jsonl(copy / "samples.jsonl")
    for row in rows:
        row["prompt"] = row["completion"] = row["tokens"][0] = hostile
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(copy)
    opened(browser, copy)
    assert browser.title.startswith("copy")
    assert not browser.find_elements(By.CSS_SELECTOR, "img[src='x']")
    assert "</script><img" in tokens(browser)[0].text
    assert "\u202e" not in browser.find_element(By.TAG_NAME, "body").text
    assert complaints(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), (None, "1 skipped")])
def test_a_missing_browser_fails_in_ci_and_is_skipped_elsewhere(tmp_path, ci, outcome):
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"PATH": str(tmp_path)}
    if ci is not None:
        environment["CI"] = ci
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "test_curves_are_smoothed", __file__]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == (1 if ci else 0), ended.stdout + ended.stderr
    assert outcome in ended.stdout
    assert "apt-get install chromium chromium-driver" in ended.stdout


def test_a_run_without_a_critic_opens_without_a_word(browser, run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    rows = read_jsonl(copy / "samples.jsonl")
    for row in rows:
        del row["values"]
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(copy)
    opened(browser, copy)
    assert complaints(browser) == []
    assert len(browser.find_elements(By.CSS_SELECTOR, "#alternatives .sample")) == 1
    assert not browser.find_elements(By.CSS_SELECTOR, "#pane0 svg")
    quantities = [option.text for option in Select(browser.find_element(By.ID, "quantity")).options]
    assert "value" not in quantities
    assert len(tokens(browser)) > 0
