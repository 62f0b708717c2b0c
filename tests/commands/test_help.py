"""The short help of the commands that train, and shell completion."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from helpers.commands import refused
from tokencredit.cli import main
from tokencredit.commands.command_line import FIRST_KEYS
from tokencredit.settings.fields import flat
from tokencredit.settings.run_kind import RUN_KINDS


@pytest.mark.parametrize("run_kind", RUN_KINDS.values(), ids=list(RUN_KINDS))
def test_the_help_fits_a_terminal_and_names_the_first_keys_with_their_defaults(run_kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as left:
        main([run_kind.command, "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 110
    keys = FIRST_KEYS[run_kind.config]
    assert 16 <= len(keys) <= 20
    assert all(f"  --{key} " in text for key in keys)
    default = flat(asdict(run_kind.config()))
    assert f"--optim.lr {json.dumps(default['optim.lr'])} " in text
    assert f"--run.iterations {default['run.iterations']} " in text
    assert f"tokencredit {run_kind.command} --help all" in text


@pytest.mark.parametrize("run_kind", RUN_KINDS.values(), ids=list(RUN_KINDS))
def test_all_keys_are_in_the_whole_help(run_kind, capsys):
    assert main([run_kind.command, "--help", "all"]) == 0
    text = capsys.readouterr().out
    keys = [key for key in flat(asdict(run_kind.config())) if "[" not in key]
    assert [key for key in keys if f"--{key} " not in text] == []


@pytest.mark.parametrize("run_kind", RUN_KINDS.values(), ids=list(RUN_KINDS))
def test_the_help_on_a_group_has_its_keys_in_full(run_kind, capsys):
    assert main([run_kind.command, "--help", "optim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [key for key in flat(asdict(run_kind.config())) if key.startswith("optim.")]
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [f"--{key}" for key in keys]
    assert main([run_kind.command, "--help", "optim.eps"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"--optim.eps {run_kind.config().optim.eps} ")
    assert text.count("--") == 1


def test_the_help_on_a_group_that_is_not_there_is_refused(capsys):
    assert refused(capsys, "train", "--help", "agent").startswith(
        "--help has no group agent; give all, or one of model, "
    )
    assert refused(capsys, "doctor", "--help", "env") == "--help has no group env; give all"


def test_bash_completes_keys_and_choices(tmp_path):
    command = [sys.executable, "-m", "tokencredit.cli", "--print_completion=bash"]
    script = tmp_path / "tokencredit.bash"
    script.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    ask = """
    source "$1"
    COMP_WORDS=(tokencredit train "$2" "$3") COMP_CWORD=$4
    $(complete -p tokencredit | sed 's/.*-F \\([^ ]*\\).*/\\1/') > /dev/null
    echo "${COMPREPLY[@]}"
    """

    def completions(*words):
        command = ["bash", "-c", ask, "bash", str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert completions("--critic.ki", "", "2") == ["--critic.kind"]
    assert completions("--critic.kind", "", "3") == ["shared", "separate", "none"]
