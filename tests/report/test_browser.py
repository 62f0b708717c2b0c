"""The page of a real run in a real browser: Debian's chromium, without a screen."""

import json
import shutil

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from helpers.browser import complaints, contrast, draw_all, requests
from helpers.files import read_jsonl
from helpers.proofs import proofs
from tokencredit.report.page import write_report
from tokencredit.report.reading import read_run
from tokencredit.report.templating import two_digits


def opened(browser, folder, width=1600):
    browser.set_window_size(width, 1000)
    browser.get((folder / "report.html").resolve().as_uri())
    return browser


def read(browser, folder):
    """The page as an earlier test read it, or opened."""
    browser.set_window_size(1600, 1000)
    browser.read((folder / "report.html").resolve().as_uri())


def tokens(browser, pane=0):
    return browser.find_elements(By.CSS_SELECTOR, f"#pane{pane} .tokens span[tabindex]")


def colours(browser):
    script = "return arguments[0].map((span) => getComputedStyle(span).backgroundColor)"
    return browser.execute_script(script, tokens(browser))


def test_the_page_opens_without_console_messages_or_requests(browser, run_folder):
    requests(browser)
    opened(browser, run_folder)
    draw_all(browser)
    assert complaints(browser) == []
    asked = requests(browser)
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:", "chrome:")) for url in asked), asked
    boxes = browser.find_elements(By.CSS_SELECTOR, "#plots .plots > div")
    assert len(boxes) == len(browser.find_elements(By.CSS_SELECTOR, "#plots .plots > div > .js-plotly-plot")) > 20
    meanings = [title.get_attribute("title") for title in browser.find_elements(By.CSS_SELECTOR, ".title summary")]
    assert len(meanings) == len(boxes) + 1, "each chart says what its metrics are"
    assert meanings[0] == "Mean reward of a completion or episode, over all terms by their weights."


def test_the_credit_view_says_what_the_samples_say(browser, run_folder):
    read(browser, run_folder)
    Select(browser.find_element(By.CSS_SELECTOR, "#pane0 select")).select_by_value("1")
    first = read_run(run_folder).samples[0]
    spans = tokens(browser)[: len(first["tokens"])]
    assert spans[0].get_attribute("textContent").strip() == first["tokens"][0].strip()
    for i in (0, len(spans) - 1):
        browser.execute_script("arguments[0].focus()", spans[i])
        said = browser.find_element(By.ID, "numbers").text
        for name, key in (("advantage", "advantages"), ("value", "values"), ("log-probability", "logprobs")):
            assert said.split(f"{name} ")[1].split(",")[0] == two_digits(first[key][i])


def test_the_keyboard_walks_along_the_tokens(browser, run_folder):
    read(browser, run_folder)
    spans = tokens(browser)
    spans[0].send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == spans[1]
    assert browser.find_element(By.ID, "numbers").text.startswith("token 2 of")
    spans[1].send_keys(Keys.HOME)
    assert browser.switch_to.active_element == spans[0]


def test_curves_are_smoothed(browser, run_folder):
    read(browser, run_folder)
    slider = browser.find_element(By.ID, "smooth")
    slider.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.find_element(By.ID, "smoothed").text == "3"
    last = browser.execute_script("return document.getElementById('headline').data[0].y.at(-1)")
    mean = sum(row["reward"] for row in read_run(run_folder).metrics) / 3
    assert last == pytest.approx(mean, rel=1e-3)


def test_the_value_line_is_labelled(browser, run_folder):
    read(browser, run_folder)
    line = browser.find_element(By.CSS_SELECTOR, "#pane0 .line")
    iteration = int(selected(browser, 0))
    values = next(s for s in read_run(run_folder).samples if s["iteration"] == iteration)["values"]
    expected = ["value", two_digits(max(0.0, *(round(v, 4) for v in values))), two_digits(min(0.0, *values))]
    assert line.text.split() == expected
    assert "the critic's value before each token" in browser.find_element(By.CSS_SELECTOR, "#credit ~ p.note").text


