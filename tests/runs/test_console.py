import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from helpers.episodes import HOSTILE, episode, grid
from tokencredit.audit.verdict import credit_verdict
from tokencredit.runs.console import SHOWN_METRICS, Screen, _continued
from tokencredit.runs.summary import Summary
from tokencredit.settings.run_kind import CONTROL, TEXT

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
    *legend, line = shown(lambda screen: screen.iteration(METRICS)).splitlines()
    assert line == "iteration 3/40  reward 0.5  KL 1.25  entropy 1.1  length 20  clipped 0.1"
    assert legend[0] == "in an iteration's line:"
    assert [row.split()[0] for row in legend[1:]] == ["reward", "KL", "entropy", "length", "clipped"]


def test_each_number_is_explained_once():
    def iterations(screen):
        for row in (METRICS, METRICS, METRICS | {"eval/average_return": 3.0}):
            screen.iteration(row)

    out = shown(iterations)
    for label, meaning in SHOWN_METRICS.values():
        explained = label in ("reward", "KL", "entropy", "length", "clipped")
        assert out.count(meaning) == (explained or meaning.startswith("average return of an"))


@pytest.mark.parametrize("key", ["eval/reward", "eval/average_return"])
def test_an_evaluation_is_shown_and_stays_on_a_terminal(key):
    row = METRICS | {key: 0.625}
    assert "evaluated 0.625" in shown(lambda screen: screen.iteration(row)).splitlines()[-1]
    (kept,) = [line for line in shown(lambda screen: screen.iteration(row), True).splitlines() if "iteration 3" in line]
    assert "evaluated 0.625" in kept


def test_pairs_are_aligned_and_a_label_is_not_repeated():
    rows = [("model", "a"), ("reward", "b"), ("reward", "c\x1b[2J")]
    assert shown(lambda screen: screen.pairs(rows)) == "model   a\nreward  b\n        c\\x1b[2J\n"
    assert shown(lambda screen: screen.pairs([])) == ""


@pytest.mark.parametrize("seconds", [0.5, 40.0, 4000.0], ids=["short", "longer than half a minute", "an hour"])
@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_is_known_from_the_second_iteration_on(seconds, terminal):
    """Iterations of any length, and a first one that is slower: its time says nothing of the others'."""
    now, file = [0.0], io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, get_time=lambda: now[0])
    screen = Screen(40, console=console)
    screen.progress.start_task(screen.task)
    (task,) = screen.progress.tasks
    for number in range(1, 6):
        now[0] += seconds * (3 if number == 1 else 1)
        screen.iteration(METRICS | {"iteration": number})
        assert task.time_remaining == (None if number == 1 else math.ceil((40 - number) * seconds))
        assert ("  left " in file.getvalue().splitlines()[-1]) == (number > 1 and not terminal)


AUDIT = {
    "audit/noise": 0.1,
    "audit/correlation": 0.3,
    "audit/correlation_low": 0.21,
    "audit/correlation_high": 0.38,
    "audit/trust": 0.09,
    "audit/explained_variance": 0.6345,
    "audit/value_noise": 0.2,
}


def test_an_audit_has_a_line():
    line = "audit: about 9 % of the credit is real (correlation 0.30, 95 % interval 0.21 to 0.38)"
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


def test_an_audit_of_noise_has_a_line_without_a_correlation():
    of_noise = {"audit/noise": 0.63, "audit/explained_variance": 0.6, "audit/value_noise": 0.7}
    noisy = shown(lambda screen: screen.iteration(METRICS | of_noise))
    assert noisy.endswith(
        "\naudit: too noisy to say how much of this run's credit is real: 63 % of the variance of its true advantages "
        "is sampling noise, too noisy to judge the critic\n"
    )


