import itertools
import json
import shutil
from dataclasses import replace

import pytest

from helpers.episodes import grid
from helpers.files import read_metrics
from tokencredit.errors import ConfigError
from tokencredit.report.audit_view import trust
from tokencredit.report.comparison.compare import compare
from tokencredit.report.page import render
from tokencredit.report.reading import ITERATIONS, read_completions, read_run, with_audit
from tokencredit.report.story import outcome
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.jsonl import comparable, scored_anew
from tokencredit.runs.summary import WINDOW


@pytest.fixture
def copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "copy")


def test_a_run_is_read_back(run_folder):
    run = read_run(run_folder)
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3]
    assert len(run.samples) == 12
    assert run.config["seed"] == 2
    assert run.summary["stopped_by"] == "iterations"
    assert len(repr(run)) < 1000, "a notebook shows it in a few lines"


def test_a_run_that_began_with_a_reward_from_python_has_no_command_that_audits_it(copy):
    assert "to measure it: tokencredit audit" in trust(replace(read_run(copy), audit=None))
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("python: {}", "python: {reward_funcs: score (1a2b3c4d)}"))
    assert "trainer.audit() in Python" in trust(replace(read_run(copy), audit=None))


def test_a_line_that_is_still_being_written_is_left_out(copy):
    text = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(text[:-20])
    (copy / "summary.json").unlink()
    run = read_run(copy)
    assert len(run.metrics) == 2
    assert run.summary == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", b'{"iteration": 1}\n{"iteration"\n', "metrics.jsonl, line 2 is not JSON"),
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl, line 1 is not a JSON object"),
        ("metrics.jsonl", b"", "has no finished iteration yet"),
        ("samples.jsonl", b"[" * 100_000 + b"\n", "samples.jsonl, line 1 is not JSON"),
        ("samples.jsonl", b'{"iteration": 1}\n', "samples.jsonl, line 1: prompt is not a text"),
        ("summary.json", b"no", "summary.json is not JSON"),
        ("config.yaml", b"a: [", "config.yaml: while parsing"),
        ("config.yaml", b"!!python/object/apply:os.system ['true']", "config.yaml: .*os.system' is a tag"),
        ("config.yaml", b"nothing", "config.yaml: it holds no settings"),
        ("config.yaml", b"seed: 1\nseed: 2\n", "config.yaml: seed is given twice line 2"),
        ("config.yaml", b"env:", "config.yaml: env is not an object"),
        ("config.yaml", b"reward: [{weight: heavy}]", r"config.yaml: reward\[0\]\.weight is not a number"),
        ("config.yaml", b"critic: [[]]", "config.yaml: critic is not an object"),
        ("config.yaml", b"run: never", "config.yaml: run is not an object"),
        ("config.yaml", b"optim: {warmup: 1.0e+99}", r"config.yaml: optim\.warmup is not a count"),
        ("config.yaml", b"advantage: {estimator: [[]]}", r"config.yaml: advantage\.estimator is not a text"),
        ("config.yaml", b"advantage: {gamma: 2}", r"config.yaml: advantage\.gamma is not a number from 0 to 1"),
        ("config.yaml", b"ppo: {clip: wide}", r"config.yaml: ppo\.clip is not a number between 0 and 1"),
        ("config.yaml", b"ppo: {epochs: {}}", r"config.yaml: ppo\.epochs is not a number"),
        ("config.yaml", b"optim: {max_grad_norm: 1%b}" % (b"0" * 400), r"optim\.max_grad_norm is not a number"),
        ("summary.json", b'{"stopped_by": [[]]}', "summary.json: stopped_by is not a text"),
    ],
)
def test_damage_is_named(copy, name, content, message):
    (copy / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_run(copy)


def test_another_folder_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        read_run(tmp_path)


def test_lists_of_different_lengths_or_of_none_are_no_sample(copy):
    first, *rest = (copy / "samples.jsonl").read_text().splitlines(keepends=True)
    sample = json.loads(first)
    empty = {name: [] if isinstance(x, list) else x for name, x in sample.items()}
    sample["values"].pop()
    for changed, message in ((sample, "different lengths"), (empty, "no token")):
        (copy / "samples.jsonl").write_text("".join([json.dumps(changed) + "\n", *rest]))
        with pytest.raises(ConfigError, match=f"line 1: its lists have {message}"):
            read_run(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", 2**60),
        ("reward", float("nan")),
        ("tokens", [1]),
        ("values", ["0.5"]),
        ("logprobs", [float("inf")]),
        ("advantages", [10**400]),
        ("ref_logprobs", [None]),
        ("new_logprobs", "none"),
    ],
)
def test_a_sample_of_another_shape_is_named(name, value, copy):
    sample = json.loads((copy / "samples.jsonl").read_text().splitlines()[0])
    filled = value * len(sample["tokens"]) if isinstance(value, list) else value
    (copy / "samples.jsonl").write_text(json.dumps(sample | {name: filled}) + "\n")
    with pytest.raises(ConfigError, match=rf"line 1: {name}(\[0\])? is not "):
        read_run(copy)


