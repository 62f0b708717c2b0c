"""Labelling by keys: from a pipe, and at a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress

import pytest

from helpers.commands import wait_for
from helpers.files import count_lines, read_jsonl
from tokencredit.cli import main

ACTIVE = ("\x1b", "\u202e", "\x9b")


def test_keys_from_a_pipe_label_skip_and_go_back(pairs_file):
    done = subprocess.run(
        [sys.executable, "-m", "tokencredit", "label", str(pairs_file)],
        input="a\nx\nT\nu\nb\n\n",
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    labels = read_jsonl(pairs_file.with_name("labels.jsonl"))
    assert [row["label"] for row in labels] == ["A", "tie", "B"]
    assert labels[1]["pair"] == labels[2]["pair"] != labels[0]["pair"]
    assert "this one is labelled tie" in done.stdout
    assert done.stdout.splitlines()[-1] == f"A 1, B 1, tie 0, skip 0, left 1 in {pairs_file.parent}/labels.jsonl"
    assert "<img src=x" in done.stdout, "it is shown"
    assert not any(mark in done.stdout for mark in ACTIVE)


def test_a_full_file_asks_nothing(pairs_file, capsys):
    subprocess.run([sys.executable, "-m", "tokencredit", "label", str(pairs_file)], input="s\ns\ns\n", text=True)
    capsys.readouterr()
    assert main(["label", str(pairs_file)]) == 0
    assert capsys.readouterr().out == f"A 0, B 0, tie 0, skip 3, left 0 in {pairs_file.parent}/labels.jsonl\n"


@pytest.fixture
def terminal(pairs_file):
    """The command at a terminal of its own, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "tokencredit", "label", str(pairs_file)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True, close_fds=True
    )
    threading.Thread(target=drain, args=(ours,), daemon=True).start()
    yield process, ours, theirs
    process.kill()
    process.wait()
    os.close(ours)
    os.close(theirs)


def drain(terminal):
    """Read what is shown, so that the command never waits for it."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


def canonical(terminal):
    """True if the terminal hands over whole lines and echoes them, as a shell needs it."""
    return bool(termios.tcgetattr(terminal)[3] & termios.ICANON and termios.tcgetattr(terminal)[3] & termios.ECHO)


def test_an_arrow_is_no_label(terminal, pairs_file):
    """The up key sends ESC [ A."""
    process, ours, theirs = terminal
    labels = pairs_file.with_name("labels.jsonl")
    for key in (b"\x1b[A", b"\x1b[B", b"s"):
        wait_for(lambda: not canonical(theirs), process)
        os.write(ours, key)
        time.sleep(0.2)  # a key at a time
    wait_for(lambda: count_lines(labels) >= 1)
    assert [json.loads(line)["label"] for line in labels.read_text().splitlines()] == ["skip"]


def test_a_single_key_is_enough_at_a_terminal(terminal, pairs_file):
    process, ours, theirs = terminal
    labels = pairs_file.with_name("labels.jsonl")
    for number, key in enumerate(b"abs", start=1):
        wait_for(lambda: not canonical(theirs), process)
        os.write(ours, bytes([key]))
        wait_for(lambda: count_lines(labels) >= number)  # noqa: B023
    assert process.wait() == 0
    assert canonical(theirs)
    assert [row["label"] for row in read_jsonl(labels)] == ["A", "B", "skip"]


def test_ctrl_c_gives_the_terminal_back(terminal):
    process, _, theirs = terminal
    wait_for(lambda: not canonical(theirs), process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert canonical(theirs)