def figure(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


@pytest.mark.parametrize(("credit_noise", "value_noise"), [(0.63, 0.1), (0.2, 0.71), (0.63, 0.71)])
def test_an_audit_says_with_its_table_what_is_noise(credit_noise, value_noise):
    found = {"correlation": figure(0.11, -0.8, 1.2), "sign_agreement": figure(0.5), "gain": figure(0.0, 0.0, 0.0)}
    other = found | {"correlation": figure(0.47, -0.2, 3.88), "gain": figure(0.36, -0.1, 2.9)}
    label = "entropy_gae(low=0.2, high=0.95, power=2.0, floor=0.01) (mine.py)"
    critic = {"explained_variance": figure(-0.4, -0.9, -0.1), "rmse": figure(0.4), "constant_rmse": figure(0.3)}
    audit = {
        "credit": {
            "tokens": 90,
            "significant": 17,
            "shown": "gae",
            "estimators": {"gae": found, label: other},
            "noise": figure(credit_noise),
        },
        "critic": critic | {"noise": figure(value_noise)},
        "settings": {"completions": 16, "continuations": 4},
    } | {"iteration": 5, "continuations": 4.0, "seconds": 0.1}
    out = shown(lambda screen: screen.audit(audit))
    assert credit_verdict(audit) in out
    assert "minus this run's" in out
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in out.splitlines() if "│" in line]
    assert "".join(row[0] for row in rows).replace(" ", "") == f"gae{label}".replace(" ", ""), "no name is cut"
    noisy = [["0.11, too noisy", ""], ["0.47, too noisy", "0.36, too noisy"]]
    clear = [["0.11 (-0.80 to 1.20)", ""], ["0.47 (-0.20 to 3.88)", "0.36 (-0.10 to 2.90)"]]
    assert [row[1:] for row in rows if row[1]] == (noisy if credit_noise > 0.5 else clear)
    assert ("3.88" in out) == (credit_noise <= 0.5)
    assert ("This audit is too noisy to say" in out) == (credit_noise > 0.5)
    assert ("The critic's figures are too noisy to judge it: 71 % of" in out) == (value_noise > 0.5)


def test_an_audit_whose_true_values_hardly_vary_does_not_judge_the_critic():
    found = {"correlation": figure(0.11, -0.8, 1.2), "sign_agreement": figure(0.5)}
    estimators = {"credit": {"tokens": 64, "significant": 1, "shown": "gae", "estimators": {"gae": found}}}
    estimators["credit"]["noise"] = figure(0.2)
    critic = {"explained_variance": figure(None), "rmse": figure(0.001804), "constant_rmse": figure(2.2e-5)}
    settings = {"settings": {"episodes": 16}, "iteration": 5, "continuations": 4.0, "seconds": 0.1}
    audit = estimators | {"critic": critic | {"noise": figure(0.25)}} | settings
    out = shown(lambda screen: screen.audit(audit))
    assert "true values: not known (95 % interval not known); RMSE 0.0018, best constant 2.2e-05" in out
    assert "The true values hardly vary here, so the critic cannot be judged by them." in out


@pytest.mark.parametrize(("states", "short"), [(0, True), (15, True), (16, False), (90, False)])
def test_an_audit_with_too_little_time_says_so(states, short):
    unknown = {"value": None, "low": None, "high": None}
    estimators = {"gae": {"correlation": unknown, "sign_agreement": unknown}}
    credit = {"tokens": states, "significant": 0, "shown": "gae", "estimators": estimators, "noise": unknown}
    settings = {"completions": 16, "continuations": 32}
    audit = {"credit": credit, "critic": None, "iteration": 1, "continuations": 4.0, "seconds": 0.1}
    out = shown(lambda screen: screen.audit(audit | {"settings": settings}))
    assert f"({states} tokens of 16 completions at iteration 1, 4 continuations per state)" in out
    assert ("raise --seconds" in out) == short


def test_a_line_per_iteration_above_a_bar_on_a_terminal():
    out = shown(lambda screen: screen.iteration(METRICS), terminal=True)
    assert out.count("iteration 3/40  reward 0.5  KL 1.25  entropy 1.1") == 1
    bar = [line for line in out.splitlines() if "training" in line][-1]
    assert "3/40" in bar
    assert "left" in bar


@pytest.mark.parametrize("terminal", [False, True])
def test_samples_show_reward_reference_and_text(terminal):
    out = shown(lambda screen: screen.samples(10, [sample(" [bold]dull[/bold] \x1b[2J")]), terminal)
    assert "0.750" in out
    assert "-1.50" in out
    assert r"This movie was [bold]dull[/bold] \x1b[2J" in out
    assert "the completion's score" in out
    assert "under the reference model" in out


def test_a_text_without_spaces_is_wrapped_and_not_cut_off():
    text = "好" * 200
    assert shown(lambda screen: screen.samples(10, [sample(text)]), terminal=True).count("好") == 200
    pair = [sample(text)], [sample(text, 40)]
    assert shown(lambda screen: screen.finish(SUMMARY, *pair), terminal=True).count("好") == 400


@pytest.mark.parametrize("terminal", [False, True])
def test_samples_without_a_reference_have_no_column_of_it(terminal):
    rows = [{key: value for key, value in sample(" dull").items() if key != "ref_logprobs"}]
    assert "reference" not in shown(lambda screen: screen.samples(10, rows), terminal)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_columns_are_explained_once(terminal):
    def tables(screen):
        screen.samples(10, [sample(" dull")])
        screen.samples(20, [sample(" dull")])

    assert shown(tables, terminal).count("the completion's score") == 1


