"""Which folder a job trains in, and whether a start of it resumes; tests/test_elastic.py starts real jobs."""

import pytest

from tokencredit.commands.jobs import plan
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import JOB, LOCK, RunFolder


class Job:
    """The part of `tokencredit.distributed.job.Job` that `plan` asks."""

    def __init__(self, name="this", remembers=True):
        self.id, self.remembers, self.known = name, remembers, {}

    def remember(self, key, value):
        return self.known.setdefault(key, value)


@pytest.fixture
def begun(tmp_path):
    """A folder that the job named "this" began and did not finish to make."""
    run = RunFolder(str(tmp_path / "run"), "this")
    run.create(0)
    run.write(JOB, "this")
    (run.path / LOCK).touch()
    (run.path / ".config.yaml.part").write_text("seed: ")
    return run.path


def test_a_folder_half_made_by_a_killed_start_is_used_again(begun):
    assert plan(Job(), str(begun), resume=False) == (str(begun), False)
    assert sorted(path.name for path in begun.iterdir()) == [JOB, LOCK]


def test_a_run_begun_by_an_earlier_start_is_resumed(begun):
    (begun / "config.yaml").touch()
    assert plan(Job(), str(begun), resume=False) == (str(begun), True)


@pytest.mark.parametrize("name", ["another", None])
def test_a_folder_of_another_job_is_refused_and_left_alone(begun, name):
    (begun / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a run or other files already"):
        plan(Job(name), str(begun), resume=False)
    assert (begun / ".config.yaml.part").exists()


def test_a_start_that_was_killed_before_the_folder_had_a_name_does_not_block(tmp_path):
    (tmp_path / LOCK).touch()
    (tmp_path / f".{JOB}.part").touch()
    assert plan(Job(), str(tmp_path), resume=False) == (str(tmp_path), False)


def test_without_a_folder_all_starts_agree_on_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job()
    folder, _ = plan(job, None, resume=False)
    job.known["folder"] = "runs/of-the-first-start"
    assert folder.startswith("runs/")
    assert plan(job, None, resume=False) == ("runs/of-the-first-start", False)


def test_a_job_that_forgets_needs_a_folder(begun):
    with pytest.raises(ConfigError, match=r"run\.dir is not given, .* begin another run; give run\.dir"):
        plan(Job(remembers=False), None, resume=False)
    assert plan(Job(remembers=False), str(begun), resume=False) == (str(begun), False)


def test_an_empty_folder_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.dir is empty"):
        plan(Job(), "", resume=False)
