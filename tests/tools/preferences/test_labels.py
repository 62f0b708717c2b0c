"""The file of labels: what is appended, read back, gone over again and exported."""

import json
import os
import signal
import subprocess
import sys

import pytest

from helpers.commands import HEAVY, imported, refused, wait_for
from helpers.files import count_lines, read_jsonl
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.tools.preferences.labels import Labels, Pair, Session, read_pairs, readable


def session(pairs_file, seed=1):
    return Session(read_pairs(pairs_file, seed), Labels.open(pairs_file.with_name("labels.jsonl")))


def test_pairs_are_in_the_files_order_without_those_that_are_equal(pairs_file):
    rows = read_jsonl(pairs_file)
    swapped = rows[0] | {"chosen": rows[0]["rejected"], "rejected": rows[0]["chosen"]}
    with pairs_file.open("a") as file:
        file.write(json.dumps(swapped))  # without a line break at the end
    pairs = read_pairs(pairs_file, 1)
    assert [pair.prompt for pair in pairs] == [row["prompt"] for row in rows]
    for pair, row in zip(pairs, rows, strict=True):
        assert pair.a != pair.b
        assert all(text in (pair.a, pair.b) for text in (row["chosen"], row["rejected"]))


def test_the_seed_decides_which_is_a(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i), "chosen": "x", "rejected": "y"}) + "\n" for i in range(200)))
    first = [pair.a for pair in read_pairs(file, 1)]
    assert first == [pair.a for pair in read_pairs(file, 1)]
    assert first != [pair.a for pair in read_pairs(file, 2)]
    assert 70 < first.count("x") < 130


def test_labels_are_kept_one_by_one_and_resumed(pairs_file):
    one = session(pairs_file)
    first = one.current()
    one.label("A")
    again = session(pairs_file, seed=9)
    assert again.current().key == one.current().key != first.key
    again.label("tie")
    again.label("skip")
    assert again.current() is None
    again.label("A")  # there is no pair left
    assert again.counts() == {"A": 1, "B": 0, "tie": 1, "skip": 1, "left": 0}
    rows = read_jsonl(pairs_file.with_name("labels.jsonl"))
    assert [row["label"] for row in rows] == ["A", "tie", "skip"]
    assert (rows[0]["pair"], rows[0]["a"]) == (first.key, first.a)


def test_back_replaces_a_label(pairs_file):
    one = session(pairs_file)
    one.back()
    assert one.existing_label() is None, "there is nothing before the first"
    pairs = list(one.pairs.values())
    one.label("A")
    one.label("B")
    one.back()
    assert (one.current(), one.existing_label()) == (pairs[1], "B")
    one.back()
    assert (one.current(), one.existing_label()) == (pairs[0], "A")
    one.back()
    assert one.current() == pairs[0]
    one.label("tie")
    assert (one.current(), one.existing_label()) == (pairs[2], None)
    assert one.counts() == {"A": 0, "B": 1, "tie": 1, "skip": 0, "left": 1}
    assert len(read_jsonl(pairs_file.with_name("labels.jsonl"))) == 3, "the last label of a pair counts"
    assert session(pairs_file).counts() == one.counts()


def test_preferences_are_those_of_a_and_b(pairs_file, tmp_path, capsys):
    one = session(pairs_file)
    first = one.current()
    one.label("B")
    one.label("skip")
    third = one.current()
    one.label("A")
    other = Pair("0" * 16, "of another file", "x", "y")
    one.labels.add(other, "A")
    out = tmp_path / "preferences.jsonl"
    assert main(["label", str(pairs_file), "--export", str(out)]) == 0
    assert capsys.readouterr().out == f"2 preferences in {out}\n"
    whole = {"chosen_truncated": False, "rejected_truncated": False}
    assert read_jsonl(out) == [
        {"prompt": first.prompt, "chosen": first.b, "rejected": first.a} | whole,
        {"prompt": third.prompt, "chosen": third.a, "rejected": third.b} | whole,
    ]
    assert "exists already" in refused(capsys, "label", str(pairs_file), "--export", str(out))


