"""A run's record without a trainer: what stands in its folder, and from where it goes on."""

import json
import math
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from safetensors.torch import load_file

from helpers.files import read_events
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, TooManyBadSteps
from tokencredit.provenance.parts import describe
from tokencredit.runs.checkpoint import FORMAT
from tokencredit.runs.folder import saved
from tokencredit.runs.recorder import BAD_STEPS_KEPT, RunRecord
from tokencredit.settings.data import EnvironmentConfig, FunctionTerm, PromptsConfig, ScoreConfig
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import TEXT
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, OptimConfig, RunConfig

pytestmark = pytest.mark.slow

SAMPLE = {"iteration": 1, "prompt": "a", "completion": " b", "reward": 1.0, "truncated": False, "tokens": [" b"]}
SAMPLE |= {"logprobs": [-1.0], "rewards": [1.0], "advantages": [0.5]}


def config(folder, iterations=4, trackers=(), **groups):
    run = RunConfig(dir=str(folder), iterations=iterations, save_every=1, keep_last=5, show_every=0)
    return PPOConfig(run=replace(run, trackers=list(trackers)), **groups)


def record(args, choices=None):
    return RunRecord(args.run, Processes(), TEXT, choices)


def iterate(made, numbers, reward=1.0):
    for number in numbers:
        row = {"iteration": number, "reward": reward * number, "kl": 0.5, "tokens": 10, "length": 2.0}
        made.iteration(row, [SAMPLE | {"iteration": number}])
        made.checkpoint(number, {"weights": torch.tensor([float(number)])}, {"own": number})


def begun(folder, iterations=2, choices=None, **options):
    args = config(folder, **options)
    made = record(args, choices)
    made.begin(args, 0, 0)
    iterate(made, range(1, iterations + 1))
    return args, made


def resumed(args, choices=None):
    """The iterations done, the state that was loaded, and the keys that had changed."""
    made, loaded = record(args, choices), []

    def load(state, changed):
        loaded.append((state, changed))
        return ()

    return made.resume(args, 0, load), *(loaded[0] if loaded else (None, None))


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path):
    args, _ = begun(tmp_path / "run")
    done, state, changed = resumed(replace(args, optim=OptimConfig(lr=0.5)))
    assert (done, state["weights"].item(), state["process"], changed) == (2, 2.0, {"own": 2}, {"optim.lr"})
    assert "resumed after iteration 2" in read_events(tmp_path / "run")
    assert "optim.lr is now 0.5; it was 0.0001" in read_events(tmp_path / "run")
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["optim"]["lr"] == 0.5


def test_a_change_counts_until_a_checkpoint_has_it(tmp_path):
    """Else a controller would go on from the checkpoint, and the new coefficient be lost without a word."""
    args, made = begun(tmp_path / "run")
    made.folder.unlock()
    args = replace(args, kl=KLConfig(coef=0.2))
    assert resumed(args)[2] == {"kl.coef"}  # killed before its next checkpoint
    done, _, changed = resumed(args)
    assert (done, changed) == (2, {"kl.coef"})
    made = record(args)
    made.resume(args, 0, lambda *_: ())
    iterate(made, [3])
    made.folder.unlock()
    assert resumed(args)[::2] == (3, set())
    # It counts again from a checkpoint before it, until the iterations are done again.
    (tmp_path / "run" / "checkpoints" / "000003" / "manifest.json").write_text("{}")
    made, changes = record(args), []
    made.resume(args, 0, lambda _, changed: changes.append(changed) or ())
    assert changes == [{"kl.coef"}]
    iterate(made, [3])
    made.folder.unlock()
    assert resumed(args)[::2] == (3, set())


class Killed(BaseException):
    """Ends a start as SIGKILL would."""


def killed_before(made, name):
    """A record whose process ends before it writes this file."""
    write = made.folder.write

    def until(file, text):
        if file == name:
            raise Killed
        write(file, text)

    made.folder.write = until
    return made


