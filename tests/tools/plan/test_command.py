"""`tokencredit plan`: its output, its refusals, and a run whose tensors have the planned sizes."""

import json
from dataclasses import replace

import pytest

from helpers.commands import refused
from tokencredit import PPOConfig
from tokencredit.cli import main
from tokencredit.tools.plan import show
from tokencredit.tools.plan.plan import make_plan, remedies
from tokencredit.tools.plan.work import plan_work

SMALL = {"rollout.batch_size": 8, "rollout.max_new_tokens": 12, "model.dtype": "float32", "run.iterations": 3}
SMALL |= {"reward": [{"function": "length"}], "rollout.stop_at_eos": False}


def planned(settings=None, **options):
    return make_plan(PPOConfig.from_dict(SMALL | (settings or {})), time=False, **options)


def work_of(settings=None, **options):
    return plan_work(PPOConfig.from_dict(SMALL | (settings or {})), **options)


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.mark.slow
def test_the_table_says_how_much_when_and_where(capsys, tmp_path):
    out = tmp_path / "plan.json"
    flags = ["--rollout.batch_size", "8", "--rollout.max_new_tokens", "12", "--model.dtype", "float32"]
    assert main(["plan", *flags, "--processes", "2", "--tokens", "6", "--no-time", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = json.loads(out.read_text())
    assert lines[0].startswith("model     builtin:reviews, 1.7 million parameters")
    assert "40 iterations of 8 completions of 6 tokens" in lines[1]
    assert lines[2].startswith("device    cpu")
    assert lines[2].endswith("float32, 2 processes, each with whole models")
    peak, at = plan["peak"]["bytes"], plan["peak"]["at"]
    assert f"peak of the {at}".ljust(28) + f"{peak / 1e9:>6.2f}  the highest" in [line.strip() for line in lines]
    assert plan["tokens"] == 40 * 8 * 6
    assert plan["memory"]["kept"]["DDP buckets"] == 4 * plan["trained"]
    assert plan["peak"]["bytes"] == pytest.approx(
        plan["memory"]["libraries"] + sum(plan["memory"]["kept"].values()) + sum(plan["memory"][at].values())
    )
    assert plan["seconds"] is None
    assert plan["memory"]["save"]["a file of the checkpoint"] == 2 * 12 * plan["trained"] / 2, "processes share it"
    assert any(line.startswith("assumed   not planned: the time of rewards and environments") for line in lines)
    assert not any(line.startswith("time") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "30"], "--tokens is 30; it must be at most rollout.max_new_tokens, 24"),
        (["--prompt_tokens", "105"], "--prompt_tokens is 105; it must be at most 104, the model's context, or"),
        (["--processes", "0"], "--processes is 0"),
        (["--env.factory", "builtin:grid"], "give --prompt_tokens"),
        (["--model.name", "./nowhere"], "nowhere"),
        (["--rollout.batch_size", "4", "--ppo.minibatches", "2", "--processes", "8"], "it must be at least 8"),
        (["--memory", "much"], "--memory is much; it must be a size such as 24GB"),
        (["--device", "cuda", "--memory", "0GB"], "--memory is 0GB"),
        (["--out", "plan.txt"], "--out is 'plan.txt'; it must be a file that ends in .json"),
        (["--critic.kind", "separate", "--critic.layers", "9"], "critic.layers is 9; it must be at most 2"),
        (
            ["--model.lora.rank", "4", "--model.lora.target_modules", "[q]"],
            "model.lora.target_modules: Target modules {'q'} not found",
        ),
    ],
)
def test_wrong_use_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, "plan", *arguments, "--no-time")


