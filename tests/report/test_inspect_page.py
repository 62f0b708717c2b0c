"""The page of a look inside, as HTML; test_inspect_browser.py opens it."""

import json
import re
from html import unescape

import pytest

from helpers.inspection import inspection
from tokencredit.report.inspect_page import (
    COLUMNS,
    LISTED,
    LONGEST,
    Scale,
    attribution,
    listed,
    near,
    percent,
    ranking,
    render,
    short,
    spread,
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


def test_shares_of_other_completions_have_a_median_and_a_range():
    assert spread([0.5, None, -0.1, 0.2]) == "20 % (-10 to 50 %)"
    assert spread([None]) == spread([]) == "none"


def test_tokens_are_short_and_printable():
    assert short(" bad\n\u200f") == " bad\\n\\u200f"
    assert len(short("long" * 100)) == LONGEST
    assert listed([" bad", "bad", " sad"]) == "“bad”, “sad”"
    assert listed([f" {i}" for i in range(9)]).endswith("“5” and 3 more")


def test_the_passage_has_every_token_once():
    look = inspection()
    pieces = text(look)
    assert "".join(piece for piece, _ in pieces) == "".join(look["tokens"])
    assert pieces[1:] == [(" ending", "completion"), (" felt", "asked"), (" bad.", "completion")]
    last = inspection(asked=6)  # the prompt's last token
    assert text(last)[-2:] == [(" the", "asked"), (" ending felt bad.", "completion")]


def test_heads_and_biases_are_folded_under_their_attention():
    components = inspection(layers=2, heads=3)["attribution"]["components"]
    groups = attribution({"components": components})["groups"]
    parts = ["head 1", "head 2", "head 3", "attention bias"]
    assert [(row["name"], [part["name"] for part in folded]) for row, folded in groups] == [
        ("embedding", []),
        ("layer 1 attention", [f"layer 1 {part}" for part in parts]),
        ("layer 1 mlp", []),
        ("layer 2 attention", [f"layer 2 {part}" for part in parts]),
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
        numbers = [percent(row["share"]), two_digits(row["base"]), two_digits(row["tuned"]), "20 % (10 to 60 %)"]
        assert re.search(r"\s+".join(map(re.escape, [row["name"], *numbers])), words)
    for row in look["attribution"]["components"]:
        numbers = [two_digits(row[key]) for key in ("base", "tuned", "difference")]
        assert re.search(rf"{row['name']}(\s+4 parts)?\s+" + r"\s+".join(map(re.escape, numbers)), words)
    for row in look["patching"]["components"]:
        numbers = [percent(row["share"]), two_digits(row["patched"]), percent(row["ablated_share"])]
        assert re.search(r"\s+".join(map(re.escape, [row["name"], *numbers, two_digits(row["ablated"])])), words)


def test_a_run_without_a_critic_has_no_critic_on_the_page():
    for critic in (True, False):
        page = render(inspection(critic=critic))
        assert ('aria-labelledby="critic"' in page) is critic
        assert ('href="#critic"' in page) is critic


def test_a_score_is_said_if_it_is_known():
    look = inspection()
    assert "The completion's score was -0.70" in texts_of(render(look))
    look["critic"]["score"] = None
    assert "score" not in texts_of(render(look))


def test_a_model_without_attention_weights_has_the_gradient_alone():
    look = inspection()
    look["attention"]["heads"] = []
    page = render(look)
    assert "does not return its attention weights" in page
    assert 'id="heads"' not in page
    assert 'id="gradient"' in page


def test_a_page_of_twelve_layers_and_heads_is_small():
    tokens = [f" word{i}" for i in range(60)]
    page = render(inspection(tokens, prompt_length=50, asked=55, layers=12, heads=12))
    assert len(page.encode()) < 3_000_000  # Plotly alone has more
    assert "147 more" in page  # of 144 heads, 12 MLPs and the unembedding


def test_maps_of_a_long_text_keep_the_positions_around_the_question():
    tokens = [f" word{i}" for i in range(500)]
    look = inspection(tokens, prompt_length=200, asked=300)
    data, page = views(look), texts_of(render(look))
    for positions, ends in ((data["lens"]["positions"], (241, 361)), (data["critic"]["positions"], (241, 361))):
        assert positions == list(range(*ends))
    assert data["attention"]["to"] == list(range(200 - COLUMNS, 200))
    assert data["lens"]["kl"][1] == look["lens"]["kl"][1][241 - 199 : 361 - 199]
    assert data["lens"]["base"]["rank"][2] == look["lens"]["base"]["rank"][2][241 - 199 : 361 - 199]
    assert data["critic"]["final"] == look["critic"]["final"][241:361]
    assert data["attention"]["heads"][0]["tuned"] == look["attention"]["heads"][0]["tuned"][-COLUMNS:]
    assert f"The {COLUMNS} positions around the question" in page
    assert f"Only the last {COLUMNS} tokens of the prompt" in page


@pytest.mark.parametrize(("asked", "first"), [(0, 0), (70, 11), (499, 500 - COLUMNS)])
def test_positions_near_the_ends_fill_the_map_too(asked, first):
    assert list(range(500)[near(range(500), asked)]) == list(range(first, first + COLUMNS))


def test_the_data_is_that_of_the_file_with_short_tokens():
    look = inspection(["long" * 100, *["a"] * 10], prompt_length=3)
    data = views(look)
    assert data["tokens"] == [short("long" * 100), *["a"] * 10]
    assert data["lens"] == look["lens"] | {
        model: look["lens"][model] | {"token": [list(map(short, row)) for row in look["lens"][model]["token"]]}
        for model in ("base", "tuned")
    }
    assert data["attention"] == look["attention"]


def test_hostile_texts_stay_texts():
    page = render(hostile(inspection()))
    assert page.count("<script") == 2
    assert "<img" not in page
    assert not {"\u202e", "\x1b", "\ud800"} & set(page)
    page.encode()
    assert data_of(page)["lens"]["base"]["token"][0][0].startswith("</script><img src=x")
