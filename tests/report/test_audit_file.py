"""audit.json of a real audit is read back; damage to it is named by its key."""

import json
import shutil

import pytest

from tokencredit.errors import ConfigError
from tokencredit.report.audit_file import with_audit
from tokencredit.report.reading import read_run

FIGURE = "with value, low and high, each a number or null"


@pytest.fixture
def copy(audited_folder, tmp_path):
    return shutil.copytree(audited_folder, tmp_path / "copy")


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


def test_it_is_read_back_and_its_metrics_stand_in_the_row_of_its_iteration(audited_folder, run_folder):
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
    rows = [{"iteration": i, "audit/trust": 0.5} for i in (1, 2, 3)]
    merged = with_audit(rows, {"iteration": iteration, "metrics": {"audit/trust": 0.25}})
    assert [found["audit/trust"] for found in merged] == [0.25 if i == row else 0.5 for i in range(3)]
    assert all(found["audit/trust"] == 0.5 for found in rows)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["iteration"], -1, "iteration is not the number of an iteration, or null"),
        (["iteration"], ..., "iteration is not the number"),
        (["settings"], [], "settings is not an object with completions or episodes, a count"),
        (["continuations"], "8", "continuations is not a number"),
        (["credit"], ..., "credit.tokens is not a count"),
        (["credit", "noise"], {"value": 1}, f"credit.noise is not an object {FIGURE}"),
        (["credit", "estimators"], [], "credit.estimators is not an object of estimators"),
        (["credit", "estimators", "uniform"], {}, "credit.estimators is not an object of estimators"),
        (
            ["credit", "estimators", "uniform", "gain"],
            {"value": 1e200, "low": 0, "high": 0},
            "credit.estimators is not",
        ),
        (["credit", "shown"], "<b>", "credit.shown is none of credit.estimators"),
        (["credit", "shown"], ["a"], "credit.shown is none of credit.estimators"),
        (["critic"], [1], "critic.explained_variance is not an object"),
        (["critic", "slope", "low"], float("nan"), f"critic.slope is not an object {FIGURE}"),
        (["critic", "states"], 1.5, "critic.states is not a count"),
        (["critic", "reliability"], [{"predicted": 1}], "critic.reliability is not a list of objects"),
        (["metrics"], {"reward": 1.0}, "metrics is not an object of numbers whose names begin with audit/"),
        (["metrics", "audit/trust"], None, "metrics is not an object of numbers"),
        (["samples"], None, "samples is not a list"),
        (["samples", 1], [], r"samples\[1\] is not an object"),
        (["samples", 1, "prompt"], 5, r"samples\[1\] has no prompt that can be read"),
        (["samples", 0, "true_values"], ["1"], r"samples\[0\] has no true_values that can be read"),
        (["samples", 0, "true_advantages"], [None], r"samples\[0\] has lists of different lengths"),
        (["samples", 0, "true_value_errors"], ..., r"samples\[0\] has no true_value_errors"),
    ],
)
def test_damage_is_named(copy, path, value, message):
    change(copy, *path, value=value)
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(copy)
    assert str(caught.value).startswith(str(copy / "audit.json"))


@pytest.mark.parametrize("content", ["[1]", "{", "", "[" * 100_000])
def test_what_is_no_object_is_refused(copy, content):
    (copy / "audit.json").write_text(content)
    with pytest.raises(ConfigError, match=r"audit\.json is not"):
        read_run(copy)


def test_of_a_run_without_a_critic_and_of_an_agent(copy):
    change(copy, "critic", value=None)
    change(copy, "samples", value=[])
    change(copy, "iteration", value=None)
    assert read_run(copy).audit["critic"] is None
