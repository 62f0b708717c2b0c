"""The command as a person meets it: its output and its exit code, also in a process of its own."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import tokencredit
from helpers import warm
from helpers.commands import COMMAND, HEAVY, command, imported, refused, unread
from helpers.files import read_jsonl, read_metrics, without_times
from tokencredit.cli import main
from tokencredit.commands import COMMANDS
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import MAX_SEED
from tokencredit.text.engines.continuous import ContinuousSampler

QUICK = ["--rollout.batch_size", "8", "--rollout.max_new_tokens", "6", "--run.iterations", "2", "--run.show_every", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = warm.python(*COMMAND, "train", *QUICK, "--run.dir", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done


def test_train_prints_progress_samples_and_next_commands(run):
    folder, done = run
    assert "iteration 2/2" in done.stdout
    assert "before (iteration 1)" in done.stdout
    assert "after (iteration 2)" in done.stdout
    lines = done.stdout.splitlines()
    assert "reward   P(NEGATIVE) of builtin:reviews" in lines
    assert f"report  {folder}/report.html" in lines
    assert f"next    tokencredit report {folder} --open  the report in the browser" in lines
    assert "Traceback" not in done.stderr
    assert "it/s]" not in done.stderr.replace("Loading weights", ""), "no other program's progress bars"


def test_generate_takes_the_base_and_the_runs_own_prompts(run, capfd):
    base = ["--base", "--prompt", "This movie was really bad"]
    for options in ([], base):
        assert main(["generate", str(run[0]), "-n", "2", *options]) == 0
        shown = capfd.readouterr().out.splitlines()
        prompt = options[-1] if "--prompt" in options else "This movie was really"
        assert [line.startswith(prompt) for line in shown] == [True, True]


def test_generate_and_evaluate_sample_with_the_engine_of_the_option(run, monkeypatch, capfd):
    asked = []
    complete = ContinuousSampler.complete
    monkeypatch.setattr(
        ContinuousSampler, "complete", lambda self, rows, *rest: (asked.append(len(rows)), complete(self, rows, *rest))
    )
    assert main(["generate", str(run[0]), "-n", "2"]) == 0
    assert asked == []
    assert main(["generate", str(run[0]), "-n", "2", "--engine", "continuous"]) == 0
    assert main(["evaluate", str(run[0]), "--samples", "4", "--engine", "continuous"]) == 0
    assert asked == [4, 2, 4, 4], "each after the probe of four texts"


def test_limit_samples_the_reference_of_a_run(run, capfd):
    assert main(["limit", str(run[0]), "--samples", "64"]) == 0
    of_run = capfd.readouterr().out.splitlines()
    assert of_run[0].startswith("J* ")
    assert any(line.startswith("the run has reached") for line in of_run)


def test_report_and_doctor_read_the_run(run, capfd):
    folder, _ = run
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capfd.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").is_file()
    assert main(["doctor", str(folder)]) == 0
    shown = capfd.readouterr().out
    assert "most completions are cut off" in shown
    assert "What to change: raise rollout.max_new_tokens or set score.missing_eos_penalty." in shown
    assert "warming up" not in shown, "two iterations are a trial"


def test_evaluate_measures_the_policy_and_the_base(run, capfd):
    folder, _ = run
    for options in ([], ["--base"]):
        assert main(["evaluate", str(folder), *options]) == 0
        size, *lines = capfd.readouterr().out.splitlines()
        assert size == "64 prompts, 1 of them different; completions per prompt: 1"
        figures = {line.split()[0]: line.split()[1] for line in lines}
        meanings = {line.split()[0]: line.split(maxsplit=2)[2] for line in lines if len(line.split()) > 2}
        assert meanings["best"] == "Mean over prompts of the best completion's reward."
        assert meanings.keys() == figures.keys(), "each has its sentence"
        assert {"reward", "best", "length", "distinct", "distinct_2", "kl"} <= set(figures)
        assert 0 <= float(figures["reward"]) <= 1
    assert abs(float(figures["kl"])) < 1e-4, "the base is its own reference"
    assert "has no best/" in refused(capfd, "evaluate", str(folder), "--best")


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [True, False])
def test_one_reward_term_takes_the_place_of_the_default(from_file, tmp_path, capsys):
    reward = "[{function: length, kwargs: {unit: words}}]"
    (tmp_path / "run.yaml").write_text(f"reward: {reward}\n")
    flags = ["--config", str(tmp_path / "run.yaml")] if from_file else ["--reward", reward]
    with pytest.raises(SystemExit):
        main(["train", *flags, "--print_config"])
    (term,) = yaml.safe_load(capsys.readouterr().out)["reward"]
    assert (term["function"], term["kwargs"]) == ("length", {"unit": "words"})
    assert not {"classifier", "label"} & term.keys(), "a function's term has no keys of a classifier"


def test_a_runs_configuration_runs_it_again(run, tmp_path):
    folder, _ = run
    assert main(["train", "--config", str(folder / "config.yaml"), "--run.dir", str(tmp_path / "again")]) == 0
    assert without_times(read_metrics(tmp_path / "again")) == without_times(read_metrics(folder))
    AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "policy")


def test_a_folder_in_use_is_refused_and_left_alone(run, capsys):
    folder, _ = run
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert "holds a run or other files already" in refused(capsys, "train", "--run.dir", str(folder))
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--kl.coeff", "1"], "unknown key kl.coeff; did you mean kl.coef?"),
        (["train", "--zzz", "1"], "unknown key zzz; see --print_config for all keys"),
        (["train", "--ppo.clip", "2"], "ppo.clip is 2.0; it must be above 0 and below 1"),
        (["train", "--model.lora", "8"], "model.lora is 8; it must hold keys, such as model.lora.rank"),
        (["train", "--resume", "nowhere"], "'nowhere' is not a run's folder: there is no such folder"),
        (
            ["train", "--run.trackers", "[paper]"],
            "run.trackers[0] is 'paper'; it must be one of tensorboard, wandb",
        ),
        (["train", "--config", "nowhere.yaml"], "--config: 'nowhere.yaml' does not exist"),
        (
            ["train", "--model.name", "./nowhere", "--run.dir", "unused"],
            "'./nowhere' is not a model folder: there is no such folder",
        ),
        (
            ["generate", "nowhere"],
            "'nowhere' is no folder here, and as a model of the hub it has no prompts",
        ),
        (["generate", "./nowhere"], "'./nowhere' is neither a run's folder nor a model's"),
        (["generate", "nowhere", "-n", "0"], "n is 0; it must be at least 1"),
        (["generate", "nowhere", "--engine", "x"], "engine is 'x'; it must be one of local, continuous, vllm"),
        (["generate", "x", "--prompt", "a", "--prompts.text", "b"], "--prompt and prompts.* are both given; leave one"),
        (["generate", "x", "--prompt", "a", "--min_new_tokens", "129"], "it must be at most max_new_tokens, 128"),
        (
            ["generate", "x", "--prompt", "a", "--engine", "continuous", "--min_new_tokens", "2"],
            "min_new_tokens is 2; continuous batching has no minimum; set engine: local, or leave it out",
        ),
        (
            ["generate", "x", "--prompt", "[{'role': 'user'}]"],
            "a conversation that is not JSON: Expecting",
        ),
        (["generate", "x", "--prompt", "a", "--base"], "--base needs a run; 'x' is a model"),
        (["sweep", "nowhere", "--on", "x"], "--on is 'x'; it must be one of local, ray, slurm"),
        (["generate", "nowhere", "--temperature", "-1"], "temperature is -1.0; it must be at least 0"),
        (["generate", "nowhere", "--temperatur", "1"], "unknown key temperatur; did you mean temperature?"),
        (["report", "nowhere", "--zzz"], "unknown option --zzz; see --help"),
        (["generate"], "generate needs MODEL, the folder of a run or a model, or a hub id"),
        (["compare"], "compare needs RUN, the folder of each run"),
        (["audit", "nowhere", "--completions", "1"], "--completions is 1; it must be at least 2"),
        (["sweep"], "sweep needs FILE, a sweep file"),
        (["limit", "nowhere"], "'nowhere' is not a run's folder: there is no such folder"),
        (
            ["limit", "x y", "--kl.coef", "1"],
            "RUN and settings are both given; leave RUN out, and give --config 'x y/config.yaml'",
        ),
        (["limit", "--kl.coef", "0"], "no limit: kl.coef is 0"),
        (["train", "--rollout.stop", ""], "rollout.stop is ''; it must be a list of texts"),
        (["train", "--config", str(Path.cwd())], f"--config: '{Path.cwd()}' is not a file"),
        (["train", "--lr", "1"], "unknown key lr; did you mean critic.lr or optim.lr?"),
        (["--debug", "train", "--run.iterations", "x"], "--debug belongs after the command"),
        (
            ["train", "--reward.function", "f"],
            "unknown key reward.function: reward has no keys of its own; it must be a list of terms",
        ),
        (
            ["train", "--reward", "f"],
            "reward is 'f'; it must be a list of terms, such as --reward '[{function: f.py:f}]'",
        ),
        (["generate", "nowhere", "--seed", "9" * 26], f"it must be at least 0 and at most {MAX_SEED}"),
        (["play", "nowhere", "--seed", str(MAX_SEED + 1)], f"--seed is {MAX_SEED + 1}; it must be at least 0"),
        (["train", "--run.dir", ""], "run.dir is empty; give a folder, or leave it out for runs/DATE-TIME"),
        (["train", "--resume", ""], "--resume is empty; give the folder of a run"),
        (["control", "--env.processes"], "--env.processes: expected one argument, true or false; a value that begins"),
        (
            ["control", "--optim.lr", "-1e-3"],
            "--optim.lr: expected one argument, a number; a value that begins with",
        ),
        (["control", "--stop.reward"], "--stop.reward: expected one argument, a number; a value that begins"),
        (["control", "--", "--seed", "1"], "unexpected argument '--'; see --help"),
        (["control", "--seed", "010"], "seed is '010'; it must be a whole number"),
        (["sweep", "nowhere", "--dry_run=true"], "--dry-run: expected no value after ="),
        (["schema", "nowhere"], "COMMAND is 'nowhere'; it must be one of train, control"),
        (["trane"], "unknown command trane; did you mean train?"),
        (["shema", "sft"], "unknown command shema; did you mean schema?"),
        (["control", "--env.kwargs.size", "5"], "as in --env.kwargs '{size: VALUE}'"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["lrr: 1\n", ""])
def test_the_file_with_the_mistake_is_named(text, tmp_path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("kl: {coef: 1}\n")
    second.write_text(text)
    for flags in (["--config", str(first), "--config", str(second)], [f"--config={second}", f"--config={first}"]):
        assert refused(capsys, "train", *flags).startswith(str(second))


def test_debug_shows_the_traceback():
    done = command("train", "--debug", "--ppo.clip", "2")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "plan"])
def test_print_config_explains_every_key_and_nothing_else(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--kl.coef", "0.5", "--print_config"])
    text = capsys.readouterr().out
    assert "# KL coefficient β: the price of a nat" in text
    settings = yaml.safe_load(text)
    assert settings["kl"]["coef"] == 0.5
    assert settings["reward"][0]["label"] == "NEGATIVE"
    assert [*settings] == [item.name for item in fields(PPOConfig)]
    assert text.startswith("# yaml-language-server: $schema=tokencredit-train.schema.json\n")
    with pytest.raises(SystemExit):
        main(["chat", "x", "--print_config"])
    assert "schema" not in capsys.readouterr().out, "there is none of its options"


def test_help_and_mistakes_import_nothing_heavy():
    """This is why both answer at once."""
    program = """
