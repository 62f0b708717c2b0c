import re
import shutil
from pathlib import Path

import pytest

from helpers.episodes import episode, grid
from helpers.files import data_of
from helpers.proofs import proofs
from tokencredit.report.meanings import meaning
from tokencredit.report.notebook import NotebookRun
from tokencredit.report.page import CHARACTERS, LARGEST, OBSERVATION, TOKENS, opened, passed_over, render, write_report
from tokencredit.report.reading import Run, read_run
from tokencredit.report.story import Fact, story
from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202egnp\ud800 {{ 7 * 7 }} <!--"


def made(samples=(), metrics=None, **config):
    metrics = metrics or [{"iteration": i, "reward": 0.1 * i, "seconds": 1.0} for i in range(1, 4)]
    base = {
        "model": {"name": "m"},
        "reward": [{"function": "f.py:f"}],
        "advantage": {"gamma": 1.0},
        "ppo": {"clip": 0.2},
    }
    return Run(Path("runs/made"), base | config, metrics, list(samples), {"stopped_by": "iterations"})


def agent(metrics):
    """A run of an agent, whose configuration names no model."""
    return Run(Path("runs/made"), {"env": {"id": "CartPole-v1"}}, metrics, [], {"stopped_by": "iterations"})


def sample(iteration=1, text="a", tokens=3, **changes):
    row = {
        "iteration": iteration,
        "prompt": text,
        "completion": text * tokens,
        "reward": 1.0,
        "truncated": False,
        "tokens": [text] * tokens,
        "logprobs": [-1.0] * tokens,
        "new_logprobs": [-0.7] * tokens,
        "ref_logprobs": [-1.5] * tokens,
        "values": [0.5] * tokens,
        "rewards": [0.0] * (tokens - 1) + [1.0],
        "advantages": [0.5, -0.5, 0.5][:tokens] + [0.0] * (tokens - 3),
    }
    return row | changes


def test_every_run_writes_a_page(run_folder):
    page = (run_folder / "report.html").read_text()
    assert len(page) < 8e6
    assert "film &lt;b&gt;reviews</h1>" in page
    assert not re.search(r'<(script|link|img|iframe)[^>]* (src|href)="(?!data:)', page)


def test_the_numbers_of_the_page_are_those_of_the_samples(run_folder):
    shown = data_of((run_folder / "report.html").read_text())["credit"]
    written = read_run(run_folder).samples
    assert len(shown) == len(written) == 12
    for ours, theirs in zip(shown, written, strict=True):
        assert ours["numbers"]["advantage"] == pytest.approx(theirs["advantages"], abs=1e-4)
        assert ours["numbers"]["value"] == pytest.approx(theirs["values"], abs=1e-4)
        kl = [a - b for a, b in zip(theirs["logprobs"], theirs["ref_logprobs"], strict=True)]
        assert ours["numbers"]["log-ratio"] == pytest.approx(kl, abs=1e-4)
        assert len(ours["tokens"]) == len(theirs["tokens"])


def test_ratio_and_clipping_by_hand():
    numbers = data_of(render(made([sample()])))["credit"][0]["numbers"]
    assert numbers["ratio after the update"] == pytest.approx([1.3499] * 3)  # e^0.3
    assert numbers["clipped"] == [1.0, 0.0, 1.0]  # above 1.2, where the advantage pushes on

    def clipped(row, **ppo):
        policy = {"off_policy": {"proximal": ppo.pop("proximal", "recomputed")}}
        return data_of(render(made([row], ppo={"clip": 0.2} | ppo, **policy)))["credit"][0]["numbers"].get("clipped")

    whitened = sample(loss_advantages=[-0.1, None, 1.2])
    assert clipped(whitened) == [0.0, None, 1.0], "by the advantages as the loss used them"
    assert clipped(sample(loss_advantages=[None] * 3)) is None, "not in the loss"
    assert clipped(sample(), clip_high=0.4) == [0.0, 0.0, 0.0]
    assert clipped(sample(), dual_clip=1.3) == [1.0, 1.0, 1.0]
    assert clipped(sample(), loss="dppo_tv") is None, "another loss clips no token by its ratio"
    drawn = sample(behavior_logprobs=[-0.7] * 3)
    assert clipped(drawn) == [1.0, 0.0, 1.0]
    assert clipped(drawn, proximal="behavior") == [0.0, 0.0, 0.0], "the ratio of the loss is over that of the draws"
    assert clipped(drawn, proximal="interpolated") is None


