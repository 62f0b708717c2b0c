"""Evaluation after a run measures what the run's own evaluations measured."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from helpers.commands import refused
from helpers.configs import quiet, text_config
from helpers.models import SHAPE, random_lm
from tokencredit.cli import main
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.settings.data import EvaluationEnvironment, PromptsConfig
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import ModelSource, read_config, read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, OptimConfig, UpdateConfig
from tokencredit.text.evaluation import evaluate, evaluate_source
from tokencredit.text.models.run_models import load_run_models
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.calls import Term
from tokencredit.tools.load_run import load
from tokencredit.tools.scoring_options import EvaluateOptions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two iterations that evaluates after the last."""
    folder = tmp_path_factory.mktemp("evaluated") / "bfloat16"
    args = PPOConfig(
        model=ModelConfig(dtype="bfloat16"),
        critic=CriticConfig(kind="separate"),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8),
        eval=EvalConfig(every=2, samples=8, max_new_tokens=12),
        ppo=UpdateConfig(epochs=1, minibatches=2),
        optim=OptimConfig(lr=1e-3, warmup=0),
        run=quiet(folder, 2),
    )
    trainer = PPOTrainer(args=args)
    trainer.train()
    return folder, trainer


def test_evaluation_after_a_run_equals_the_runs_own(run):
    folder, _ = run
    own = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    metrics = evaluate_source(read_source(str(folder)))
    # Not bit for bit: how a matrix product rounds depends on where in memory its operands lie.
    assert metrics == pytest.approx({k: v for k, v in own.items() if k.startswith("eval/")}, rel=1e-5)


def test_a_temperature_undoes_greedy_evaluations_of_the_run():
    source = ModelSource("runs/first", PPOConfig(eval=EvalConfig(temperature=0.0)), scored=True)
    assert EvaluateOptions().configure(source).rollout.top_k == 1
    warm = EvaluateOptions(temperature=0.7).configure(source)
    assert (warm.rollout.temperature, warm.rollout.top_k) == (0.7, None)


def test_another_environment_keeps_the_rows_of_episodes_and_drops_those_of_texts():
    rows = {"prompts.dataset": "train.jsonl", "prompts.shuffle": False, "eval.dataset": "test.jsonl"}
    asked = EvaluateOptions(env=EvaluationEnvironment(factory="builtin:calculator"))
    for own, kept in (({"env.factory": "builtin:grid"}, True), ({}, False)):
        config = asked.configure(ModelSource("run", PPOConfig.from_dict(rows | own), scored=True))
        assert (config.prompts.shuffle, config.eval.dataset) == ((False, "test.jsonl") if kept else (None, None))


def test_the_kl_of_the_base_model_to_itself_is_0(run):
    folder, _ = run
    kl = evaluate_source(read_source(str(folder)), "base")["eval/kl"]
    assert kl == 0.0, "both sides are full passes"


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
def test_it_runs_on_the_gpu_that_the_run_used(run):
    folder, _ = run
    assert load(folder).pipeline.precision.device.type == "cuda"


def figures(capsys):
    """The metrics that the command has printed, by name."""
    found = re.findall(r"^(\S+) +(-?[\d.]+(?:e[+-]\d+)?|nan)\b", capsys.readouterr().out, re.MULTILINE)
    return {name: float(value) for name, value in found}


LENGTH = "[{function: length, name: characters, kwargs: {unit: characters}}]"
BARE = ["--prompts.text", "A film", "--samples", "4", "--max_new_tokens", "4", "--dtype", "float32"]


def test_a_run_is_judged_by_another_reward_and_by_other_prompts(run, capsys):
    folder, _ = run
    assert main(["evaluate", str(folder), "--reward", LENGTH, *BARE[:-2]]) == 0
    other = figures(capsys)
    assert "reward/NEGATIVE" not in other
    assert other["reward"] == other["reward/characters"] > 1
    assert other["length"] <= 4
    assert "kl" in other, "its own reference is kept"


