"""The record of software, machine, command and repository."""

import subprocess
import sys

from tokencredit.provenance.environment import environment, repository


def git(folder, *arguments):
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", folder, *own, *arguments], check=True, capture_output=True)


def test_a_repository_has_commit_and_changed_files(tmp_path):
    assert repository(tmp_path) is None
    git(tmp_path, "init")
    assert repository(tmp_path) is None, "without a commit"
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "first")
    clean = repository(tmp_path)
    assert (len(clean["commit"]), clean["changed"]) == (40, [])
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "b.py").write_text("2")
    assert repository(tmp_path) == clean | {"changed": ["a.py", "b.py"], "changed_files": 2}


def test_versions_machine_command_and_the_users_repository(tmp_path, monkeypatch):
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/bin/tokencredit", "train", "--seed", "2"])
    found = environment()
    assert {"python", "tokencredit"} <= found["versions"].keys()
    assert found["versions"].keys() - {"python"} <= sys.modules.keys(), "packages that the process uses"
    assert found["command"] == "tokencredit train --seed 2"
    assert found["repository"]["folder"] == str(tmp_path.resolve())
    assert found["platform"]
    assert found["started"].endswith("+00:00")