@pytest.mark.parametrize("name", ["parts.json", "choices.json", "config.yaml"])
def test_a_start_that_is_killed_between_two_files_can_be_made_again(name, tmp_path):
    args, part = config(tmp_path / "run"), {"reward_funcs": {"name": "judge", "digest": "0" * 64}}
    for kill in (True, False):
        made = record(args, {"critic.prefix_every": 1})
        made.parts = part
        if kill:
            with pytest.raises(Killed):
                killed_before(made, name).begin(args, 0, 0)
            made.folder.unlock()
    made.begin(args, 0, 0)
    iterate(made, [1])
    made.folder.unlock()
    # A resumption too: what has changed is an event, or is still to be noticed.
    args = replace(args, kl=KLConfig(coef=0.2))
    for kill in (True, False):
        made, changes = record(args, {"critic.prefix_every": 1}), []
        made.parts = part
        made = killed_before(made, name) if kill else made
        with pytest.raises(Killed) if kill else nullcontext():
            made.resume(args, 0, lambda _, changed, changes=changes: changes.append(changed) or ())
        made.folder.unlock()
        assert changes == [{"kl.coef"}]
    assert "kl.coef is now 0.2; it was 0.05" in read_events(tmp_path / "run")


def test_checkpoints_that_cannot_be_used_are_not_kept_in_place_of_good_ones(tmp_path):
    args, made = begun(tmp_path / "run", iterations=4)
    made.folder.unlock()
    for number in (3, 4):
        (tmp_path / "run" / "checkpoints" / f"{number:06d}" / "manifest.json").write_text("{}")
    args = replace(args, run=replace(args.run, keep_last=2))
    made = record(args)
    assert made.resume(args, 0, lambda *_: ()) == 2
    made.checkpoint(2, {"weights": torch.tensor([2.0])}, {})
    assert {folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()} == {"000001", "000002"}


def test_half_an_event_is_removed_before_more_are_written(tmp_path):
    args, made = begun(tmp_path / "run")
    made.log("before")
    with (tmp_path / "run" / "events.jsonl").open("a") as events:
        events.write('{"time": "2026')
    made.folder.unlock()
    again = record(args)
    again.resume(args, 0, lambda *_: ())
    again.event("after\nTraceback (most recent call last):\n  File")
    assert read_events(tmp_path / "run")[-3:] == ["before", "resumed after iteration 2", "after"]


def test_a_record_that_has_run_does_not_begin_anew_with_its_weights(tmp_path):
    """As after a failure in the first update, or in pretraining: no iteration is done, and weights have changed."""
    args, made = begun(tmp_path / "run", iterations=0)
    with pytest.raises(ConfigError, match="weights may have changed; make another trainer"):
        made.resume(args, 0, lambda *_: ())
    made.folder.unlock()
    assert resumed(args)[0] == 0


def test_the_dates_of_all_starts_are_in_the_summary(tmp_path, monkeypatch):
    args, made = begun(tmp_path / "run")  # killed: without a summary
    first, starts = made.environment["started"], []
    for number in range(2):
        monkeypatch.setattr("sys.argv", ["train", str(number)])
        made.folder.unlock()
        made = record(args)
        made.resume(args, 0, lambda *_: ())
        starts.append(made.environment["started"])
        dates = made.end("a test", lambda folder, summary: None)["environment"]
        assert dates["begun"] <= first <= dates["resumed"][0]
        assert "command" not in dates, "the first one is not known"
        assert len(dates["resumed"]) == len(starts)
        assert all(date <= start for date, start in zip(dates["resumed"], starts, strict=True))


def test_a_resumed_run_keeps_its_first_command(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "first"])
    args, made = begun(tmp_path / "run")
    for arguments in ("second", "third"):
        assert made.end("a test", lambda folder, summary: None)["environment"]["command"] == "train first"
        monkeypatch.setattr("sys.argv", ["train", arguments])
        made.folder.unlock()
        made = record(args)
        made.resume(args, 0, lambda *_: ())


