import io

import pytest
from rich.console import Console

from tokencredit.runs.console import Screen, visible

METRICS = {"iteration": 3, "reward": 0.5, "kl": 1.25, "entropy": 1.1, "length": 20.0, "clip_fraction": 0.1}
SUMMARY = {
    "reward_first": 0.25,
    "reward_last": 0.91,
    "kl_last": 2.5,
    "iterations": 40,
    "seconds": 30.0,
    "tokens_per_second": 1000.0,
    "stopped_by": "iterations",
}


def sample(completion, iteration=1):
    return {
        "iteration": iteration,
        "prompt": "This movie was",
        "completion": completion,
        "reward": 0.75,
        "ref_logprobs": [-1.0, -2.0],
    }


def shown(action, terminal=False):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None, highlight=False)
    with Screen(40, console=console) as screen:
        action(screen)
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain “text” é 漢字 🙂", "plain “text” é 漢字 🙂"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m\x07\x00\x7f", r"\x9b31m\x07\x00\x7f"),
        ("\u202eright to left\u2066", r"\u202eright to left\u2066"),
        ("\ud800 alone", r"\ud800 alone"),
    ],
)
def test_untrusted_text_cannot_act_on_the_terminal(text, expected):
    assert visible(text) == expected


def test_plain_lines_without_a_terminal():
    out = shown(lambda screen: screen.iteration(METRICS))
    assert out == "iteration 3/40  reward 0.5  KL 1.25  entropy 1.1  length 20  clipped 0.1\n"


def test_a_bar_with_the_numbers_on_a_terminal():
    out = shown(lambda screen: screen.iteration(METRICS), terminal=True)
    assert "3/40" in out
    assert "left" in out
    assert "reward 0.5" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_samples_show_reward_reference_and_text(terminal):
    out = shown(lambda screen: screen.samples(10, [sample(" [bold]dull[/bold] \x1b[2J")]), terminal)
    assert "0.750" in out
    assert "-1.50" in out
    assert r"This movie was [bold]dull[/bold] \x1b[2J" in out


def test_the_end_says_what_happened():
    out = shown(lambda screen: screen.finish(SUMMARY, "runs/x", [sample(" fine")], [sample(" dull", 40)]))
    assert "before (iteration 1)" in out
    assert "after (iteration 40)" in out
    assert "reward 0.250 → 0.910   KL 2.50 nats a sequence   40 iterations in 30 s" in out
    assert "runs/x/policy" in out


def test_the_end_of_a_run_without_an_iteration():
    nothing = SUMMARY | {"iterations": 0, "reward_first": None, "reward_last": None, "stopped_by": "interrupt"}
    assert "stopped by: interrupt" in shown(lambda screen: screen.finish(nothing, "runs/x", [], []))


def test_a_silent_process_says_nothing(capsys):
    with Screen(2, enabled=False) as screen:
        screen.iteration(METRICS)
    assert capsys.readouterr().out == ""