def test_any_model_is_evaluated_as_a_runs_policy_is(run, model_folders, tmp_path, capsys):
    """The policy's folder by itself, with the run's own settings and its base as the reference."""
    folder, _ = run
    own = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    metrics = {key: x for key, x in own.items() if key.startswith("eval/")}
    settings = ["--samples", "8", "--max_new_tokens", "12", "--dtype", folder.name, "--prompts.text"]
    settings += ["This movie was really", "--reward", "[{classifier: builtin:reviews}]"]
    out = tmp_path / "metrics.json"
    model = [str(folder / "policy"), "--reference", "builtin:reviews"]
    assert main(["evaluate", *model, *settings, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["metrics"] == pytest.approx(metrics, rel=1e-5)
    assert (written["model"], written["reference"]) == (model[0], "builtin:reviews")
    assert (written["sampling"]["samples"], written["seed"]) == (8, 1)
    assert main(["evaluate", str(folder), *settings]) == 0, "a run's folder is its policy"
    assert figures(capsys)["reward"] == pytest.approx(metrics["eval/reward"], rel=1e-3)


def test_the_kl_to_the_same_model_is_0_and_to_another_is_not(model_folders, capsys):
    bare = ["evaluate", str(model_folders["llama"]), "--reward", LENGTH, *BARE]
    told = refused(capsys, *bare[:-4], "--min_new_tokens", "30")
    assert told == "min_new_tokens is 30; it must be at most max_new_tokens, 24"
    assert main(bare) == 0
    assert "kl" not in figures(capsys)
    assert main([*bare, "--reference", str(model_folders["llama"])]) == 0
    assert figures(capsys)["kl"] == pytest.approx(0, abs=1e-4)
    assert main([*bare, "--reference", "builtin:reviews"]) == 0
    assert figures(capsys)["kl"] > 0.1


def test_the_seed_decides_what_is_sampled(model_folders, capsys):
    bare = ["evaluate", str(model_folders["gpt2"]), "--reward", LENGTH, *BARE, "--seed"]
    seen = []
    for seed in ("1", "1", "2"):
        assert main([*bare, seed]) == 0
        seen.append(figures(capsys))
    assert seen[0] == seen[1] != seen[2]


def test_settings_come_from_a_file_too(model_folders, tmp_path, capsys):
    file = tmp_path / "judge.yaml"
    file.write_text(f"reward: {LENGTH}\nprompts: {{text: A film}}\nsamples: 4\nmax_new_tokens: 4\n")
    assert main(["evaluate", str(model_folders["gpt2"]), "--config", str(file)]) == 0
    assert figures(capsys)["length"] <= 4


def test_a_run_of_another_trainer_is_its_policy_with_its_start_as_the_reference(run, tmp_path, capsys):
    """As `tokencredit sft` writes it: no prompts and no reward in its configuration."""
    folder, _ = run
    other = tmp_path / "sft"
    shutil.copytree(folder / "policy", other / "policy")
    (other / "config.yaml").write_text("model: {name: builtin:reviews, dtype: float32}\nsft: {loss_on: all}\n")
    assert main(["evaluate", str(other), "--reward", LENGTH, *BARE]) == 0
    assert "kl" in figures(capsys)
    assert "has no reward of its own; give --reward" in refused(capsys, "evaluate", str(other))
    (other / "config.yaml").write_text("model: {name: builtin:reviews}\nreward_model: {}\n")
    assert "as a reward it is {reward_model: " in refused(capsys, "evaluate", str(other), "--reward", LENGTH)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"max_position_embeddings": 20}, "whose context has 20 tokens; it must have at least the model's, 64"),
        (None, "whose tokenizer has other ids for"),
    ],
)
def test_a_reference_that_cannot_read_the_models_texts_is_refused(
    shape, message, model_folders, tokenizer, tokenizers, tmp_path, capsys
):
    tokenizer = tokenizer if shape else tokenizers["bytes"]
    random_lm("gpt2", tokenizer, **SHAPE | (shape or {})).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bare = [str(model_folders["gpt2"]), "--reward", LENGTH, *BARE, "--reference", str(tmp_path)]
    assert message in refused(capsys, "evaluate", *bare)


