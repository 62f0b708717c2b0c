from typing import get_args

import pytest

from helpers.episodes import HOSTILE, episode, grid
from tokencredit.runs.jsonl import ENDINGS, PROBLEMS
from tokencredit.runs.transcript import acted, transcript, written
from tokencredit.text.turns.protocols import episode as terms


def texts(sample, **options):
    return [line.text for line in transcript(sample, **options)]


def test_endings_and_problems_are_those_of_episodes():
    assert set(ENDINGS) == set(get_args(terms.Ending))
    assert set(PROBLEMS) == set(get_args(terms.Problem))


def test_observations_are_left_out_of_every_list():
    sample = grid()
    kept = acted(sample)
    assert kept["tokens"] == ["go", " right", "down", "."]
    assert kept["advantages"] == pytest.approx([-0.3, -0.1, 0.1, 0.3])
    assert kept["rewards"] == pytest.approx([-0.01, -0.011, -0.012, 0.987])
    lists = ("logprobs", "new_logprobs", "ref_logprobs", "values")
    assert all(len(kept[name]) == 4 and 0 not in kept[name] for name in lists)
    assert len(sample["tokens"]) == 9, "the record is not changed"
    single = {"tokens": ["a"], "advantages": [1.0]}
    assert acted(single) is single


def test_a_transcript_says_who_speaks_and_how_it_ended():
    sample = episode(
        ("assistant", ["look"], 0.0, ["failed", "cut", "failed"]),
        ("tool", ["a tree\n", "and a bear\n"]),
        ("user", []),
        ("assistant", ["run"]),
        ending="max_turns",
        after="too late",
    )
    assert texts(sample) == [
        "prompt › You are at the start.",
        "assistant › look",
        "  (a call failed)",
        "  (the observation was cut)",
        "tool › a tree",
        "       and a bear",
        "assistant › run",
        "after the end › too late",
        "  (truncated: the last turn that env.max_turns allows)",
    ]
    assert [line.text for line in transcript(sample) if line.acted] == ["assistant › look", "assistant › run"]
    assert written(sample) == ["look", "run"]
    assert "tool › a tree an…" in texts(sample, most=10)
    asked = [{"role": "system", "content": "Go."}, {"role": "user", "content": "Where › now?"}]
    assert texts(sample | {"messages": asked}, most=12)[0] == r"user › Where \u203a now?"
    assert texts(sample | {"messages": asked})[:2] == ["system › Go.", r"user › Where \u203a now?"]


def test_a_transcript_needs_no_numbers():
    """As of `generate`, which has no credit, and of an episode that is not over."""
    sample = {name: grid()[name] for name in ("tokens", "mask", "turns")}
    assert texts(sample) == ["assistant › go right", "environment › A hole is near.", "assistant › down."]


@pytest.mark.parametrize("most", [None, 50])
def test_no_text_passes_for_a_speaker_or_moves_the_cursor(most):
    speeches = ("assistant", [HOSTILE]), ("environment", [HOSTILE]), ("assistant", ["x"])
    sample = episode(*speeches, prompt=HOSTILE, after=HOSTILE)
    lines = list(transcript(sample, most))
    assert all(line.text.isprintable() for line in lines)
    assert all(line.text.count("›") == (not line.text.startswith(" ")) for line in lines)
    assert [line.text for line in lines if line.text.startswith("assistant ›")][1:] == ["assistant › x"]
    assert [line.text.partition(" › ")[0] for line in lines if not line.text.startswith(" ")] == [
        "prompt",
        "assistant",
        "environment",
        "assistant",
        "after the end",
    ]