def test_resuming_the_same_record_counts_each_iteration_once(tmp_path):
    args, made = begun(tmp_path / "run", iterations=3)
    made.failed = True
    made.resume(args, 0, lambda state, changed: ())
    assert [row["iteration"] for row in made.history] == [1, 2, 3]
    assert not made.failed
    assert made.end("iterations", lambda folder, summary: None)["iterations"] == 3


def test_the_summary_is_returned_and_written(tmp_path):
    args, made = begun(tmp_path / "run", iterations=3)
    seen = []

    def save(folder, summary):
        (folder / "weights").write_text("")
        seen.append(summary)

    summary = made.end("iterations", save)
    assert (summary.first, summary.last, summary.kl_last, summary.iterations) == (1.0, 3.0, 0.5, 3)
    assert summary.folder == tmp_path / "run"
    assert seen == [summary]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (tmp_path / "run" / "policy" / "weights").is_file()
    with pytest.raises(ConfigError, match="has done all its 3 iterations"):
        resumed(replace(args, run=replace(args.run, iterations=3)))


@pytest.mark.parametrize("number", [FORMAT - 1, "1", None])
def test_a_checkpoint_of_another_format_is_not_read(number, tmp_path):
    args, _ = begun(tmp_path / "run", iterations=2)
    manifest = tmp_path / "run" / "checkpoints" / "000002" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": number}))
    assert resumed(args)[0] == 1
    assert any(
        f"000002 cannot be used, trying the one before it: manifest.json is of format {number!r}" in event
        for event in read_events(tmp_path / "run")
    )


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"seed": 2}, "seed"),
        ({"model": ModelConfig(dtype="float32")}, r"model\.dtype"),
        ({"critic": CriticConfig(kind="separate")}, r"critic\.kind"),
        ({"critic": CriticConfig(head="linear")}, r"critic\.head"),
        ({"optim": OptimConfig(name="muon")}, r"optim\.name"),
    ],
)
def test_what_decides_the_state_cannot_change(changed, key, tmp_path):
    args, _ = begun(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"^{key} is .*, but this run was begun with .*; it cannot change any more"):
        resumed(replace(args, **changed))


def test_entries_of_a_dict_that_come_or_go_are_changes(tmp_path):
    for number, (before, now) in enumerate([({}, {"size": 5}), ({"size": 5}, {})]):
        args, _ = begun(tmp_path / str(number), env=EnvironmentConfig(factory="builtin:grid", kwargs=before))
        other = replace(args, env=replace(args.env, kwargs=now))
        with pytest.raises(ConfigError, match=r"^env\.kwargs\.size is .*; it cannot change any more"):
            resumed(other)
        prompts = PromptsConfig(chat_template_kwargs={"enable_thinking": False})
        assert resumed(replace(args, prompts=prompts))[2] == {"prompts.chat_template_kwargs.enable_thinking"}


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"optim": OptimConfig(lr=0.5)}, True),
        ({"eval": EvalConfig(samples=8)}, True),
        ({"score": ScoreConfig(clip=1.0)}, True),
        ({"eval": EvalConfig(temperature=0.0)}, False),
        ({"eval": EvalConfig(text="Another prompt")}, False),
        ({"rollout": RolloutConfig(top_k=5)}, False),
        ({"rollout": RolloutConfig(temperature=0.5)}, False),
        ({"rollout": RolloutConfig(max_new_tokens=5)}, True),  # evaluations have a length of their own
        ({"prompts": PromptsConfig(text="Another prompt")}, False),
    ],
)
def test_the_best_evaluation_is_of_what_is_evaluated_now(changed, kept, tmp_path):
    args, made = begun(tmp_path / "run", eval=EvalConfig(max_new_tokens=8))
    changed = {name: replace(x, max_new_tokens=8) if name == "eval" else x for name, x in changed.items()}
    made.iteration({"iteration": 3, "reward": 1.0, "eval/reward": 0.9}, [])
    made.checkpoint(3, {"weights": torch.tensor([3.0])}, {"own": 3})
    again = record(replace(args, **changed))
    again.resume(replace(args, **changed), 0, lambda *_: ())
    assert again.best == (0.9 if kept else -math.inf)


