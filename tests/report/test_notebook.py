import json
import re
from html.parser import HTMLParser

import pytest

from helpers.episodes import HOSTILE, episode
from tokencredit.report.notebook import SHOWN, AuditRecord, Samples, read_run


class Reader(HTMLParser):
    """Tags, attributes and texts of a piece of HTML, whose tags are closed in order."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("br", "path", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "polyline", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def run(audited_folder):
    return read_run(audited_folder)


def test_texts_are_short(run, trainer):
    assert re.fullmatch(
        r"<Run .*: reward .* → .* \(.* ± .* at 95 %.*; in the last iteration\), 3 iterations>", repr(run)
    )
    assert repr(run.samples) == f"<12 completions of {run.path}>"
    assert re.fullmatch(r"<PPOTrainer .*: builtin:reviews, .* parameters, 3 of 3 iterations>", repr(trainer))


def test_a_run_shows_its_outcome_curves_diagnosis_and_trust(run):
    page = Reader(run._repr_html_())
    text = " ".join(page.texts)
    assert "builtin:reviews" in text
    assert "What to change" in text or "The checks find" in text
    assert "correlate" in text
    lines = [attrs["points"].split() for tag, attrs in page.tags if tag == "polyline"]
    assert [len(points) for points in lines] == [3, 3]  # reward and KL
    heights = [float(point.split(",")[1]) for point in lines[0]]
    rewards = [row["reward"] for row in run.metrics]
    assert sorted(range(3), key=lambda i: -heights[i]) == sorted(range(3), key=lambda i: rewards[i])


def test_tokens_are_shaded_by_their_advantages(run):
    sample = run.samples[0]
    tokens = [attrs for tag, attrs in Reader(sample._repr_html_()).tags if "title" in attrs]
    assert len(tokens) == len(sample["tokens"])
    for token, advantage in zip(tokens, sample["advantages"], strict=True):
        assert token["style"].startswith(f"background:rgb({'230 97 1' if advantage >= 0 else '94 60 153'} / ")
        assert token["title"].startswith("advantage ")
    shares = [float(re.search(r"/ ([\d.]+)", token["style"])[1]) for token in tokens]
    assert max(shares) <= 0.7


def test_of_many_completions_the_last_are_shown_and_slices_are_shown_too(run):
    assert len(run.samples) == 12
    html = run.samples._repr_html_()
    assert f"The last {SHOWN} of 12" in html
    assert html == run.samples[-20:]._repr_html_()
    assert html.count("reward ") > run.samples[-3:]._repr_html_().count("reward ")
    assert run.samples[:0]._repr_html_() == ""


def test_records_are_lists_and_dicts_as_before(run):
    assert isinstance(run.samples, list)
    assert json.loads(json.dumps(run.samples)) == [dict(sample) for sample in run.samples]
    assert json.loads(json.dumps(run.audit)) == run.audit


def test_an_audit_shows_its_verdict_and_tables(run):
    page = Reader(run.audit._repr_html_())
    assert "gae, λ = 0.95 (this run's)" in page.texts
    assert [tag for tag, _ in page.tags].count("table") == 2
    without = AuditRecord(run.audit | {"critic": None})
    assert [tag for tag, _ in Reader(without._repr_html_()).tags].count("table") == 1


def test_texts_of_a_model_are_no_html(run):
    sample = run.samples[0] | {"prompt": HOSTILE, "tokens": [HOSTILE for _ in run.samples[0]["tokens"]]}
    played = episode(("assistant", [HOSTILE], 0.0), ("environment", [HOSTILE]), ("assistant", ["down", "."], 1.0))
    for record in (sample, played):
        html = Samples(run, [record])._repr_html_()
        assert "&lt;script&gt;" in html
        assert "\x1b" not in html
        assert {tag for tag, _ in Reader(html).tags} == {"div", "p", "span"}