def asked(text):
    """A conversation's messages, as samples.jsonl has them."""
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_conversation_is_shown_by_its_last_message(terminal):
    rows = [sample("Paris.") | {"prompt": "<|im_start|>user\nWhere?<|im_end|>", "messages": asked("Where\x1b?\n")}]
    out = shown(lambda screen: screen.samples(10, rows), terminal)
    assert "im_start" not in out
    assert "user › Where\\x1b?" in out
    assert "assistant › Paris." in out
    long = [rows[0] | {"messages": asked("a" * 1000)}]
    assert 100 < shown(lambda screen: screen.samples(10, long), terminal).count("a") < 300


@pytest.mark.parametrize("terminal", [False, True])
def test_an_episode_has_a_line_per_speaker(terminal):
    rows = [grid(ending="max_turns", after=HOSTILE)]
    out = shown(lambda screen: screen.samples(10, rows), terminal)
    lines = [line.strip(" │") for line in out.splitlines()]
    assert "assistant › down." in lines
    assert "environment › A hole is near." in lines
    assert "(truncated: the last turn that env.max_turns allows)" in lines
    assert "prompt › You are at the start." in out
    assert "-1.30" in out, "the mean under the reference, without the zeros of observations"
    assert not [sign for sign in ("\u202e", "\x1b[31m", "\x07", "\x00") if sign in out]
    assert not [line for line in lines if "I won" in line and line.startswith("assistant")]
    ended = shown(lambda screen: screen.finish(SUMMARY, rows * 4, rows * 4), terminal)
    assert ended.count("assistant › down.") == 4, "two episodes before, two after"
    assert "assistant ›" not in ended.replace("assistant › down.", "").replace("assistant › go right", "")


def test_a_long_observation_is_cut():
    rows = [episode(("assistant", ["look"]), ("environment", ["tree "] * 5_000), ("assistant", ["a" * 900]))]
    out = shown(lambda screen: screen.samples(10, rows))
    assert out.count("tree") == 40
    assert out.count("a" * 900) == 1


def test_what_the_policy_did_not_write_is_dim():
    text = _continued(grid())
    dim = [str(text)[part.start : part.end] for part in text.spans if part.style == "dim"]
    assert dim == [
        "prompt › You are at the start.",
        "environment › A hole is near.",
        "  (the environment ended the episode)",
    ]


def test_the_end_says_what_happened():
    out = shown(lambda screen: screen.finish(SUMMARY, [sample(" fine")], [sample(" dull", 40)]))
    assert "before (iteration 1)" in out
    assert "after (iteration 40)" in out
    assert (
        "reward 0.25 → 0.91   KL 2.5 nats per sequence (mean of the last 5 iterations)   40 iterations in 30 s" in out
    )
    assert "in 30 s (2,309 tokens per second)" in out
    small = replace(SUMMARY, rise="+0.66 ± 0.9 at 95 %: within chance")
    assert "0.91 (+0.66 ± 0.9 at 95 %: within chance)   KL" in shown(lambda screen: screen.finish(small, [], []))
    shaped = replace(SUMMARY, rise="+0.9 ± 0.2 at 95 %", shaped=(-0.6, 0.3))
    assert (
        "shaped reward -0.6 → 0.3 (+0.9 ± 0.2 at 95 %); reward before score's clip and penalties: 0.25 → 0.91   KL"
    ) in shown(lambda screen: screen.finish(shaped, [], []))


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3)])
def test_the_end_of_a_run_resumed_with_another_number_of_samples(before, after):
    pairs = [sample(" fine")] * before, [sample(" dull", 40)] * after
    out = shown(lambda screen: screen.finish(SUMMARY, *pairs))
    assert (out.count("fine"), out.count("dull")) == (1, 1)


def test_the_end_of_a_run_without_an_iteration():
    nothing = replace(SUMMARY, iterations=0, first=None, last=None, stopped_by="interrupt")
    assert "stopped by: interrupt" in shown(lambda screen: screen.finish(nothing, [], []))


def test_the_end_of_an_agents_run():
    agent = replace(SUMMARY, first=20.0, last=487.25, kl_last=None, seconds=600.0, per_second=812.0, run_kind=CONTROL)
    out = shown(lambda screen: screen.finish(agent, [], []))
    assert (
        "average return 20 → 487 (mean of the last 5 iterations)   40 iterations in 10 min (812 steps per second)"
        in out
    )


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr("sys.stdout", closed := io.StringIO())
    screen = Screen(1)
    closed.close()
    screen.say("nobody reads this")


def test_a_silent_process_says_nothing(capsys):
    with Screen(2, enabled=False) as screen:
        screen.iteration(METRICS)
    assert capsys.readouterr().out == ""
