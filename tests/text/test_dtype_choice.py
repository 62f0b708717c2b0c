"""What `model.dtype: auto` chose is remembered beside the setting, and everything that reads a run goes by it."""

import json
import shutil
from dataclasses import asdict

import pytest

from helpers.configs import quiet
from helpers.files import read_events, read_metrics
from tokencredit.cli import main
from tokencredit.report.comparison.stats import group_runs
from tokencredit.report.reading import read_run
from tokencredit.runs.resuming import changes
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config, read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, UpdateConfig
from tokencredit.text.evaluation import evaluate_source
from tokencredit.text.models import precision
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load

PREFIXES = {"critic.prefix_every": 1}
OTHER = {"bfloat16": "float32", "float32": "bfloat16"}


def settings(folder, iterations=2):
    """As people write them: nothing on the number format."""
    return PPOConfig(
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        eval=EvalConfig(samples=4, max_new_tokens=6),
        run=quiet(folder, iterations, save_every=1),
    )


def new_machine(monkeypatch, dtype):
    """A machine that computes in a format."""
    monkeypatch.setattr(precision, "choose_for_device", lambda _: (dtype == "bfloat16", "since this is a test"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a machine that computes in a format."""
    folder, dtype = tmp_path_factory.mktemp("chosen"), "bfloat16"
    with pytest.MonkeyPatch.context() as patch:
        new_machine(patch, dtype)
        PPOTrainer(args=settings(folder / "run")).train()
    return folder, dtype


@pytest.fixture
def copy(run, tmp_path, monkeypatch):
    """A copy of the run, on a machine that is the other format's."""
    folder, dtype = run
    new_machine(monkeypatch, OTHER[dtype])
    return shutil.copytree(folder / "run", tmp_path / "run"), dtype


def test_the_setting_stays_as_it_was_asked_and_the_choice_stands_beside_it(run):
    folder, dtype = run
    assert read_config(folder / "run" / "config.yaml", PPOConfig) == settings(folder / "run")
    assert json.loads((folder / "run" / "choices.json").read_text()) == {"model.dtype": dtype, **PREFIXES}
    assert read_events(folder / "run")[0] == f"model.dtype auto: {dtype}, since this is a test"
    assert changes(folder / "run" / "config.yaml", asdict(settings(folder / "run"))) == {}


def test_a_resumed_run_keeps_its_format_on_another_machine(copy):
    folder, dtype = copy
    trainer = PPOTrainer(args=settings(folder, iterations=3))
    assert trainer.pipeline.precision.dtype == dtype
    trainer.train(resume_from_checkpoint=True)
    told = read_events(folder)
    assert [event for event in told if "is now" in event] == ["run.iterations is now 3; it was 2"]
    assert json.loads((folder / "choices.json").read_text()) == {"model.dtype": dtype, **PREFIXES}


def test_the_command_resumes_in_the_same_format(copy):
    folder, dtype = copy
    assert main(["train", "--resume", str(folder), "--run.iterations", "3"]) == 0
    assert len(read_metrics(folder)) == 3
    assert read_run(folder).config["model"]["dtype"] == dtype
    assert changes(folder / "config.yaml", asdict(settings(folder, 3))) == {}, "a sweep that asks for auto goes on"


def test_a_begun_run_does_not_change_its_format(copy, capsys):
    folder, dtype = copy
    assert main(["train", "--resume", str(folder), "--model.dtype", OTHER[dtype], "--run.iterations", "3"]) == 2
    assert f"model.dtype is '{OTHER[dtype]}', but this run was begun with " in capsys.readouterr().err


def test_every_reader_of_a_run_uses_its_chosen_dtype(copy):
    folder, dtype = copy
    for which in ("policy", "base"):
        assert load(folder, which).pipeline.precision.dtype == dtype
    assert read_run(folder).config["model"]["dtype"] == dtype
    assert evaluate_source(read_source(str(folder)))["eval/reward"] >= 0


def test_the_same_configuration_may_choose_otherwise_on_another_machine(run, tmp_path, monkeypatch):
    folder, dtype = run
    new_machine(monkeypatch, OTHER[dtype])
    config = str(folder / "run" / "config.yaml")
    args = ["--config", config, "--run.dir", str(tmp_path / "again"), "--run.iterations", "1"]
    assert main(["train", *args]) == 0
    assert json.loads((tmp_path / "again" / "choices.json").read_text()) == {"model.dtype": OTHER[dtype], **PREFIXES}


def test_a_damaged_choice_is_named_and_nothing_is_changed(run, tmp_path, capsys):
    folder = shutil.copytree(run[0] / "run", tmp_path / "run")
    (folder / "choices.json").write_text('{"model.dtype": "float64"}')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for command in (["train", "--resume"], ["report"], ["doctor"], ["generate"], ["evaluate"]):
        assert main([*command, str(folder)]) == 2, command
        assert "choices.json: model.dtype is 'float64'; it must be one of float32, bfloat16" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_runs_of_two_dtypes_are_separate_groups_under_auto(run, tmp_path):
    folders = [shutil.copytree(run[0] / "run", tmp_path / name) for name in ("one", "same", "other")]
    (folders[2] / "choices.json").write_text(json.dumps({"model.dtype": OTHER[run[1]]}))
    groups = group_runs([read_run(folder) for folder in folders])
    assert [len(group.runs) for group in groups] == [2, 1]
