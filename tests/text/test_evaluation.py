"""Evaluation after a run measures what the run's own evaluations measured."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from helpers.configs import quiet, text_config
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.processes import Processes
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.run_file import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, OptimConfig, RolloutConfig, UpdateConfig
from tokencredit.text.evaluation import evaluate, evaluate_run
from tokencredit.text.models.run_models import load_run_models
from tokencredit.text.policy import load
from tokencredit.text.rewards.calls import Term
from tokencredit.text.trainer import PPOTrainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request, tmp_path_factory):
    """A run of two iterations that evaluates after the last."""
    folder = tmp_path_factory.mktemp("evaluated") / request.param
    args = PPOConfig(
        model=ModelConfig(dtype=request.param),
        critic=CriticConfig(kind="separate"),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8),
        eval=EvalConfig(every=2, samples=8, max_new_tokens=12),
        ppo=UpdateConfig(epochs=2, minibatches=2),
        optim=OptimConfig(lr=1e-3, warmup=0),
        run=quiet(folder, 2),
    )
    trainer = PPOTrainer(args=args)
    trainer.train()
    return folder, trainer


def test_it_says_what_the_runs_own_evaluation_said(run):
    folder, _ = run
    own = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    config = read_config(folder / "config.yaml", PPOConfig)
    metrics = evaluate_run(folder, config, "policy")
    # Not bit for bit: how a matrix product rounds depends on where in memory its operands lie.
    assert metrics == pytest.approx({k: v for k, v in own.items() if k.startswith("eval/")}, rel=1e-5)


def test_the_starting_model_is_no_nat_from_itself(run):
    folder, trainer = run
    config = read_config(folder / "config.yaml", PPOConfig)
    kl = evaluate_run(folder, config, "base")["eval/kl"]
    if trainer.args.model.dtype == "bfloat16":
        assert kl == 0.0, "both sides are full passes"
    assert kl == pytest.approx(0.0, abs=1e-5)


def test_a_policy_is_loaded_with_the_runs_dtype_device_and_critic(run):
    folder, trainer = run
    config = read_config(folder / "config.yaml", PPOConfig)
    models = load_run_models(folder, config, "policy", Processes(), critic=True)
    assert models.precision.dtype == trainer.args.model.dtype
    assert models.precision.device == Processes().device
    assert {p.device.type for p in models.policy.parameters()} == {Processes().device.type}
    expected = trainer.policy.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in models.policy.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["bfloat16"], indirect=True)
def test_it_runs_on_the_gpu_that_the_run_used(run):
    folder, _ = run
    assert load(folder).pipeline.precision.device.type == "cuda"


def evaluated(run, tmp_path, **changes):
    """Evaluate the run's policy with other settings."""
    folder, _ = run
    return evaluate_run(folder, replace(read_config(folder / "config.yaml", PPOConfig), **changes), "policy")


def test_prompts_that_do_not_fit_are_refused_before_anything_is_sampled(run, tmp_path):
    with pytest.raises(ConfigError, match="max_new_tokens leaves no room for a prompt"):
        evaluated(run, tmp_path, ppo=UpdateConfig(micro_batch_tokens=40), eval=EvalConfig(samples=4, max_new_tokens=60))
    with pytest.raises(ConfigError, match="max_new_tokens leaves no room for a prompt"):
        evaluated(run, tmp_path, eval=EvalConfig(samples=4, max_new_tokens=128))


def test_held_out_prompts_are_all_that_is_read(run, tmp_path):
    held_out = EvalConfig(samples=4, max_new_tokens=4, prompts=PromptsConfig(text="A film"))
    gone = PromptsConfig(dataset=str(tmp_path / "gone.jsonl"))
    assert "eval/reward" in evaluated(run, tmp_path, prompts=gone, eval=held_out)


def test_rewards_are_computed_outside_the_autocast_of_the_policy(run):
    _, trainer = run
    seen = []

    def look(completions, **columns):
        seen.append(torch.is_autocast_enabled("cpu"))
        return [0.0] * len(completions)

    honest, trainer.pipeline.terms = trainer.pipeline.terms, [Term("look", 1.0, look)]
    evaluate(trainer.pipeline, trainer.eval_prompts, trainer.args.eval, seed=1)
    trainer.pipeline.terms = honest
    assert seen == [False]


def test_a_missing_critic_is_said_and_not_made_up(run, tmp_path):
    folder, _ = run
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "policy" / "value_head.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no critic, though critic\.kind of the run is separate"):
        load(tmp_path / "copy")
    assert evaluate_run(tmp_path / "copy", read_config(folder / "config.yaml", PPOConfig), "policy"), "it needs none"


def test_rewards_and_prompts_from_python_are_not_replaced_by_the_configurations(tmp_path, capsys):
    """config.yaml holds the defaults in their place: the built-in classifier and its prompt."""
    folder = tmp_path / "run"
    args = text_config(folder, optim=OptimConfig(warmup=0), run=quiet(folder, save_every=0))
    PPOTrainer(
        args=args, reward_funcs=lambda completions, **_: [0.0] * 4 + [1.0] * 4, train_dataset=[{"prompt": "A film"}]
    ).train()
    told = capsys.readouterr().out
    assert f"tokencredit generate {folder} --prompt TEXT" in told
    assert "tokencredit audit" not in told
    assert "on the reward" in (folder / "report.html").read_text()
    assert "builtin:reviews: NEGATIVE" not in (folder / "report.html").read_text()
    assert "- prompts: `from Python (train_dataset)`" in (folder / "policy" / "README.md").read_text()
    assert main(["evaluate", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "was begun in Python with reward_funcs, train_dataset, which its folder does not hold" in told
    assert main(["generate", str(folder)]) == 2
    assert "prompts came from Python (train_dataset), and its folder does not hold them" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "A film", "-n", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