def test_a_setting_that_is_null_counts_as_missing():
    page = render(made([sample()], advantage={"gamma": None}, ppo={"clip": None, "clip_high": None}))
    assert data_of(page)["credit"][0]["what_if"] == data_of(render(made([sample()])))["credit"][0]["what_if"]


def test_a_run_without_a_critic_has_its_page():
    rows = [sample(), sample(2)]
    for row in rows:
        del row["values"]
    shown = data_of(render(made(rows)))
    assert list(shown["credit"][0]["numbers"])[:3] == ["advantage", "reward", "log-probability"]
    kept = {name for name, found in zip(shown["alternatives"], shown["credit"][0]["what_if"], strict=True) if found}
    assert kept == {"uniform"}


def test_model_output_is_escaped():
    page = render(made([sample(text=HOSTILE), sample(2, text=HOSTILE)], model={"name": HOSTILE}))
    assert "<img" not in page.replace('"<img', "")  # Plotly's own code has it in a string
    assert "</script><img" not in page
    shown = data_of(page)["credit"][0]["tokens"][0]
    assert shown == "</script><img src=x onerror=alert(1)>\\x1b[31m\\u202egnp\\ud800 {{ 7 * 7 }} <!--"
    page.encode("utf-8")


def test_names_of_reward_terms_are_escaped():
    metrics = [{"iteration": i, "reward": 1.0, f"reward_std/{HOSTILE}": 0.0} for i in range(1, 6)]
    page = render(made(metrics=metrics))
    assert "&lt;img src=x onerror=alert(1)&gt;\\x1b[31m\\u202egnp\\ud800" in page
    page.encode("utf-8")


def test_line_breaks_of_tokens_are_shown():
    shown = data_of(render(made([sample(tokens=3) | {"tokens": ["a\n", "\n", "\tb\r\n"]}])))["credit"][0]["tokens"]
    assert shown == ["a⏎\n", "⏎\n", "\\tb\\r⏎\n"]


@pytest.mark.slow
@pytest.mark.parametrize("last", [1100, *proofs(3000)])
def test_the_page_of_a_long_run_stays_small(last):
    metrics = [{"iteration": i, "seconds": 1.0} | {f"metric_{k}": i * k for k in range(40)} for i in range(1, last + 1)]
    one = sample(tokens=96, advantages=[0.1] * 96)
    samples = [one | {"iteration": i} for i in range(1, last + 1) for _ in range(2)]
    page = render(made(samples, [row | {"reward": 1.0} for row in metrics]))
    assert len(page) < 8e6
    data = data_of(page)
    assert sum(len(s["tokens"]) for s in data["credit"]) <= TOKENS
    assert data["credit"][0]["iteration"] == 1
    assert data["credit"][-1]["iteration"] == last
    charts = [data["headline"], *(chart for section in data["curves"] for chart in section["charts"])]
    assert len(charts) == 40  # metric_0 and seconds are constant
    assert all(len(line["x"]) <= 1000 for chart in charts for line in chart["lines"])