def evaluated(run, tmp_path, **changes):
    """Evaluate the run's policy with other settings."""
    folder, _ = run
    source = read_source(str(folder))
    return evaluate_source(replace(source, config=replace(source.config, **changes)))


def test_prompts_that_do_not_fit_are_refused_before_anything_is_sampled(run, tmp_path):
    with pytest.raises(ConfigError, match="max_new_tokens leaves no room for a prompt"):
        evaluated(run, tmp_path, ppo=UpdateConfig(micro_batch_tokens=40), eval=EvalConfig(samples=4, max_new_tokens=60))
    with pytest.raises(ConfigError, match="max_new_tokens leaves no room for a prompt"):
        evaluated(run, tmp_path, eval=EvalConfig(samples=4, max_new_tokens=128))


def test_held_out_prompts_are_all_that_is_read(run, tmp_path):
    held_out = EvalConfig(samples=4, max_new_tokens=4, text="A film")
    gone = PromptsConfig(dataset=str(tmp_path / "gone.jsonl"))
    assert "eval/reward" in evaluated(run, tmp_path, prompts=gone, eval=held_out)


def test_rewards_are_computed_outside_the_autocast_of_the_policy(run):
    _, trainer = run
    seen = []

    def look(completions, **columns):
        seen.append(torch.is_autocast_enabled("cpu"))
        return [0.0] * len(completions)

    honest, trainer.pipeline.terms = trainer.pipeline.terms, [Term("look", 1.0, look)]
    evaluate(trainer.pipeline, trainer.eval_prompts, trainer.args)
    trainer.pipeline.terms = honest
    assert seen == [False]


def test_a_missing_critic_is_refused(run, tmp_path):
    folder, _ = run
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "critic" / "value_head.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no critic, though critic\.kind of the run is separate"):
        load(tmp_path / "copy")
    base = load(folder, "base")
    assert "no critic" in repr(base)
    with pytest.raises(
        ConfigError, match=r"no trained critic here, and critic\.kind is separate; the policy/ and best/"
    ):
        base.values(" good", "A film")
    assert evaluate_source(read_source(str(tmp_path / "copy"))), "it needs none"


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
    assert "trainer.audit()" in told
    assert "to measure it: trainer.audit() in Python" in (folder / "report.html").read_text()
    assert "on the reward" in (folder / "report.html").read_text()
    assert "builtin:reviews: NEGATIVE" not in (folder / "report.html").read_text()
    assert "- train_dataset from Python: `" in (folder / "policy" / "README.md").read_text()
    assert main(["evaluate", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "was begun in Python with reward_funcs, train_dataset, which its folder does not hold" in told
    assert "give --reward '[{function: …}]' and --prompts.text or --prompts.dataset, or evaluate it there" in told
    assert "begun in Python with train_dataset, which" in refused(capsys, "evaluate", str(folder), "--reward", LENGTH)
    told = refused(capsys, "pairs", str(folder), "--reward", LENGTH, "--out", str(tmp_path / "pairs.jsonl"))
    assert told.endswith("does not hold; give --prompts.text or --prompts.dataset"), "no trainer makes pairs"
    told = refused(capsys, "limit", "--config", str(folder / "config.yaml"))
    assert told.startswith("the run of this configuration was begun in Python with reward_funcs, train_dataset")
    assert main(["evaluate", str(folder), "--reward", LENGTH, *BARE]) == 0
    assert "characters" in capsys.readouterr().out
    assert main(["generate", str(folder)]) == 2
    assert "does not hold prompts, which came from Python (train_dataset)" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "A film", "-n", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
