import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tokencredit.runs.console import Screen
from tokencredit.runs.summary import Summary
from tokencredit.settings.world import CONTROL, TEXT

METRICS = {"iteration": 3, "reward": 0.5, "kl": 1.25, "entropy": 1.1, "length": 20.0, "clip_fraction": 0.1}
SUMMARY = Summary(Path("runs/x"), 0.25, 0.91, 2.5, 40, 30.0, 2309.4, "iterations", TEXT)


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


def test_plain_lines_without_a_terminal():
    out = shown(lambda screen: screen.iteration(METRICS))
    assert out == "iteration 3/40  reward 0.5  KL 1.25  entropy 1.1  length 20  clipped 0.1\n"


AUDIT = {"audit/noise": 0.1, "audit/correlation": 0.3, "audit/trust": 0.09, "audit/explained_variance": 0.6345}


def test_an_audit_has_a_line():
    line = "audit: 9 % of the credit is real (correlation 0.30)"
    critic = ", the critic explains 0.63 of the true values' variance\n"
    for terminal in (False, True):
        assert line + critic.strip() in shown(lambda screen: screen.iteration(METRICS | AUDIT), terminal)
    without = {name: x for name, x in AUDIT.items() if name != "audit/explained_variance"}
    assert shown(lambda screen: screen.iteration(METRICS | without)).endswith(f"\n{line}\n")
    unknown = shown(lambda screen: screen.iteration(METRICS | {"audit/noise": 1.2, "audit/explained_variance": -3.6}))
    assert unknown.endswith(
        "\naudit: the share of real credit is unknown, the critic explains -3.60 of the true values' variance\n"
    )
    assert "audit" not in shown(lambda screen: screen.iteration(METRICS))


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
    out = shown(lambda screen: screen.finish(SUMMARY, [sample(" fine")], [sample(" dull", 40)]))
    assert "before (iteration 1)" in out
    assert "after (iteration 40)" in out
    assert "reward 0.25 → 0.91   KL 2.5 nats per sequence   40 iterations in 30 s (2,309 tokens per second)" in out
    assert "runs/x/policy" in out


def test_the_end_of_a_run_without_an_iteration():
    nothing = replace(SUMMARY, iterations=0, first=None, last=None, stopped_by="interrupt")
    assert "stopped by: interrupt" in shown(lambda screen: screen.finish(nothing, [], []))


def test_the_end_of_an_agents_run():
    agent = replace(SUMMARY, first=20.0, last=487.25, kl_last=None, seconds=600.0, per_second=812.0, world=CONTROL)
    out = shown(lambda screen: screen.finish(agent, [], []))
    assert "average return 20 → 487   40 iterations in 10 min (812 steps per second)" in out


def test_a_silent_process_says_nothing(capsys):
    with Screen(2, enabled=False) as screen:
        screen.iteration(METRICS)
    assert capsys.readouterr().out == ""