@pytest.mark.parametrize("size", [1, 5, 10, 40, -2])
def test_a_label_that_was_not_written_to_its_end_is_the_only_one_lost(size, pairs_file):
    one = session(pairs_file)
    one.label("A")
    one.label("B")
    file = pairs_file.with_name("labels.jsonl")
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[:size])
    again = session(pairs_file)
    assert again.counts()["left"] == 2
    again.label("tie")
    assert [row["label"] for row in read_jsonl(file)] == ["A", "tie"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my notes", r"labels.jsonl is not a file of labels; give another one"),
        ("my notes\n", r"labels.jsonl, line 1 is not JSON"),
        ('{"label": "A"}\n', r"labels.jsonl, line 1 is not a label; give another file of labels"),
        ('{"pair": "x", "label": "C", "prompt": "", "a": "", "b": ""}\n', r"line 1 is not a label"),
        ('{"pair": [], "label": "A", "prompt": "", "a": "", "b": ""}\n', r"line 1 is not a label"),
    ],
)
def test_another_file_is_refused_and_left_alone(text, message, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Labels.open(file)
    assert file.read_text() == text


def test_labels_need_a_folder(pairs_file, capsys):
    message = refused(capsys, "label", str(pairs_file), "--out", "nowhere/labels.jsonl")
    assert message == "the folder of nowhere/labels.jsonl does not exist; make it first"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no pairs; `tokencredit pairs` writes them"),
        ('{"prompt": "x", "chosen": "y"}\n', "line 1: rejected is not a text or a conversation"),
        ('{"prompt": 3, "chosen": "y", "rejected": "z"}\n', "line 1: prompt is not a text or a conversation"),
        ('{"prompt": "", "chosen": [], "rejected": "z"}\n', "line 1: chosen is not a text or a conversation"),
        ('{"prompt": [{"role": 1}], "chosen": "", "rejected": ""}', "line 1: prompt is not a text or a conversation"),
        ("\n[1]\n", "line 2 is not a JSON object"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_a_file_without_pairs_is_refused_by_its_line(text, message, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text(text)
    assert message in refused(capsys, "label", str(tmp_path / "pairs.jsonl"))
    assert list(tmp_path.iterdir()) == [tmp_path / "pairs.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "label needs FILE, a JSONL file of pairs"),
        (["nowhere"], "'nowhere' is not a file; give a file of pairs, such as `tokencredit pairs` writes"),
        (["nowhere", "--out", ""], "--out is empty"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, "label", *arguments)


def test_nothing_is_exported_without_a_preference(pairs_file, tmp_path, capsys):
    out = tmp_path / "preferences.jsonl"
    assert "has none of these pairs labelled A or B" in refused(capsys, "label", str(pairs_file), "--export", str(out))
    assert not out.exists()


def test_conversations_have_roles_and_hostile_texts_do_nothing(pairs_file):
    pairs = read_pairs(pairs_file, 1)
    assert readable(pairs[2].prompt) == "system: Be brief.\nuser: Good?"
    shown = readable(pairs[1].prompt)
    assert shown.count("\n") == 1
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_labelling_imports_nothing_heavy(pairs_file):
    program = f"from tokencredit.cli import main\nmain(['label', {str(pairs_file)!r}])"
    assert imported(program, *HEAVY) == []


def test_a_process_that_is_killed_loses_no_label(tmp_path):
    file, labels = tmp_path / "pairs.jsonl", tmp_path / "labels.jsonl"
    rows = [{"prompt": str(i), "chosen": "x", "rejected": "y" * 5000} for i in range(5000)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = subprocess.Popen(
        [sys.executable, "-m", "tokencredit", "label", str(file)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    answers, writer = os.fdopen(os.dup(process.stdin.fileno()), "wb"), process.stdin
    answers.write(b"a\n" * 3000)
    answers.flush()
    wait_for(lambda: count_lines(labels) >= 20, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    answers.close()
    writer.close()
    whole = count_lines(labels)
    assert whole >= 20
    again = Session(read_pairs(file, 1), Labels.open(labels))
    assert again.counts()["A"] == whole == count_lines(labels)


def test_a_truncated_completion_stays_known_as_one(tmp_path, capsys):
    file = tmp_path / "pairs.jsonl"
    row = {"prompt": "Good?", "chosen": "No, the", "rejected": "Yes.", "chosen_truncated": True}
    file.write_text(json.dumps(row) + "\n")
    one = session(file)
    one.label("A" if one.current().a == "No, the" else "B")
    out = tmp_path / "preferences.jsonl"
    assert main(["label", str(file), "--export", str(out)]) == 0
    assert read_jsonl(out) == [row | {"rejected_truncated": False}]


def test_a_label_is_shown_in_the_order_of_now(pairs_file):
    one = session(pairs_file)
    pair = one.current()
    one.label("A")
    rows = read_jsonl(pairs_file)
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    pairs_file.write_text("".join(json.dumps(row) + "\n" for row in swapped))
    again = session(pairs_file)
    again.back()
    assert again.current().a == pair.b
    assert again.existing_label() == "B"


def test_a_last_label_without_a_line_break_is_kept(pairs_file):
    one = session(pairs_file)
    one.label("A")
    one.label("B")
    file = pairs_file.with_name("labels.jsonl")
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert len(Labels.open(file).rows) == 2
    assert len(read_jsonl(file)) == 2


def test_an_export_takes_no_seed(pairs_file, tmp_path, capsys):
    message = refused(capsys, "label", str(pairs_file), "--export", str(tmp_path / "e.jsonl"), "--seed", "3")
    assert "--seed has no effect" in message