def test_an_episode_is_read_back(copy):
    rows = [grid(), grid(2, ending="length", after="late")]
    (copy / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(copy).samples == rows


GRID = grid()
START, MIDDLE, END = GRID["turns"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [1, 1, 0]}, "its lists have different lengths"),
        ({"mask": [True, True, 0, 0, 0, 0, 0, 1, 1]}, r"mask\[0\] is not 0 or 1"),
        ({"mask": [1] * 9}, "mask is not 1 at the tokens of the role assistant, and 0 elsewhere"),
        ({"mask": None}, "mask is not a list"),
        ({"turns": [START | {"role": "system"}, MIDDLE, END]}, r"turns\[0\]\.role is not one of assistant"),
        ({"turns": [START | {"start": False}, MIDDLE, END]}, r"turns\[0\]\.start is not a count"),
        ({"turns": [START | {"reward": float("nan")}, MIDDLE, END]}, r"turns\[0\]\.reward is not a number"),
        (
            {"turns": [START | {"problems": ["malformed", "late"]}, MIDDLE, END]},
            r"turns\[0\]\.problems\[1\] is not one of",
        ),
        ({"turns": [START, END]}, r"turns\[1\] is from 7 to 9; it must start at 2, and end by 9"),
        ({"turns": [START, MIDDLE, END | {"end": 2**52}]}, r"turns\[2\] is from 7 to 4503599627370496; it must start"),
        ({"turns": [START, MIDDLE | {"end": 1}, END]}, r"turns\[1\] is from 2 to 1; it must start at 2"),
        ({"turns": [START, MIDDLE]}, "turns end at 7; they must cover all 9 tokens"),
        ({"turns": []}, "turns end at 0; they must cover all 9 tokens"),
        ({"turns": [MIDDLE | {"start": 0, "end": 9}], "mask": [0] * 9}, "no token is of the role assistant"),
        ({"ending": "won"}, "ending is not one of"),
    ],
)
def test_a_damaged_episode_is_named(changes, message, copy):
    (copy / "samples.jsonl").write_text(json.dumps(GRID | changes) + "\n")
    with pytest.raises(ConfigError, match=f"samples.jsonl, line 1:? {message}"):
        read_run(copy)