def test_a_file_holds_settings_and_no_options_of_the_command(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("processes: 2\n")
    assert "processes is an option of the command, not a setting" in refused(capsys, "plan", "--config", str(file))


def test_a_run_with_prompts_from_python_is_not_planned_with_the_default_ones(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("python: {train_dataset: 8 rows of prompt}\n")
    assert "holds (train_dataset: 8 rows of prompt)" in refused(capsys, "plan", "--config", str(file), "--no-time")


def test_assumed_lengths_are_named():
    assert "every completion has 12 tokens" in work_of({"rollout.stop_at_eos": True}).assumptions[0]
    assert "every completion" not in work_of({"rollout.stop_at_eos": True}, tokens=5).assumptions[0]


def test_processes_share_whole_groups_of_completions():
    work = work_of({"rollout.batch_size": 20, "rollout.per_prompt": 4}, processes=3)
    assert work.batch.rows == work.mean.rows == 8


def test_prompts_are_counted():
    work = work_of({"prompts.text": ["This movie was", "This movie was really"]})
    assert work.mean.prompt <= work.batch.prompt
    assert work_of(prompt_tokens=7).batch.prompt == 7


@pytest.mark.proof  # below: a GPU that is too small
def test_memory_that_does_not_fit_is_a_warning_with_what_to_change(monkeypatch):
    plan = replace(planned(processes=2), libraries=0)
    small = replace(plan, memory=10**7)
    monkeypatch.setattr(show, "free_disk", lambda _: 10**5)
    changes = list(remedies(small))
    monkeypatch.setattr(show, "remedies", lambda _: changes)
    warnings = list(show.warnings(small))
    assert f"the {plan.peak[0]} needs 2 ×" in warnings[0]
    assert "10 MB of RAM are available" in warnings[0]
    assert any("run.shard: full" in warning for warning in warnings)
    assert "lower run.keep_last" in warnings[-1]
    monkeypatch.undo()
    assert list(show.warnings(replace(plan, memory=None))) == []
    sizes = [plan.peak[1], *(better.peak[1] for _, better in changes)]
    assert sizes == sorted(sizes, reverse=True), "each change comes on top of those before"


def test_the_time_of_all_iterations_is_that_of_one_times_their_number(plan):
    plan = replace(plan, seconds={"rollout": 1.0, "update": 3.0})
    first, second = list(show.totals(plan))[:2]
    assert first == "time      about 4 s per iteration: rollout 1 s, update 3 s"
    assert "about 12 s in all" in second
    assert "the run does not fit" in next(show.totals(replace(plan, seconds=None, memory=1.0)))


def test_audits_are_planned(plan):
    """A run of 3 iterations of 100 s has 21 s for the one at the end, of texts that are fast to sample."""
    work = work_of({"audit.every": 2, "audit.calls": 100})
    plan = replace(plan, work=work, seconds={"rollout": 0.1, "reference": 0.1, "update": 99.8})
    in_training, at_end = (line for line in show.totals(plan) if line.startswith("audit"))
    assert in_training.startswith("audit     every 2 iterations: about 100 reward calls, ")
    assert at_end.startswith("audit     at the end: about 100 reward calls, ")
    assert at_end.endswith(" s, without the time of the reward")
    assert plan.audits["at the end"].seconds <= 21
    assert plan.as_json()["audits"].keys() == {"every 2 iterations", "at the end"}
    assert "at the end" not in replace(plan, seconds={"rollout": 1.0, "reference": 0.0, "update": 3.0}).audits


def test_disk_holds_checkpoints_and_policies(plan):
    def disk(settings):
        return replace(plan, work=work_of(settings)).disk

    one = 12 * plan.sizes.trained
    assert disk({"run.keep_last": 3})["checkpoints"] == one, "the last iteration's"
    assert disk({"run.keep_last": 2, "run.save_every": 1})["checkpoints"] == 2 * one
    assert disk({"run.keep_last": 9, "eval.every": 1})["checkpoints"] == 3 * one, "each may be the best"
    assert plan.disk["policy"] == plan.sizes.parts["kept"]["weights"] + plan.sizes.parts["kept"]["critic"]
    assert disk({"run.save_every": 0})["checkpoints"] == 0
    assert "best" in disk({"eval.every": 1})
    assert "samples" not in plan.disk
    assert disk({"run.samples": "all"})["samples"] == 80 * plan.work.sampled


@pytest.mark.slow
def test_a_gpu_that_this_machine_lacks_is_planned(capsys):
    few = ["--rollout.batch_size", "8", "--rollout.max_new_tokens", "12"]
    assert main(["plan", *few, "--device", "cuda", "--memory", "0.4GB"]) == 0
    text = capsys.readouterr().out
    assert "device    cuda with 0.40 GB, bfloat16" in text
    assert "fits on GPUs from 8 GB" in text
    assert "time      not estimated: the run does not fit" in text
    assert "that is not enough: lower rollout.batch_size" in text