def test_the_samples_before_are_of_the_reward_that_samples_after_have(tmp_path):
    args, _ = begun(tmp_path / "run", iterations=3)
    args = replace(args, reward=[replace(args.reward[0], label="POSITIVE")])
    again = record(args)
    again.resume(args, 0, lambda *_: ())
    assert again.samples == []
    iterate(again, [4])
    assert {sample["iteration"] for sample in again.samples} == {4}
    assert again.end("a test", lambda folder, summary: None)["since"] == 3


def test_a_choice_stands_beside_the_setting_and_is_no_change_of_it(tmp_path):
    choices = {"model.dtype": "bfloat16"}
    args, _ = begun(tmp_path / "run", choices=choices)
    for _ in range(2):
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["dtype"] == "auto"
        assert json.loads((tmp_path / "run" / "choices.json").read_text()) == choices
        assert resumed(args, choices)[2] == set()
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match=rf"model.dtype is '{dtype}', but this run was begun with 'auto'"):
            resumed(replace(args, model=ModelConfig(dtype=dtype)), {})


def test_a_setting_that_left_no_choice_cannot_become_auto(tmp_path):
    args, _ = begun(tmp_path / "run", model=ModelConfig(dtype="bfloat16"), choices={})
    assert json.loads((tmp_path / "run" / "choices.json").read_text()) == {}
    with pytest.raises(ConfigError, match=r"model\.dtype is 'auto', but this run was begun with 'bfloat16'"):
        resumed(replace(args, model=ModelConfig()), {"model.dtype": "bfloat16"})
    assert resumed(args, {})[2] == set()


def test_a_run_killed_between_its_two_first_files_can_be_resumed(tmp_path):
    args = config(tmp_path / "run")
    record(args, {"model.dtype": "float32"}).begin(args, 0, 0)
    (tmp_path / "run" / "choices.json").unlink()
    assert resumed(args, {"model.dtype": "bfloat16"}) == (0, None, None)
    assert json.loads((tmp_path / "run" / "choices.json").read_text()) == {"model.dtype": "bfloat16"}


def test_how_the_critic_learns_can_change(tmp_path):
    args, _ = begun(tmp_path / "run")
    critic = CriticConfig(lr=0.1, coef=0.1, clip=None)
    assert resumed(replace(args, critic=critic))[2] == {"critic.lr", "critic.coef", "critic.clip"}


def test_terms_of_the_reward_that_come_go_and_change_are_written_down(tmp_path):
    args, _ = begun(tmp_path / "run")
    term = args.reward[0]
    changed = resumed(replace(args, reward=[replace(term, weight=2.0), replace(term, name="other")]))[2]
    assert {"reward[0].weight", "reward[1].name"} <= changed
    assert "reward[0].weight is now 2.0; it was 1.0" in read_events(tmp_path / "run")
    assert "reward[1].name" in resumed(args)[2]


@pytest.mark.parametrize(
    ("key", "changed", "refused"),
    [
        ("eval.dataset", {"eval": EvalConfig(every=1, dataset="held_out.jsonl")}, True),
        ("eval.dataset", {"eval": EvalConfig(dataset="held_out.jsonl", split="test")}, False),
        ("prompts.dataset", {"prompts": PromptsConfig(dataset="rows.jsonl", shuffle=False)}, True),
        ("prompts.dataset", {"prompts": PromptsConfig(dataset="rows.jsonl", column="question")}, False),
        ("tools[0]", {"tools": ["mine.py:add", "mine.py:multiply"]}, True),
        ("tools[0]", {"tools": ["mine.py:multiply"]}, False),
    ],
)
def test_only_settings_that_choose_a_part_let_it_be_another(key, changed, refused, tmp_path):
    groups = {"prompts": PromptsConfig(dataset="rows.jsonl"), "eval": EvalConfig(dataset="held_out.jsonl")}
    args = config(tmp_path / "run", **groups, tools=["mine.py:add"], reward=[FunctionTerm(function="repetition")])
    made = record(args)
    made.parts = {key: {"name": "before", "digest": "0" * 64}}
    made.begin(args, 0, 0)
    iterate(made, [1])
    made.folder.unlock()
    args = replace(args, **changed)
    again = record(args)
    again.parts = {key: {"name": "now", "digest": "1" * 64}}
    with pytest.raises(ConfigError, match=re.escape(f"{key} is now")) if refused else nullcontext():
        again.resume(args, 0, lambda *_: ())


