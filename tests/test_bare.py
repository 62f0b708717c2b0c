"""Training from Python needs no extra, no module that Windows lacks, and no locale beyond ASCII."""

from pathlib import Path

import pytest

from helpers.commands import python
from helpers.files import read_events

PROGRAM = Path(__file__).with_name("bare.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bare run")


@pytest.fixture(scope="module")
def output(folder):
    done = python(PROGRAM, folder, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_says_what_it_leaves_out_and_why(folder, output):
    events = read_events(folder / "run")
    page = "no report.html: a page needs plotly, which is not installed: pip install plotly"
    curves = "no TensorBoard curves: TensorBoard is not installed (pip install tensorboard)"
    assert events.count(f"{page}, then tokencredit report '{folder / 'run'}'") == 2, "once per end of the run"
    assert events.count(curves) == 2
    assert "resumed after iteration 1" in events
    written = {path.name for path in (folder / "run").iterdir()}
    assert {"best", "checkpoints", "config.yaml", "metrics.jsonl", "policy", "summary.json"} <= written
    assert not {"report.html", "tensorboard"} & written
    assert (folder / "japanese" / "policy" / "adapter_config.json").is_file()


def test_a_japanese_prompt_trains_where_the_locale_is_ascii(folder, output):
    assert "\\u6620\\u753b\\u306f" in output
    assert "\u6620\u753b\u306f" in (folder / "japanese" / "policy" / "README.md").read_text(encoding="utf-8")
    assert (folder / "japanese" / "summary.json").is_file()


@pytest.mark.parametrize(
    "message",
    [
        "prompts.parquet' needs datasets, which is not installed: pip install datasets",
        "prompts.dataset 'someone/prompts', which is not a local file or folder, needs datasets, "
        "which is not installed: pip install datasets",
        "run.trackers needs tensorboard, which is not installed: pip install tensorboard",
        "train_dataset is of type tuple; it must be a datasets.Dataset",
        "a comparison needs SciPy, which is not installed: pip install 'tokencredit[compare]'",
        "an agent needs Gymnasium, which is not installed: pip install 'tokencredit[control]'",
    ],
)
def test_a_setting_that_needs_a_missing_package_is_refused_with_the_package(message, output):
    assert message in output