@pytest.mark.parametrize(("missing", "message"), [("mask", "mask is not 1"), ("turns", "turns end at 0")])
def test_an_episode_has_turns_and_a_mask(missing, message, copy):
    row = {name: value for name, value in GRID.items() if name != missing}
    (copy / "samples.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_run(copy)


def test_samples_without_a_critic_have_no_values(copy):
    sample = json.loads((copy / "samples.jsonl").read_text().splitlines()[0])
    del sample["values"]
    (copy / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert read_run(copy).samples == [sample]


def test_metrics_that_are_no_finite_numbers_count_as_missing(copy):
    odd = {"reward": float("nan"), "kl": "3", "length": 10**400, "loss": 1e308, "entropy": [1], "lr": True, "a": 1.5}
    rows = [{"iteration": 1} | odd, {"iteration": True}, {"iteration": 2**60}, {"iteration": -1}]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = read_run(copy).metrics
    assert row == {"iteration": 1, "a": 1.5} | dict.fromkeys(["reward", "kl", "length", "loss", "entropy", "lr"])


def test_a_part_of_a_long_run_is_read(copy):
    row, sample = (json.loads((copy / name).read_text().splitlines()[0]) for name in ("metrics.jsonl", "samples.jsonl"))
    for name, record in (("metrics.jsonl", row), ("samples.jsonl", sample)):
        lines = (json.dumps(record | {"iteration": i}) + "\n" for i in range(1, 3001))
        (copy / name).write_text("".join(lines))
    numbers = [s["iteration"] for s in read_run(copy).samples]
    assert numbers[:5] == [1, 2, 3, 4, 5]
    assert numbers[-5:] == [2996, 2997, 2998, 2999, 3000]
    assert len(numbers) <= ITERATIONS + 2 * WINDOW
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 8
    assert read_run(copy, samples=False).samples == []


@pytest.fixture
def audited(audited_folder, tmp_path):
    return shutil.copytree(audited_folder, tmp_path / "audited")


def change(folder, *path, value):
    """Put a value into audit.json; `...` removes the entry."""
    audit = json.loads((folder / "audit.json").read_text())
    *parents, last = path
    place = audit
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (folder / "audit.json").write_text(json.dumps(audit))


def test_an_audit_is_read_back_and_its_metrics_stand_in_the_row_of_its_iteration(audited_folder, run_folder):
    run, before = read_run(audited_folder), read_run(run_folder)
    written = json.loads((audited_folder / "audit.json").read_text())
    assert run.audit == written
    assert before.audit is None
    assert len(run.audit["samples"]) == 6
    assert run.metrics[:2] == before.metrics[:2]
    assert run.metrics[2] == before.metrics[2] | written["metrics"]
    assert read_run(audited_folder, samples=False).audit == written


@pytest.mark.parametrize(("iteration", "row"), [(None, 2), (1, 0), (2, 1), (3, 2), (9, None), (0, None)])
def test_the_row_of_an_audit(iteration, row):
    rows = [{"iteration": i, "audit/trust": 0.5, "audit/bias": 0.1} for i in (1, 2, 3)]
    merged = with_audit(rows, {"iteration": iteration, "metrics": {"audit/trust": 0.25}})
    assert ["audit/bias" in found for found in merged] == [i != row for i in range(3)], "nothing of an earlier audit"
    assert [found["audit/trust"] for found in merged] == [0.25 if i == row else 0.5 for i in range(3)]
    assert all(found["audit/trust"] == 0.5 for found in rows)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["iteration"], -1, "iteration is not the number of an iteration, or null"),
        (["settings"], [], "settings is not an object with completions or episodes, a count"),
        (["settings", "states"], "4; sh", "settings is not an object with .* states, a count or null"),
        (["credit"], ..., "credit is not an object"),
        (["credit", "noise"], {"value": 1}, "credit.noise.low is not a number or null"),
        (["credit", "estimators"], [], "credit.estimators is not an object"),
        (["credit", "estimators", "uniform"], {}, "credit.estimators.uniform.correlation is not an object"),
        (["credit", "shown"], "<b>", "credit.shown is none of credit.estimators"),
        (["critic"], [1], "critic is not an object or null"),
        (["critic", "slope", "low"], float("nan"), "critic.slope.low is not a number or null"),
        (["critic", "reliability"], [{"predicted": 1}], r"critic.reliability\[0\]\.true is not a number or null"),
        (["metrics"], {"reward": 1.0}, "metrics has 'reward'; names must begin with audit/"),
        (["samples"], None, "samples is not a list"),
        (["samples", 1], [], r"samples\[1\] is not an object"),
        (["samples", 1, "prompt"], 5, r"samples\[1\]: prompt is not a text"),
        (["samples", 0, "true_values"], ["1"], r"samples\[0\]: true_values\[0\] is not a number or null"),
        (["samples", 0, "true_advantages"], [None], r"samples\[0\]: its lists have different lengths"),
        (["samples", 0, "true_value_errors"], ..., r"samples\[0\]: true_value_errors is not a list"),
    ],
)
def test_a_damaged_audit_is_named(audited, path, value, message):
    change(audited, *path, value=value)
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(audited)
    assert str(caught.value).startswith(str(audited / "audit.json"))