def judged(rewards, bias):
    return bias


@pytest.mark.parametrize("edited", [False, True])
def test_kwargs_of_the_same_code_are_settings(edited, tmp_path):
    def recorded(bias):
        args = config(tmp_path / "run", advantage=AdvantageConfig(estimator="mine.py:judged", kwargs={"bias": bias}))
        made = record(args)
        made.parts = {"advantage.estimator": describe(partial(judged, bias=bias))}
        return made, args

    made, args = recorded(1)
    made.begin(args, 0, 0)
    iterate(made, [1])
    made.folder.unlock()
    made, args = recorded(2)
    made.parts["advantage.estimator"]["source"] += "# edited" * edited
    with pytest.raises(ConfigError, match="begun with judged") if edited else nullcontext():
        made.resume(args, 0, lambda *_: ())
        assert read_events(tmp_path / "run")[-1] == "advantage.kwargs.bias is now 2; it was 1"


def test_the_checkpoint_before_the_first_iteration_is_not_kept_as_the_best(tmp_path):
    args = config(tmp_path / "run")
    args.run.keep_last = 1
    made = record(args)
    made.begin(args, 0, 0)
    made.checkpoint(0, {"weights": torch.zeros(1)}, {"own": 0})
    iterate(made, [1])
    assert saved(tmp_path / "run") == [1]


class Judge:
    """A part of Python that is not described by its name alone."""

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, rewards):
        return self.bias


@pytest.mark.parametrize("key", ["critic.kind", "advantage.estimator"])
def test_a_part_of_pythons_that_changed_is_refused_until_it_is_allowed(key, tmp_path):
    group, _, name = key.partition(".")

    def given(bias):
        made = config(tmp_path / "run")
        return replace(made, **{group: replace(getattr(made, group), **{name: Judge(bias)})})

    def recorded(args, bias):
        made = record(args)
        made.parts = {key: describe(Judge(bias))}
        return made

    made = recorded(given(1), 1)
    made.begin(given(1), 0, 0)
    iterate(made, [1])
    made.folder.unlock()
    args = given(2)
    with pytest.raises(ConfigError, match=rf'{key} is Judge.*begun with .*run.allow_changed: \["{key}"\]'):
        recorded(args, 2).resume(args, 0, lambda *_: ())
    args = replace(args, run=replace(args.run, allow_changed=[key]))
    assert recorded(args, 2).resume(args, 0, lambda *_: ()) == 1


def test_each_process_keeps_its_own_newest_batches_of_skipped_steps(tmp_path, monkeypatch):
    _, made = begun(tmp_path / "run")
    monkeypatch.setattr("tokencredit.runs.recorder.BAD_STEPS_KEPT", 3)
    monkeypatch.setattr(made.processes, "count", 2)
    monkeypatch.setattr("tokencredit.runs.recorder.MAX_BAD_STEPS", 100)
    for step in range(1, 13):  # 10 comes after 9, not after 1
        for rank in (0, 1):
            monkeypatch.setattr(made.processes, "rank", rank)
            made.bad_step(7, "the loss is nan", {"x": torch.tensor(step)})
    folders = list((tmp_path / "run" / "bad_steps").iterdir())
    assert {f.name for f in folders} == {f"000007-{step}-process-{rank}" for step in (10, 11, 12) for rank in (0, 1)}
    for folder in folders:
        assert load_file(folder / "batch.safetensors")["x"] == int(folder.name.split("-")[1])