@pytest.mark.parametrize(
    ("advantages", "shown", "said"),
    [
        ([[0.01, 0.01], [0.0, 0.4], [0.5, -0.5], [0.3, 0.3]], [2, 3], "before 2 or after 3"),  # both ends are flat
        ([[0.004, 0.0], [0.4, 0.0], [0.1, 0.0]], [2, 3], "before 2"),  # 0.01 of the largest deviation, and 0.25
        ([[0.0, 0.0], [0.5, -0.5]], [2], "before 2"),
        ([[0.2, 0.2], [0.0, 0.0]], [2], "before 2"),  # none varies: the last
        ([[1.0, 0.0], [0.5, 0.0], [0.9, 0.0]], [1, 3], None),
    ],
)
def test_the_page_opens_at_iterations_whose_advantages_vary_and_says_so(advantages, shown, said):
    samples = [sample(i, tokens=2, advantages=row) for i, row in enumerate(advantages, start=1)]
    metrics = [{"iteration": i, "reward": 1.0} for i in range(1, len(advantages) + 1)]
    page = render(made(samples, metrics))
    assert data_of(page)["opened"] == shown
    assert re.findall("opens on no iteration (.*): advantages hardly vary there", page) == [said] * bool(said)


@pytest.mark.parametrize(
    ("audited", "known", "shown", "said"),
    [
        ([0.5, -0.5], True, ["audit of iteration 3", 2], "on no iteration after 2: advantages hardly vary there"),
        (
            [0.5, -0.5],
            False,
            [1, 2],
            "on no iteration after 2: advantages hardly vary there; and not on the audit, since it has",
        ),
        ([0.01, 0.0], True, [1, 2], "not on the audit, since its advantages hardly vary"),
    ],
)
def test_the_page_opens_on_an_audit_that_says_something(audited, known, shown, said):
    rows = [[0.5, -0.5], [0.4, -0.4], [0.01, 0.0]]
    samples = [
        {"iteration": entry, "numbers": {"advantage": row}}
        for entry, row in zip((1, 2, 3, "audit of iteration 3"), [*rows, audited], strict=True)
    ]
    assert opened(samples[:3], samples[3:], known=known) == shown
    assert said in passed_over(samples[:3], samples[3:], known=known)
    assert opened([], samples[3:], known=known) == ["audit of iteration 3"], "there is nothing else"


def test_the_headline_metric_is_drawn_first_and_once():
    metrics = [{"iteration": i, "reward": float(i), "eval/reward": 1.0, "kl": i + 1.0, "mine": 3.0} for i in (1, 2)]
    page = render(made(metrics=metrics))
    data = data_of(page)
    assert "Constant: mine 3." in page
    assert [line["name"] for line in data["headline"]["lines"]] == ["reward", "eval/reward"]
    assert [chart["title"] for section in data["curves"] for chart in section["charts"]] == ["kl (nats per sequence)"]
    shown = data_of(render(agent([{"iteration": 1, "train/average_return": 20.0}])))
    assert shown["headline"]["title"] == "average_return"


def test_the_head_says_what_was_trained_how_well_and_what_to_do():
    reward = [{"classifier": "m", "label": "NEGATIVE"}, {"function": "f.py:f", "name": "short"}]
    metrics = [
        {"iteration": i, "reward": 0.1 * i, "kl": i - 1.0, "seconds": 1.0, "attainable": 0.2 * i}
        | {"reward_std": 0.5, "tokens": 170.0, "length": 10.0}
        for i in (1, 2, 3)
    ]
    run = made(metrics=metrics, reward=reward)
    assert [tuple(fact) for fact in story(run)] == [
        ("trained", "m", ""),
        ("on the reward", "m: NEGATIVE, short", ""),
        ("reward", "0.10 → 0.30", "+0.20 ± 0.35 at 95 %: within chance; in the last iteration"),
        ("KL to the reference", "0 → 2", "nats per sequence"),
        ("reached", "60 %", "of what this reward allows at this KL price, after 3 iterations"),
        ("true credit", "not measured", "by an audit"),
        ("time", "3 s", "3 iterations"),
    ]
    shaped = made(metrics=[row | {"shaped_reward": row["reward"] - 1, "shaped_reward_std": 0.2} for row in metrics])
    head = Fact(
        "shaped reward",
        "-0.90 → -0.70",
        "+0.20 ± 0.14 at 95 %; in the last iteration; reward before score's clip and penalties: 0.10 → 0.30",
    )
    assert story(shaped)[2] == head
    assert f"shaped reward -0.90 → -0.70 ({head.note})" in repr(NotebookRun(**vars(shaped)))
    assert [line["name"] for line in data_of(render(shaped))["headline"]["lines"]] == ["reward", "shaped_reward"]
    assert "<b>Next:</b> tokencredit audit runs/made</p>" in render(run)
    sick = render(made(metrics=[row | {"masked": 1.0} for row in metrics]))
    assert "1 problem</a>: no completion is left in the loss." in sick
    assert "<b>Next:</b> raise rollout.max_new_tokens</p>" in sick
    assert ", under &#34;rewards&#34;" in sick


