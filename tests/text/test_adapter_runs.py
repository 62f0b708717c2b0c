"""Whole runs that start from the adapter of another run."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.configs import as_flags, quiet
from helpers.files import read_metrics, without_times
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import ModelSource, read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, OptimConfig, UpdateConfig
from tokencredit.text.evaluation import evaluate_source
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load

peft = pytest.importorskip("peft")


def settings(folder, iterations, name="builtin:reviews", **model):
    return PPOConfig(
        model=ModelConfig(name=str(name), dtype="float32", **model),
        critic=CriticConfig(prefix_every=0),
        rollout=RolloutConfig(batch_size=32, max_new_tokens=8),
        ppo=UpdateConfig(epochs=2, minibatches=2),
        optim=OptimConfig(lr=3e-3, warmup=0),
        eval=EvalConfig(samples=8, max_new_tokens=8),
        run=quiet(folder, iterations, save_every=2, samples=2),
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run that trains a new adapter until its reward is much higher."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    summary = PPOTrainer(args=settings(folder, 8, lora=LoraConfig(rank=8))).train()
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    return folder, summary


@pytest.fixture(scope="module")
def second(first, tmp_path_factory):
    """A run by command that goes on with that adapter."""
    folder = tmp_path_factory.mktemp("runs") / "second"
    keys = {
        "model.name": first[0] / "policy",
        "model.dtype": "float32",
        "critic.prefix_every": 0,
        "rollout.batch_size": 32,
        "rollout.max_new_tokens": 8,
        "ppo.epochs": 2,
        "ppo.minibatches": 2,
        "optim.lr": 3e-3,
        "eval.samples": 8,
        "eval.max_new_tokens": 8,
        "run.dir": folder,
        "run.iterations": 3,
        "run.save_every": 2,
    }
    assert main(["train", *as_flags(keys)]) == 0
    return folder


def test_the_reward_does_not_restart_and_the_policy_moves(first, second):
    _, summary = first
    rows = read_metrics(second)
    assert rows[0]["reward"] > (summary["reward_first"] + summary["reward_last"]) / 2
    assert abs(rows[0]["kl"]) < 1e-4, "it starts at its reference"
    assert all(row["kl"] > 1e-3 for row in rows[1:])
    assert all(abs(row["first_ratio_error"]) < 1e-4 for row in rows)


def test_the_critic_saved_beside_the_adapter_goes_on(first, second, tmp_path):
    trainer = PPOTrainer(args=settings(tmp_path / "run", 2, first[0] / "policy"))
    assert trainer.notes == [f"the critic continues from the one saved in {first[0] / 'critic'}"]
    assert trainer.reference is trainer.policy


def test_the_folder_that_it_leaves_is_an_adapter_of_the_same_base(first, second):
    configs = [json.loads((run / "policy" / "adapter_config.json").read_text()) for run in (first[0], second)]
    for config in configs:  # PEFT writes a set
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    assert not any(path.is_dir() for path in (second / "policy").iterdir())
    lm = AutoModelForCausalLM.from_pretrained(configs[1]["base_model_name_or_path"], dtype=torch.float32)
    with torch.no_grad():
        plain = peft.PeftModel.from_pretrained(lm, second / "policy").eval()(torch.tensor([[5, 6, 7]])).logits
        ours = load(second).model.lm(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(ours, plain)
    assert str(first[0] / "policy") in (second / "policy" / "README.md").read_text()


def test_its_base_is_the_model_with_the_adapter_that_it_started_from(first, second):
    config = read_config(second / "config.yaml", PPOConfig)
    base, policy = (evaluate_source(ModelSource(str(second), config, second), which) for which in ("base", "policy"))
    assert base["eval/kl"] == pytest.approx(0, abs=1e-4)
    assert policy["eval/kl"] > 1e-3
    own = evaluate_source(
        ModelSource(str(first[0]), read_config(first[0] / "config.yaml", PPOConfig), first[0]), "policy"
    )
    assert base["eval/reward"] == pytest.approx(own["eval/reward"], abs=1e-4)
    assert load(second, "base").generate(n=2) == load(first[0]).generate(n=2)


def test_it_is_resumed_bit_for_bit_and_not_on_another_adapter(first, second, tmp_path, capsys):
    run = tmp_path / "run"
    args = settings(run, 2, first[0] / "policy")
    whole = replace(args, run=replace(args.run, save_every=1, dir=str(tmp_path / "whole")))
    PPOTrainer(args=whole).train()
    trainer = PPOTrainer(args=replace(whole, run=replace(whole.run, dir=str(run))))
    iteration = trainer.iteration

    def until(number):
        if number == 2:
            raise KeyboardInterrupt
        return iteration(number)

    trainer.iteration = until
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    other = replace(trainer.args, model=replace(trainer.args.model, name=str(second / "policy")))
    with pytest.raises(ConfigError, match=r"model\.name is .*, but this run was begun with .*; it cannot change"):
        PPOTrainer(args=other).train(resume_from_checkpoint=True)
    assert main(["train", "--resume", str(run)]) == 0
    assert without_times(read_metrics(run)) == without_times(read_metrics(tmp_path / "whole"))
    # The same name, and another adapter behind it.
    moved = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_name(first)), second / "policy")
    (first[0] / "policy").rename(tmp_path / "kept")
    try:
        moved.save_pretrained(first[0] / "policy")
        for file in (tmp_path / "kept").glob("token*"):
            (first[0] / "policy" / file.name).write_bytes(file.read_bytes())
        assert main(["train", "--resume", str(run), "--run.iterations", "3"]) == 2
        assert "stands for is not what it was when this run began" in capsys.readouterr().err
        assert main(["evaluate", str(run), "--base"]) == 2
        assert "stands for is not what it was when this run began" in capsys.readouterr().err
        assert main(["evaluate", str(run)]) == 0
        said = capsys.readouterr().out
        assert "no KL to the model that the run started from: the model that" in said
        assert "\nkl " not in said
    finally:
        for file in (first[0] / "policy").iterdir():
            file.unlink()
        (first[0] / "policy").rmdir()
        (tmp_path / "kept").rename(first[0] / "policy")


def base_name(run):
    return json.loads((run[0] / "policy" / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_a_peft_model_from_python(first, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(base_name(first), dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(lm, first[0] / "policy")
    given = settings(tmp_path / "run", 2)
    trainer = PPOTrainer(model, args=given)
    trainer.train()
    by_name = PPOTrainer(args=settings(tmp_path / "by name", 1, first[0] / "policy"))
    ours, reward = read_metrics(tmp_path / "run"), by_name.collect().total_scores().mean()
    assert ours[0]["reward"] == pytest.approx(float(reward))
    assert ours[1]["kl"] > 1e-3
    assert any(not torch.equal(p, x) for p, x in zip(model.parameters(), fresh(first).parameters(), strict=False)), (
        "it is trained in place"
    )


def fresh(run):
    lm = AutoModelForCausalLM.from_pretrained(base_name(run), dtype=torch.float32)
    return peft.PeftModel.from_pretrained(lm, run[0] / "policy")


@pytest.mark.proof  # above: on another adapter
def test_a_model_from_python_has_no_folder_to_be_evaluated_from(first, tmp_path, capsys):
    """Its name leads to the base, which is not the model that the run started from."""
    run = tmp_path / "run"
    PPOTrainer(fresh(first), args=settings(run, 2)).train()
    assert main(["evaluate", str(run), "--base"]) == 2
    assert "is not what it was when this run began" in capsys.readouterr().err
    assert main(["evaluate", str(run)]) == 0
    said = capsys.readouterr().out
    assert "no KL to the model that the run started from" in said
    assert "reward" in said


@pytest.mark.proof  # models/test_adapters.py: a merged adapter
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_that_merges_begins_where_the_adapter_ended(rank, first, tmp_path):
    _, summary = first
    run = tmp_path / "run"
    args = settings(run, 3, first[0] / "policy", adapter="merge", lora=LoraConfig(rank=rank))
    PPOTrainer(args=replace(args, eval=EvalConfig(every=2, samples=8, max_new_tokens=8))).train()
    rows = read_metrics(run)
    assert rows[0]["reward"] > (summary["reward_first"] + summary["reward_last"]) / 2
    assert abs(rows[0]["kl"]) < 1e-4
    assert rows[2]["kl"] > 1e-4
    for which in ("policy", "best"):
        assert (run / which / "model.safetensors").is_file(), "no other folder holds the merged weights"
        assert not (run / which / "adapter_config.json").exists()
    assert main(["train", "--resume", str(run), "--run.iterations", "4"]) == 0
    config = read_config(run / "config.yaml", PPOConfig)
    assert evaluate_source(ModelSource(str(run), config, run), "base")["eval/kl"] == pytest.approx(0, abs=1e-4)
    assert evaluate_source(ModelSource(str(run), config, run), "policy")["eval/kl"] > 1e-4


def test_a_frozen_model_is_refused_before_a_run_begins(tmp_path):
    frozen = AutoModelForCausalLM.from_pretrained(PPOTrainer(args=settings(tmp_path / "a", 1)).policy.lm.name_or_path)
    frozen.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no parameter of the model .* requires a gradient"):
        PPOTrainer(frozen, args=settings(tmp_path / "run", 1)).train()
    assert not (tmp_path / "run").exists()