def test_an_audit_may_be_without_a_critic_and_samples(audited):
    change(audited, "critic", value=None)
    change(audited, "samples", value=[])
    change(audited, "iteration", value=None)
    assert read_run(audited).audit["critic"] is None


# tables


def test_metrics_are_a_data_frame(run_folder):
    run = read_run(run_folder)
    frame = run.frame("metrics")
    assert frame.iteration.tolist() == [1, 2, 3]
    assert frame.reward.tolist() == [row["reward"] for row in run.metrics]
    with pytest.raises(
        ConfigError, match="table is 'metric'; it must be one of metrics, samples, tokens, audit; did you"
    ):
        run.frame("metric")


def test_samples_and_tokens_are_data_frames_with_the_names_of_the_file(run_folder):
    run = read_run(run_folder)
    samples, tokens = run.frame("samples"), run.frame("tokens")
    assert samples[["iteration", "sample"]].values.tolist() == [[i, s] for i in (1, 2, 3) for s in range(4)]
    assert samples.reward.tolist() == samples["reward/NEGATIVE"].tolist() == [s["reward"] for s in run.samples]
    assert samples.length.tolist() == [len(s["tokens"]) for s in run.samples]
    for name in ("tokens", "token_ids", "logprobs", "values", "advantages", "loss_advantages", "returns"):
        assert tokens[name].tolist() == [x for s in run.samples for x in s[name]]
        assert tokens[name].dtype.kind in "ifO" if name == "tokens" else "if"
    joined = tokens.merge(samples, on=["iteration", "sample"])
    texts = joined.groupby(["iteration", "sample"]).tokens.sum()
    assert texts.str.startswith(tuple(run.samples[0]["completion"][:3])).any()
    assert (joined.position < joined.length).all()


def test_tokens_of_an_audit_have_their_true_values(audited_folder):
    run = read_run(audited_folder)
    frame = run.frame("audit")
    assert set(frame.iteration) == {3}
    assert len(frame) == sum(len(sample["tokens"]) for sample in run.audit["samples"])
    assert 0 < frame.true_advantages.notna().sum() < len(frame)
    assert frame.true_advantages.dtype == "float64"
    assert set(run.frame("tokens")) - set(frame) == {"new_logprobs", "loss_advantages"}, "no update follows an audit"


def test_tables_of_a_run_without_completions_or_audit_are_empty(copy):
    (copy / "samples.jsonl").unlink()
    run = read_run(copy)
    assert [len(run.frame(name)) for name in ("samples", "tokens", "audit")] == [0, 0, 0]


