"""The page of a look inside in a real browser: Debian's chromium, without a screen."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from helpers.browser import complaints, contrast, over, requests
from helpers.inspection import inspection
from helpers.proofs import proofs
from tokencredit.report.inspect_page import render
from tokencredit.report.templating import two_digits

SCRIPT = "<script>document.title='owned'</script>"
ODD = [SCRIPT, "\u202eشاهد", "\u200f", "long" * 500, "line\nline", "", "{{ 7 * 7 }}", "\ud800"]
"""Tokens that a page may stumble over."""


@pytest.fixture
def opened(browser, view, tmp_path):
    """A function that opens the page of an inspect.json."""

    def open_page(look, width=1280):
        view(width, height=900)
        (tmp_path / "inspect.html").write_text(render(look), encoding="utf-8")
        browser.get((tmp_path / "inspect.html").as_uri())
        return browser

    complaints(browser)  # of pages before
    return open_page


def found(browser, selector):
    return browser.find_elements(By.CSS_SELECTOR, selector)


def one(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def property_of(browser, name, elements):
    """A property of each element; one by one, Selenium would ask a thousand times."""
    return browser.execute_script("return arguments[0].map((element) => element[arguments[1]])", elements, name)


def colours(browser, elements):
    """CSS colours of their backgrounds: `rgb(…)` where opaque."""
    script = "return arguments[0].map((element) => getComputedStyle(element).backgroundColor)"
    return browser.execute_script(script, elements)


def test_the_page_opens_without_console_messages_or_requests(browser, opened):
    requests(browser)
    opened(inspection())
    assert complaints(browser) == []
    asked = requests(browser)
    assert asked
    assert all(url.startswith(("file:", "data:", "chrome:")) for url in asked), asked


def test_the_answer_is_on_the_first_screen(browser, opened):
    look = inspection([f" word{i}" for i in range(60)], prompt_length=50, asked=54, layers=12, heads=12)
    opened(look)
    rows = found(browser, ".answer tbody tr")
    assert [row.text.split(" head")[0].split(" mlp")[0] for row in rows] == [
        row["name"].split(" head")[0].split(" mlp")[0] for row in look["answer"]["top"]
    ]
    for element in (one(browser, ".verdict"), one(browser, ".answer .story"), one(browser, "mark"), *rows):
        box = element.rect
        assert box["height"] > 0
        assert box["y"] + box["height"] <= 900
    assert one(browser, ".verdict").text == look["answer"]["sentence"]
    assert one(browser, "mark").get_attribute("textContent") == " word54"
    passage = one(browser, "#passage").rect
    assert passage["y"] <= one(browser, "mark").rect["y"] <= passage["y"] + passage["height"]


def test_bars_have_the_length_of_their_numbers(browser, opened):
    look = inspection()
    opened(look)
    bars = found(browser, "section[aria-labelledby=attribution] tbody:not(.heads) .change")
    widths = [bar.rect["width"] for bar in bars]
    rows = [row for row in look["attribution"]["components"] if row["kind"] != "head" and row["name"][-4:] != "bias"]
    rows.append(look["attribution"]["components"][-1])  # the bias after the last layer
    sizes = [abs(row["difference"]) for row in rows]
    assert [width / max(widths) for width in widths] == pytest.approx([x / max(sizes) for x in sizes], abs=0.02)


@pytest.mark.parametrize("model", ["tuned", *proofs("base")])
def test_the_lens_says_what_the_file_says(browser, opened, model):
    look = inspection()
    opened(look)
    table = look["lens"][model]
    cells = found(browser, f"#lens-{model} td[role=gridcell]")
    assert property_of(browser, "textContent", cells) == [token for row in table["token"] for token in row]
    browser.execute_script("arguments[0].focus()", cells[-1])
    said = one(browser, "#lens-numbers").text
    assert said.startswith("layer 2, after “bad” (position 10 of 11): base says “")
    token, probability, rank = (table[key][-1][-1] for key in ("token", "probability", "rank"))
    numbers = f"and “.” with probability {two_digits(probability)}, rank {two_digits(rank)}"
    assert f"{model} says “{token.strip()}”, {numbers}" in said
    assert said.endswith(f"KL {two_digits(look['lens']['kl'][-1][-1])} nats")


def test_arrow_keys_walk_over_the_cells(browser, opened):
    opened(inspection())
    cells = found(browser, "#lens-tuned td[role=gridcell]")
    assert property_of(browser, "tabIndex", cells) == [0] + [-1] * (len(cells) - 1)
    cells[0].send_keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT)  # there is nothing to the left
    active = browser.switch_to.active_element
    assert active == cells[4]
    active.send_keys(Keys.END)
    assert browser.switch_to.active_element == cells[7]
    assert property_of(browser, "tabIndex", cells).count(0) == 1


@pytest.mark.proof
def test_position_and_shade_can_be_chosen(browser, opened):
    look = inspection()
    opened(look)
    select = Select(one(browser, "#position"))
    assert select.first_selected_option.text == "9: felt → bad"
    select.select_by_index(0)
    rows = [property_of(browser, "textContent", found(row, "th, td")) for row in found(browser, "#column tr")]
    lens = look["lens"]
    assert len(rows) == 4
    for i, row in enumerate(rows[1:]):
        base, tuned = (
            [lens[model]["token"][i][0], *(two_digits(lens[model][key][i][0]) for key in ("probability", "rank"))]
            for model in ("base", "tuned")
        )
        assert row == [lens["layers"][i], *base, *tuned, two_digits(lens["kl"][i][0])]
    cells = found(browser, "#lens-base td[role=gridcell]")
    shades = [colours(browser, cells)]
    for name in ("rank", "kl"):
        Select(one(browser, "#shade")).select_by_value(name)
        shades.append(colours(browser, cells))
    assert len(set(map(tuple, shades))) == 3
    assert set(shades[2][:4]) == {"rgba(230, 97, 1, 0)"}  # no KL before the first layer
    assert complaints(browser) == []


def test_heads_unfold_by_keyboard(browser, opened):
    opened(inspection())
    button = one(browser, "section[aria-labelledby=attribution] button")
    heads = one(browser, "#" + button.get_attribute("aria-controls"))
    assert not heads.is_displayed()
    button.send_keys(Keys.ENTER)
    assert heads.is_displayed()
    names = [name.text for name in heads.find_elements(By.TAG_NAME, "th")]
    assert names == ["layer 1 head 1", "layer 1 head 2", "layer 1 head 3", "layer 1 attention bias"]
    assert button.get_attribute("aria-expanded") == "true"
    button.send_keys(Keys.SPACE)
    assert not heads.is_displayed()


@pytest.mark.proof
def test_a_chosen_head_shows_its_attention(browser, opened):
    look = inspection()
    opened(look)
    heads = look["attention"]["heads"]
    changes = [sum(abs(a - b) for a, b in zip(head["base"], head["tuned"], strict=True)) for head in heads]
    most = heads[changes.index(max(changes))]
    assert one(browser, "#head").text.startswith(f"layer {most['layer']} head {most['head']}, from “felt”")
    cells = found(browser, "#heads td[role=gridcell]")
    assert len(cells) == len(heads)
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center' })", cells[0])
    cells[0].click()
    assert one(browser, "#head").text == "layer 1 head 1, from “felt”"
    assert f"changed by {two_digits(changes[0])}" in one(browser, "#attention-numbers").text
    spans = found(browser, "#head-tokens .strip:last-child span[tabindex]")
    assert property_of(browser, "textContent", spans) == look["tokens"][:7]
    browser.execute_script("arguments[0].focus()", spans[1])
    first = heads[0]
    before, after = two_digits(first["base"][1]), two_digits(first["tuned"][1])
    said = f"“film”: attention {before} in the base model, {after} in the tuned one"
    assert one(browser, "#attention-numbers").text == said
    alphas = [float(colour.split(",")[-1].strip(" )")) for colour in colours(browser, spans)]
    assert alphas.index(max(alphas)) == first["tuned"].index(max(first["tuned"]))


@pytest.mark.proof
def test_signs_have_colours_of_their_own(browser, opened):
    look = inspection()
    opened(look)
    cells = found(browser, "#values td[role=gridcell]")
    numbers = [x for row in look["critic"]["values"] for x in row]
    assert [cell.text for cell in cells] == [two_digits(x) for x in numbers]
    assert [colour.startswith("rgba(94, 60, 153") for colour in colours(browser, cells)] == [x < 0 for x in numbers]
    spans = found(browser, "#gradient .strip:first-child span[tabindex]")
    gradients = look["attention"]["input_gradient"]["base"]
    assert [colour.startswith("rgba(94, 60, 153") for colour in colours(browser, spans)] == [x < 0 for x in gradients]


def test_odd_tokens_stay_text(browser, opened):
    look = inspection([*ODD, " ok", " bad", "."], prompt_length=3, asked=6)
    look["question"]["up"] = look["question"]["down"] = ODD
    look["answer"]["sentence"] = look["critic"]["note"] = look["run"] = f"{SCRIPT}\u202e"
    opened(look)
    assert browser.title.startswith("<script>")
    assert len(found(browser, "script")) == 2  # data and program, and none of a token
    assert "<script>document.title" in one(browser, ".verdict").text
    assert "\u202e" not in browser.page_source
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1280
    for cell in found(browser, "#lens-base thead th"):
        assert cell.rect["width"] <= 150
    assert complaints(browser) == []


@pytest.mark.proof
def test_a_page_without_critic_and_attention_weights_has_no_console_messages(browser, opened):
    look = inspection(critic=False)
    look["attention"]["heads"] = []
    opened(look)
    assert complaints(browser) == []
    assert len(found(browser, "#gradient .strip")) == 2
    links = [link.get_attribute("href").split("#")[1] for link in found(browser, "nav a")]
    assert links == ["lens", "attribution", "patching", "attention", "weights", "moved"]
    assert all(found(browser, f"#{link}") for link in links)


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.proof)])
def test_the_page_fits_narrow_and_wide_windows_in_light_and_dark(browser, opened, view, width):
    opened(inspection([f" word{i}" for i in range(60)], 50, 54, layers=12, heads=12), width)
    for scheme in ("light", "dark"):
        view(width, scheme, height=900)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        (ground,) = colours(browser, found(browser, "body"))
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(19, 19, 24)"}[scheme]
        above = {"light": "rgba(230, 97, 1", "dark": "rgba(230, 120, 20"}[scheme]
        first = found(browser, "#lens-base td[role=gridcell]")[:13]
        assert all(colour.startswith(above) for colour in colours(browser, first))
        ink = one(browser, "#values td[role=gridcell]").value_of_css_property("color")
        shades = set(colours(browser, found(browser, "#values td[role=gridcell]")))
        assert min(contrast(ink, over(shade, ground)) for shade in shades) > 4.5
