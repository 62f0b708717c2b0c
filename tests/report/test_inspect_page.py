"""The page of a look inside, as HTML; test_inspect_browser.py opens it."""

import json
import math
import re
from html import unescape

import pytest

from helpers.inspection import inspection
from tokencredit.report.inspect_page import (
    LISTED,
    LONGEST,
    Scale,
    attribution,
    chance,
    listed,
    percent,
    ranking,
    render,
    short,
    text,
    views,
)
from tokencredit.report.templating import two_digits

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>\u202e\x1b[31m\ud800\n" + "long" * 100


def hostile(value):
    """The same with every text replaced, names of kinds and keys apart."""
    if isinstance(value, dict):
        return {key: entry if key == "kind" else hostile(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return list(map(hostile, value))
    return HOSTILE if isinstance(value, str) else value


def data_of(page):
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def texts_of(page):
    return unescape(re.sub(r"<[^>]*>", " ", page.split("<body>")[1].split("<script")[0]))


def test_a_bar_lies_between_zero_and_its_value():
    scale = Scale.of([-1.0, None, 3.0])
    assert scale == Scale(-1.0, 3.0)
    assert scale.bar(3.0) == "left: 25.00%; width: 75.00%"
    assert scale.bar(-0.5) == "left: 12.50%; width: 12.50%"
    assert scale.bar(None) == scale.bar(0.0) == "left: 25.00%; width: 0.00%"
    assert Scale.of([]) == Scale.of([0.0, None]) == Scale(0.0, 1.0)
    assert Scale.of([0.2, 0.5]).bar(0.2) == "left: 0.00%; width: 40.00%"


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.414, "41 %"), (0.0035, "0.35 %"), (0.0, "0 %"), (-1.2, "-120 %"), (25.0, "2,500 %"), (None, "none")],
)
def test_shares_are_in_percent(share, shown):
    assert percent(share) == shown


def test_log_odds_become_a_probability_of_any_size():
    assert chance(math.log(3)) == pytest.approx(0.75)
    assert chance(-math.log(3)) == pytest.approx(0.25)
    assert chance(-20.0) == pytest.approx(math.exp(-20), rel=1e-6)
    assert (chance(1e6), chance(-1e6)) == (1.0, 0.0)


def test_tokens_are_short_and_printable():
    assert short(" bad\n\u200f") == " bad\\n\\u200f"
    assert len(short("long" * 100)) == LONGEST
    assert listed([" bad", "bad", " sad"]) == "“bad”, “sad”"
    assert listed([f" {i}" for i in range(9)]).endswith("“5” and 3 more")


def test_the_passage_has_every_token_once():
    look = inspection()
    pieces = text(look)
    assert "".join(piece for piece, _ in pieces) == "".join(look["tokens"])
    assert [kind for _, kind in pieces] == ["prompt", "completion", "asked", "completion"]
    assert pieces[2][0] == " bad"


def test_heads_are_folded_under_their_attention():
    components = inspection(layers=2, heads=3)["attribution"]["components"]
    groups = attribution({"components": components})["groups"]
    assert [(row["name"], [head["name"] for head in heads]) for row, heads in groups] == [
        ("embedding", []),
        ("layer 1 attention", ["layer 1 head 1", "layer 1 head 2", "layer 1 head 3"]),
        ("layer 1 mlp", []),
        ("layer 2 attention", ["layer 2 head 1", "layer 2 head 2", "layer 2 head 3"]),
        ("layer 2 mlp", []),
        ("bias", []),
    ]


def test_a_ranking_begins_with_the_largest_of_either_sign():
    rows = [{"share": x} for x in (0.1, None, -0.9, 0.5, *[0.01] * LISTED)]
    ranked = ranking(rows, "share")
    assert [row["share"] for row in ranked["first"][:3]] == [-0.9, 0.5, 0.1]
    assert len(ranked["first"]) == LISTED
    assert ranked["rest"][-1]["share"] is None
    assert ranked["scale"] == Scale(-0.9, 0.5)


def test_the_page_says_the_numbers_of_the_file():
    look = inspection()
    words = texts_of(render(look))
    assert look["answer"]["sentence"] in words
    for row in look["answer"]["top"]:
        numbers = [percent(row["share"]), two_digits(row["base"]), two_digits(row["tuned"])]
        assert re.search(r"\s+".join(map(re.escape, [row["name"], *numbers])), words)
    for row in look["attribution"]["components"]:
        numbers = [two_digits(row[key]) for key in ("base", "tuned", "difference")]
        assert re.search(rf"{row['name']}(\s+3 heads)?\s+" + r"\s+".join(map(re.escape, numbers)), words)
    for row in look["patching"]["components"]:
        numbers = [percent(row["share"]), two_digits(row["patched"]), percent(row["ablated_share"])]
        assert re.search(r"\s+".join(map(re.escape, [row["name"], *numbers, two_digits(row["ablated"])])), words)


def test_missing_parts_are_left_out():
    whole = render(inspection())
    without = render(inspection(critic=False) | {"patching": None, "attention": None})
    for section in ("critic", "patching", "attention"):
        assert f'aria-labelledby="{section}"' in whole
        assert f'href="#{section}"' in whole
        assert f'aria-labelledby="{section}"' not in without
        assert f'href="#{section}"' not in without


def test_a_page_of_twelve_layers_and_heads_is_small():
    tokens = [f" word{i}" for i in range(60)]
    page = render(inspection(tokens, prompt_length=50, asked=55, layers=12, heads=12))
    assert len(page.encode()) < 3_000_000  # Plotly alone has more
    assert "146 more" in page  # of 144 heads and 12 MLPs, and of 26 modules below
    assert "16 more" in page


def test_the_data_is_that_of_the_file_with_short_tokens():
    look = inspection(["long" * 100, *["a"] * 10], prompt_length=3)
    data = views(look)
    assert data["tokens"] == [short("long" * 100), *["a"] * 10]
    assert data["lens"]["kl"] == look["lens"]["kl"]
    assert data["attention"] == look["attention"]


def test_hostile_texts_stay_texts():
    page = render(hostile(inspection()))
    assert page.count("<script") == 2
    assert "<img" not in page
    assert not {"\u202e", "\x1b", "\ud800"} & set(page)
    page.encode()
    assert data_of(page)["lens"]["base"]["token"][0][0].startswith("</script><img src=x")