def test_every_kept_completion_is_in_the_tables(copy):
    """Parquet files come before samples.jsonl; a field that is not in all of them is missing elsewhere."""
    run, folder = read_run(copy), RunFolder(str(copy))
    records = [{**sample, "terms": {"fit": 0.5}} for sample in run.samples]
    records[0] = {name: value for name, value in records[0].items() if name != "values"} | {
        "messages": [{"role": "user", "content": "hello"}]
    }
    for number in (1, 2, 3):
        folder.write_completions(number, [sample for sample in records if sample["iteration"] == number] * 2)
    samples, tokens = run.frame("samples"), run.frame("tokens")
    assert len(samples) == 2 * len(records)
    assert samples.messages.notna().sum() == 2
    assert samples["reward/fit"].tolist() == [0.5] * len(samples)
    assert tokens["values"].isna().sum() == 2 * len(records[0]["tokens"])
    assert tokens.advantages.sum() == pytest.approx(2 * sum(sum(sample["advantages"]) for sample in records))
    (copy / "samples" / "000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"000002\.parquet is no Parquet file that can be read"):
        run.frame("tokens")
    folder.write_completions(2, [{"iteration": 2, "tokens": ["a"]}])
    with pytest.raises(ConfigError, match=r"000002\.parquet, row 0: prompt is not a text"):
        run.frame("tokens")


def test_iterations_that_kept_all_completions_and_a_few_are_in_the_tables(copy):
    run = read_run(copy)
    RunFolder(str(copy)).write_completions(2, [sample for sample in run.samples if sample["iteration"] == 2] * 2)
    kept = [sample["iteration"] for sample in run.samples]
    assert run.frame("samples").iteration.tolist() == sorted(kept + [2] * kept.count(2))


def test_a_run_whose_new_reward_has_no_iteration_has_no_score_yet(copy):
    rows = len(read_run(copy).metrics)
    with (copy / "events.jsonl").open("a") as events:
        line = {
            "time": "2026-01-01T00:00:00",
            "after_iteration": rows,
            "event": "changed",
            "changed": "reward[0].label",
        }
        events.write(json.dumps(line) + "\n")
    run = read_run(copy)
    assert run.scored == run.findings() == []
    assert outcome(run) == ("reward", "none yet", f"what is scored changed after iteration {rows}")
    assert "none yet" in render(run)
    with pytest.raises(ConfigError, match="has no finished iteration since what is scored changed"):
        compare([copy])


def test_evaluations_of_other_prompts_are_not_compared(copy):
    rows = [row | {"eval/reward": 0.9 - 0.4 * number} for number, row in enumerate(read_metrics(copy))]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(copy).evaluations("eval/reward") == [0.9, 0.5, pytest.approx(0.1)]
    with (copy / "events.jsonl").open("a") as events:
        line = {"time": "2026-01-01T00:00:00", "after_iteration": 1, "event": "changed", "changed": "eval.dataset"}
        events.write(json.dumps(line) + "\n")
    run = read_run(copy)
    assert run.evaluations("eval/reward") == [0.5, pytest.approx(0.1)]
    compared = comparable(run.metrics, run.since, 1)
    assert ["eval/reward" in row for row in compared] == [False, True, True]
    assert [row["reward"] for row in compared] == [row["reward"] for row in rows]


def test_a_runs_seconds_are_those_of_its_summary(copy):
    run = read_run(copy)
    assert run.seconds == run.summary["seconds"] > sum(row["seconds"] for row in run.metrics)
    (copy / "summary.json").unlink()
    assert read_run(copy).seconds == sum(row["seconds"] for row in run.metrics)


def test_episodes_in_parquet_files_are_read_back(copy):
    episodes = [grid(), grid() | {"after": "an unpaired surrogate \ud800"}]
    RunFolder(str(copy)).write_completions(1, episodes)
    found = [record for record in read_completions(copy) if record["iteration"] == 1]
    assert found == [{name: x for name, x in sample.items() if name != "terms"} for sample in episodes[:1]] + [
        found[0] | {"after": "an unpaired surrogate ?"}
    ]


def test_a_timeout_of_a_reward_changes_no_score():
    assert scored_anew([(3, "reward[0].weight"), (5, "reward[0].timeout"), (6, "reward[1].retries")]) == 3
    assert scored_anew([(3, "reward[0].kwargs.name")]) == 3, "the function's own"