@pytest.mark.parametrize(("values", "said"), [([0.0] * 3, True), ([0.3, 0.5, 0.8], False)])
def test_the_page_says_that_an_untrained_critic_gives_only_the_fade_of_the_reward(values, said):
    samples = [sample(1, values=values), sample(2)]
    assert ("the critic knows nothing yet" in render(made(samples))) is said
    for without in (
        {"estimator": "td"},
        {"estimator": "monte_carlo"},
        {"estimator": "gae", "lam": 1.0},
        {"unit": "turn"},
    ):
        assert "the critic knows nothing yet" not in render(made(samples, advantage={"gamma": 1.0} | without))


def test_a_run_without_samples_has_its_curves():
    page = render(agent([{"iteration": 1, "train/average_return": 20.0}]))
    assert "an agent in CartPole-v1" in page
    assert "Where the credit went" not in page


def test_a_run_that_goes_on_says_so(run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    (copy / "summary.json").unlink()
    assert "not finished" in write_report(copy).read_text()


def test_the_age_of_tokens_that_were_sampled_ahead_is_shown():
    new, old = data_of(render(made([sample(age=[0, 0, 0]), sample(2, age=[1, 1, 0])])))["credit"]
    assert "age" not in new["numbers"]
    assert old["numbers"]["age"] == [1, 1, 0]


def test_an_episode_has_numbers_of_acted_tokens_only():
    """Every number of the page, and of other estimators, steps over observations."""
    (shown,) = data_of(render(made([grid()])))["credit"]
    assert shown["tokens"] == ["go", " right", "down", "."]
    assert shown["numbers"]["advantage"] == pytest.approx([-0.3, -0.1, 0.1, 0.3])
    assert shown["numbers"]["log-ratio"] == pytest.approx([0.2, 0.17, 0.14, 0.11])
    assert all(len(values) == 4 for values in [*shown["numbers"].values(), *shown["what_if"]])
    assert shown["what_if"][0] == pytest.approx([-0.01 + 0.05, -0.011 + 0.05, -0.012 + 0.05, 0.987 - 0.65], abs=1e-4)
    assert shown["turns"] == [
        {"role": "assistant", "start": 0, "end": 2, "reward": 0.0, "problems": []},
        {"role": "environment", "text": "⏎\nA hole is near.⏎\n", "length": 17},
        {"role": "assistant", "start": 2, "end": 4, "reward": 1.0, "problems": []},
    ]
    assert shown["ending"] == "the environment ended the episode"


@pytest.mark.slow
def test_25_characters_of_an_observation_count_as_a_token():
    """25 characters of an observation count as a token, and 2,000 are shown."""
    one = episode(("assistant", ["a"]), ("tool", ["好 "] * 5_000), after="b" * 9_000)
    long = [one | {"iteration": i} for i in range(1, 301)]
    metrics = [{"iteration": i, "reward": 1.0} for i in range(1, 301)]
    page = render(made(long, metrics))
    assert len(page.encode()) < LARGEST
    data = data_of(page)
    assert len(data["credit"]) == TOKENS // (1 + 2 * OBSERVATION // CHARACTERS)
    observed = data["credit"][0]["turns"][1]
    assert observed == {"role": "tool", "text": "好 " * 1_000 + "… and 8,000 more characters", "length": 10_000}


def test_zeros_at_observations_do_not_count_as_variance():
    zeros = [grid(1, advantages=[0.5, 0.5, 0, 0, 0, 0, 0, 0.5, 0.5]), grid(2)]
    assert data_of(render(made(zeros)))["opened"] == [2]


def test_with_turns_as_steps_the_critic_has_a_value_per_turn():
    page = render(made([grid()], advantage={"gamma": 1.0, "unit": "turn"}))
    (shown,) = data_of(page)["credit"]
    assert shown["numbers"]["value"] == [0.5, None, 0.6, None]
    assert shown["what_if"][0] == pytest.approx([-0.021 + 0.6 - 0.5] * 2 + [0.975 - 0.6] * 2, abs=1e-4)
    assert "Its steps are whole turns" in page
    assert "Its steps are whole turns" not in render(made([grid()]))


def test_the_head_names_the_environment():
    page = render(made([grid()], env={"factory": "builtin:grid"}, reward=[], tools=["f.py:look"]))
    assert "<dt>in the environment</dt><dd>builtin:grid with tools f.py:look</dd>" in page
    assert "on the reward" not in page
    metrics = [{"iteration": 1, "reward": 1.0, "reward/World": 1.0, "env/turns": 2.0}]
    page = render(made([grid()], metrics, env={"factory": None}))  # the configuration's reward is the default, not used
    assert "<dd>from Python</dd>" in page
    assert "<dt>on the reward</dt><dd>World</dd>" in page
    assert "in the environment" not in render(made([sample()], env={"factory": None}))


def test_repeated_phrases_are_those_of_the_policys_tokens():
    words = ["you", " are", " here"]
    rows = [episode(("assistant", ["go", " far"]), ("user", words), ("assistant", words), iteration=1) for _ in (1, 2)]
    page = render(made(rows))
    assert "<td>you are here</td>" in page
    assert "go far" not in page.split("Most repeated phrases")[1].split("</table>")[0]


@pytest.mark.parametrize("unit", ["turn", *proofs("token")])
def test_a_real_run_of_episodes_is_shown_as_it_was_credited(unit, tmp_path):
    """With the run's own λ and before whitening, the credit under another estimator is the run's."""
    args = PPOConfig.from_dict(
        {
            "model": {"name": "builtin:grid", "dtype": "float32"},
            "env": {"factory": "builtin:grid", "turn_tokens": 8, "max_turns": 4},
            "rollout": {"batch_size": 8, "max_new_tokens": 120},
            "advantage": {"unit": unit, "gamma": 0.9},
            "run": {"dir": str(tmp_path / "run"), "iterations": 1, "samples": 8, "trackers": [], "show_every": 0},
        }
    )
    PPOTrainer(args=args).train()
    run = read_run(tmp_path / "run")
    assert all(map(meaning, run.metrics[0].keys() - {"iteration"}))
    data = data_of((tmp_path / "run" / "report.html").read_text())
    place = data["alternatives"].index("gae, λ = 0.95")
    assert len(data["credit"]) == len(run.samples) == 8
    for shown, written in zip(data["credit"], run.samples, strict=True):
        acted = [place for place, chosen in enumerate(written["mask"]) if chosen]
        assert shown["tokens"] == [written["tokens"][i].replace("\n", "⏎\n") for i in acted]
        assert shown["what_if"][place] == pytest.approx([written["advantages"][i] for i in acted], abs=2e-4)
        assert sum(turn.get("reward") or 0.0 for turn in shown["turns"]) == shown["reward"]
    assert "at most 4 turns" in (tmp_path / "run" / "policy" / "README.md").read_text()