def test_batches_of_bad_steps_are_kept_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("tokencredit.runs.recorder.MAX_BAD_STEPS", BAD_STEPS_KEPT + 3)
    _, made = begun(tmp_path / "run")
    for _ in range(BAD_STEPS_KEPT + 2):
        made.bad_step(3, "the loss is nan", {"x": torch.ones(2)}, text="a")
    folders = sorted((tmp_path / "run" / "bad_steps").iterdir())
    assert len(folders) == BAD_STEPS_KEPT
    about = json.loads((folders[0] / "about.json").read_text())
    assert about == {"iteration": 3, "reason": "the loss is nan", "text": "a"}
    with pytest.raises(TooManyBadSteps, match=rf"the loss is nan, in {BAD_STEPS_KEPT + 3} steps in a row"):
        made.bad_step(3, "the loss is nan", {"x": torch.ones(2)})


def test_numbers_of_the_model_that_are_not_finite_advise_a_lower_rate(tmp_path):
    _, made = begun(tmp_path / "run")
    skip = partial(made.bad_step, 1, "gradient is not finite", {"x": torch.ones(2)}, diverged=True)
    skip()
    skip()
    with pytest.raises(TooManyBadSteps, match=r"in 3 steps in a row; lower optim\.lr, which is 0\.0001; see "):
        skip()
    made.config["ppo"]["loss"] = "mine.py:bent"
    with pytest.raises(TooManyBadSteps, match=r"; look for NaN in ppo\.loss bent \(mine\.py\), or lower optim\.lr"):
        skip()


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([{"bad_steps": 1}, {"bad_steps": 1}], True),
        ([{"bad_steps": 1}, {"bad_steps": 0, "loss": 0.5}], False),
        ([{"bad_steps": 0}, {"bad_steps": 0}], False),
        ([], False),
    ],
    ids=["each step skipped", "one taken", "no token in the loss", "no iteration"],
)
def test_a_run_without_a_step_has_failed_if_they_were_skipped(rows, failed, tmp_path):
    made = record(config(tmp_path / "run"))
    for number, row in enumerate(rows, start=1):
        made.history.append({"iteration": number} | row)
    error = made.nothing_learned()
    assert isinstance(error, TooManyBadSteps) == failed
    assert not failed or f"{tmp_path / 'run' / 'bad_steps'} holds the batches" in str(error)


def test_the_end_names_files_and_commands(tmp_path, capsys):
    made = record(config(tmp_path / "my run"))
    made.next_steps({"tokencredit generate RUN": "completions"})
    folder = str(tmp_path / "my run")
    assert capsys.readouterr().out.splitlines() == [
        f"policy  {folder}/policy",
        f"next    tokencredit generate '{folder}'  completions",
    ]
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "report.html").write_text("")
    made.next_steps({"tokencredit generate RUN": "completions"})
    assert capsys.readouterr().out.splitlines() == [
        f"report  {folder}/report.html",
        f"policy  {folder}/policy",
        f"next    tokencredit report '{folder}' --open  the report in the browser",
        f"        tokencredit generate '{folder}'       completions",
    ]
    reward = f"[{{reward_model: {folder}/reward_model}}]"
    ppo = "tokencredit train --reward '[{reward_model: RUN/reward_model}]'"
    made.next_steps({ppo: "PPO", "trainer.audit()": "audit"})
    *_, train, audit = capsys.readouterr().out.splitlines()
    assert shlex.split(train) == ["tokencredit", "train", "--reward", reward, "PPO"]
    assert audit.split() == ["trainer.audit()", "audit"]


def test_a_folder_that_process_0_cannot_prepare_is_an_error_of_all(tmp_path, monkeypatch):
    args, _ = begun(tmp_path / "run")
    other = record(args)
    other.main = False
    told = '[1, "the disk is full", 0, null, {}]'  # an error of the second kind
    monkeypatch.setattr(other.processes, "texts", lambda own: [told, own])
    for start in (lambda: other.begin(args, 0, 0), lambda: other.resume(args, 0, lambda state, changed: ())):
        with pytest.raises(ConfigError, match=r"^process 0: the disk is full$"):
            start()