from tokencredit.cli import main
for arguments in (
    "--help", "train --help", "train --ppo.clip 2", "train --run.dir /", "evaluate --help", "evaluate x",
    "evaluate x --temperature -1", "check-template .", "chat builtin:reviews --base", "inspect .",
):
    try:
        main(arguments.split())
    except SystemExit:
        pass
"""
    assert imported(program, *HEAVY) == []


@pytest.mark.parametrize(("world", "settings"), [("train", "model: {}\n"), ("control", "env: {}\n")])
def test_a_resumed_run_keeps_its_folder(world, settings, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(settings)
    other = refused(capsys, world, "--resume", str(run), "--run.dir", "other")
    assert other == f"run.dir is 'other', and --resume continues '{run}' in its own folder; leave out run.dir"
    (tmp_path / "more.yaml").write_text("run: {dir: other}\n")
    assert refused(capsys, world, "--resume", str(run), "--config", str(tmp_path / "more.yaml")) == other


def test_resuming_is_advised_for_runs_only(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("")
    assert refused(capsys, "train", "--run.dir", str(tmp_path)).endswith("or move it away")
    (tmp_path / "config.yaml").write_text("")
    assert refused(capsys, "train", "--run.dir", str(tmp_path)).endswith(f"or resume the run with --resume {tmp_path}")


def test_more_seeds_than_a_sweep_has_are_refused(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    file.write_text(f"dir: {tmp_path}/runs\nseeds: [1, 2]\nvariants: {{a: {{}}, b: {{kl.coef: 1}}}}\n")
    message = f"--seeds is 5; it must be at most 2, the number of seeds in {file}"
    assert refused(capsys, "sweep", str(file), "--seeds", "5") == message
    assert main(["sweep", str(file), "--seeds", "2", "--dry_run"]) == 0


def test_a_command_without_enough_memory_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "audit", COMMANDS["audit"]._replace(run=lambda options: torch.empty(2**55)))
    assert main(["audit", "nowhere"]) == 1
    error = capsys.readouterr().err
    assert error == "tokencredit: out of memory; lower --completions or --continuations\n"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokencredit {tokencredit.__version__}\n"


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "train" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
def test_a_full_disk_is_one_line_and_what_was_written_is_intact(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    policy = sum(p.stat().st_size for p in [*run[0].glob("policy/*.safetensors"), *run[0].glob("critic/*.safetensors")])
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=21m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (disk / "other").write_bytes(b"x" * (21 * 2**20 - policy - 9 * 2**20 - 400_000))
        options = ["--rollout.batch_size", "32", "--run.samples", "32", "--run.iterations", "2000", "--ppo.epochs", "1"]
        options += ["--run.save_every", "0"]  # the disk has no room for checkpoints
        done = warm.python(*COMMAND, "train", *options, "--ppo.minibatches", "1", "--run.dir", disk / "run")
        assert done.returncode == 1
        assert "No space left on device" in done.stderr.strip().splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert 0 < len(read_metrics(disk / "run")) < 2000
        assert read_jsonl(disk / "run" / "samples.jsonl")
        AutoModelForCausalLM.from_pretrained(disk / "run" / "policy")
        assert (disk / "run" / "report.html").read_text().endswith("</html>")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def read_only(run, tmp_path):
    """A copy of the run on a disk that cannot be written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        shutil.copytree(run[0], disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk / "run"
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a file system")
def test_a_run_that_cannot_be_written_is_refused_by_its_folder(read_only, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "tokencredit.tools.audit_run", None)  # an audit that measured would fail
    for arguments in (["report"], ["audit"], ["train", "--run.iterations", "3", "--resume"]):
        assert main([*arguments, str(read_only)]) == 2
        assert capfd.readouterr().err.splitlines()[-1] == (
            f"tokencredit: cannot write into the run's folder {str(read_only)!r}; make it writable, or copy the run "
            "elsewhere"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a file system")
def test_a_file_that_cannot_be_written_is_refused_before_the_work(read_only, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokencredit.text.evaluation", None)  # an evaluation would fail
    out = str(read_only / "out.json")
    told = refused(capsys, "evaluate", str(read_only), "--out", out)
    assert told == f"--out is {out!r}, and its folder cannot be written to; give another file"


def test_a_page_without_a_browser_is_left_to_the_reader(run, tmp_path):
    done = warm.python(*COMMAND, "report", run[0], "--open", PATH=str(tmp_path), BROWSER="")
    assert done.returncode == 0, done.stderr
    page = run[0] / "report.html"
    assert done.stdout.splitlines() == [str(page), "no browser was found; open the page yourself"]


def test_characters_that_the_output_cannot_encode_are_escaped():
    code = "from tokencredit.cli import main; main([]); from tokencredit.runs.console import Screen; Screen(1).say('→')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "\\u2192"


def test_a_command_whose_output_nobody_reads_ends_without_a_word(monkeypatch, capsys):
    with unread(monkeypatch):
        assert main(["schema", "train"]) == 141  # as a shell says of a program that SIGPIPE ended
    assert capsys.readouterr().err == ""