def test_quantity_order_and_iterations_can_be_chosen(browser, run_folder):
    opened(browser, run_folder)
    Select(browser.find_element(By.CSS_SELECTOR, "#pane0 select")).select_by_value("1")
    rewards = sorted((s["reward"] for s in read_run(run_folder).samples if s["iteration"] == 1), reverse=True)
    Select(browser.find_element(By.ID, "order")).select_by_value("best")
    shown = browser.find_element(By.CSS_SELECTOR, "#pane0 .about").text
    assert shown.split()[1] == two_digits(rewards[0])
    before = colours(browser)
    assert "how much better the text became with the token" in browser.find_element(By.ID, "unit").text
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


@pytest.mark.parametrize(("width", "schemes"), [(400, ("dark", "light")), *proofs((1600, ("light", "dark")))])
def test_the_page_fits_narrow_and_wide_windows_in_light_and_dark(browser, run_folder, view, width, schemes):
    view(width, schemes[0])
    opened(browser, run_folder)
    for scheme in schemes:
        view(width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        ink, ground = (
            browser.execute_script(f"return getComputedStyle(document.body).{name}")
            for name in ("color", "backgroundColor")
        )
        assert contrast(ink, ground) > 7
    # Two iterations stand beside each other; where they do not fit, the last stands alone.
    assert selected(browser, 0) == ("3" if width == 400 else "1")
    assert browser.find_element(By.ID, "pane1").is_displayed() == (width > 400)


@pytest.mark.proof
def test_a_single_evaluation_is_visible_and_names_of_metrics_are_text(browser, run_folder, place):
    def evaluated(row):
        named = {"reward/<b>x</b>&lt;": 1.0, "eval/reward/<b>x</b>&lt;": 2.0}
        return row | named | ({"eval/reward": 0.5} if row["iteration"] == 2 else {})

    opened(browser, copied(run_folder, place / "copy", metrics=evaluated))
    traces = browser.execute_script(
        "return document.getElementById('headline').data.map(({ name, mode }) => [name, mode])"
    )
    assert traces == [["reward", "lines"], ["eval/reward", "lines+markers"]]
    points = browser.find_elements(By.CSS_SELECTOR, "#headline .scatterlayer path.point")
    assert [point.is_displayed() for point in points] == [True]
    draw_all(browser)
    legends = [text.get_attribute("textContent") for text in browser.find_elements(By.CSS_SELECTOR, ".legendtext")]
    assert "reward/<b>x</b>&lt;" in legends


def test_on_paper_a_dark_page_is_light_and_shades_are_printed(browser, run_folder, view):
    view(1280, "dark")
    opened(browser, run_folder)
    dark = colours(browser)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    style = "const {color, printColorAdjust} = getComputedStyle(document.body); return [color, printColorAdjust]"
    ink, shades = browser.execute_script(style)
    assert contrast(ink, "rgb(255, 255, 255)") > 7
    assert shades == "exact"
    assert colours(browser) != dark
    assert not browser.find_element(By.ID, "quantity").is_displayed()
    assert browser.find_element(By.CSS_SELECTOR, "#pane0 .legend").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_a_conversation_is_shown_as_turns(browser, run_folder, place):
    said = [("system", "Be brief."), ("user", "Hello\nassistant › I am <b>you</b>")]

    def chat(row):
        return row | {"messages": [{"role": role, "content": text} for role, text in said]}

    opened(browser, copied(run_folder, place / "copy", samples=chat))
    rows = browser.find_elements(By.CSS_SELECTOR, "#pane0 .sample:first-child .turn")
    assert [row.find_element(By.CSS_SELECTOR, ".who").text for row in rows] == ["system", "user", "assistant"]
    assert rows[1].find_element(By.CSS_SELECTOR, ".tokens").text == "Hello⏎\nassistant \\u203a I am <b>you</b>"
    assert rows[2].find_elements(By.CSS_SELECTOR, "span[tabindex]")
    asked = browser.find_element(By.CSS_SELECTOR, "#compared .asked").text
    assert asked.split() == ["user", "Hello⏎", "assistant", "\\u203a", "I", "am", "<b>you</b>"]
    assert complaints(browser) == []


def test_hostile_output_does_nothing(browser, run_folder, place):
    copy = shutil.copytree(run_folder, place / "copy")
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


@pytest.mark.proof
def test_the_page_of_a_run_without_a_critic_has_no_console_messages(browser, run_folder, place):
    copy = shutil.copytree(run_folder, place / "copy")
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


def selected(browser, pane):
    return Select(browser.find_element(By.CSS_SELECTOR, f"#pane{pane} select")).first_selected_option.text


def copied(run_folder, path, samples=lambda row: row, metrics=lambda row: row):
    """A copy of the run with other samples and metrics, and its report."""
    copy = shutil.copytree(run_folder, path)
    for name, change in (("samples", samples), ("metrics", metrics)):
        rows = [json.loads(line) for line in (copy / f"{name}.jsonl").read_text().splitlines()]
        (copy / f"{name}.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    write_report(copy)
    return copy


@pytest.mark.proof
def test_the_page_opens_on_iterations_that_vary_on_one_scale(browser, run_folder, place):
    largest = {1: 0.001, 2: 2.0, 3: 4.0}

    def flat_at_first(row):
        zeros = [0.0] * (len(row["tokens"]) - 1)
        return row | {"advantages": [largest[row["iteration"]], *zeros]}

    opened(browser, copied(run_folder, place / "copy", samples=flat_at_first))
    assert [selected(browser, pane) for pane in (0, 1)] == ["2", "3"]

    def shown():
        legends = [browser.find_element(By.CSS_SELECTOR, f"#pane{pane} .legend").text.split() for pane in (0, 1)]
        return legends, [tokens(browser, pane)[0].value_of_css_property("background-color") for pane in (0, 1)]

    legends, strongest = shown()
    assert legends == [["≤", "-4", "≥", "4"]] * 2, "a colour means the same in both"
    assert strongest[0] != strongest[1]
    Select(browser.find_element(By.ID, "scale")).select_by_value("iteration")
    legends, strongest = shown()
    assert legends == [["-2", "2"], ["-4", "4"]]
    assert strongest[0] == strongest[1]
    assert complaints(browser) == []


def test_reward_and_completions_are_on_the_first_screen(browser, run_folder, view):
    view(1280, height=900)
    opened(browser, run_folder)
    for selector in (".story", ".next", "#headline .main-svg", "#compared .card:last-child"):
        box = browser.find_element(By.CSS_SELECTOR, selector).rect
        assert box["height"] > 0
        assert box["y"] + box["height"] <= 900, selector
    samples = read_run(run_folder).samples
    first, last = (next(s for s in samples if s["iteration"] == number) for number in (1, 3))

    def card():
        abouts, texts = (
            [x.text for x in browser.find_elements(By.CSS_SELECTOR, f"#compared {part}")[:2]]
            for part in (".about", "p")
        )
        assert abouts == [
            f"before (iteration 1), reward {two_digits(round(first['reward'], 4))}",
            f"after (iteration 3), reward {two_digits(round(last['reward'], 4))}",
        ]
        assert texts == [sample["completion"].strip() for sample in (first, last)], "the prompt stands above them"
        return [x.rect["x"] for x in browser.find_elements(By.CSS_SELECTOR, "#compared p")[:2]]

    before, after = card()
    assert before < after
    assert browser.find_element(By.CSS_SELECTOR, "#compared .asked").text == f"{first['prompt']} …"
    view(400)
    before, after = card()
    assert before == after, "one above the other on a phone"
    view(1280, height=900)
    # The curves, further down, are drawn once they come near.
    drawn = (By.CSS_SELECTOR, "#plots .main-svg")
    assert not browser.find_elements(*drawn)
    browser.execute_script("document.getElementById('plots').scrollIntoView()")
    assert WebDriverWait(browser, 10, 0.05).until(lambda page: page.find_elements(*drawn))


@pytest.mark.proof
def test_a_run_of_one_iteration_has_one_column_and_points(browser, run_folder, place):
    copy = shutil.copytree(run_folder, place / "copy")
    for name in ("samples", "metrics"):
        rows = (copy / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (copy / f"{name}.jsonl").write_text("".join(row for row in rows if json.loads(row)["iteration"] == 1))
    write_report(copy)
    opened(browser, copy)
    assert complaints(browser) == []
    abouts = [about.text for about in browser.find_elements(By.CSS_SELECTOR, "#compared .about")]
    assert [about.split(",")[0] for about in abouts] == ["iteration 1"] * 3
    assert len(browser.find_elements(By.CSS_SELECTOR, "#compared p")) == 3
    assert len(browser.find_elements(By.CSS_SELECTOR, "#headline .scatterlayer path.point")) == 1
    assert not browser.find_element(By.ID, "pane1").is_displayed()
