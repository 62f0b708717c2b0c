import json
import math
import signal
from shutil import which

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import warm
from helpers.configs import quiet, text_config
from helpers.files import read_events, read_jsonl, read_metrics, without_times
from helpers.models import SHAPE, changed_weights, copy_weights, random_lm
from helpers.proofs import proofs
from tokencredit import Callback
from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.core.rewards import KL_ROUNDING, kl_of_next
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.data import ClassifierTerm, PromptsConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import (
    AdvantageConfig,
    EvalConfig,
    KLConfig,
    OptimConfig,
    RunConfig,
    UpdateConfig,
)
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.terms import Term


def small(folder, **changes):
    run = RunConfig(dir=str(folder), iterations=2, samples=3, show_every=2, trackers=[], save_every=0)
    return text_config(folder, **{"run": run} | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    trainer = PPOTrainer(args=small(folder, run=RunConfig(dir=str(folder), iterations=2, samples=3, show_every=2)))
    return folder, trainer, trainer.train()


def test_a_run_leaves_its_files_and_a_summary_of_its_metrics(run):
    folder, _, summary = run
    assert {p.name for p in folder.iterdir()} == {
        ".lock",
        "config.yaml",
        "choices.json",
        "report.html",
        "metrics.jsonl",
        "parts.json",
        "samples.jsonl",
        "summary.json",
        "tensorboard",
        "policy",
        "critic",
        "checkpoints",
    }
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["iterations"] == 2
    assert summary["stopped_by"] == "iterations"
    metrics = read_metrics(folder)
    assert [m["iteration"] for m in metrics] == [1, 2]
    assert summary["reward_first"] == metrics[0]["reward"]
    assert summary["reward_last"] == metrics[1]["reward"]
    assert summary["kl_last"] == metrics[1]["kl"]


def test_the_policy_folder_loads_with_transformers_alone(run):
    folder, trainer, _ = run
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(folder / "policy")
    for name, parameter in trainer.policy.lm.state_dict().items():
        assert torch.equal(model.state_dict()[name], parameter), name
    assert [file.name for file in (folder / "policy").glob("*.safetensors")] == ["model.safetensors"]


def test_training_moves_policy_and_critic_and_not_the_reference(run):
    _, trainer, _ = run
    base = PPOTrainer(args=small("unused")).policy.lm.state_dict()
    assert all(torch.equal(base[k], v) for k, v in trainer.reference.lm.state_dict().items())
    assert not all(torch.equal(base[k], v) for k, v in trainer.policy.lm.state_dict().items())
    assert trainer.policy.critic.head[-1].weight.abs().sum() > 0


def test_the_columns_of_a_sample_agree(run):
    folder, trainer, _ = run
    samples = read_jsonl(folder / "samples.jsonl")
    assert [s["iteration"] for s in samples] == [1, 1, 1, 2, 2, 2]
    metrics = {row["iteration"]: row for row in read_metrics(folder)}
    for sample in samples:
        assert sample["new_logprobs"] != sample["logprobs"]
        columns = ("tokens", "logprobs", "new_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
        assert {len(sample[c]) for c in columns} == {len(sample["token_ids"])}
        kl = sum(sample["logprobs"]) - sum(sample["ref_logprobs"])
        assert sum(sample["rewards"]) == pytest.approx(sample["reward"] - trainer.args.kl.coef * kl, abs=1e-4)
        assert sample["returns"][-1] == pytest.approx(sample["rewards"][-1], abs=1e-5)
        assert metrics[sample["iteration"]]["advantage_std"] > 0
        text = trainer.tokenizer.decode(sample["token_ids"], skip_special_tokens=True)
        assert text == sample["completion"]


def test_the_last_sample_has_the_final_policys_logprobs(run):
    folder, trainer, _ = run
    sample = read_jsonl(folder / "samples.jsonl")[-1]
    prompt = trainer.tokenizer(sample["prompt"])["input_ids"]
    ids = torch.tensor([prompt + sample["token_ids"]])
    with torch.no_grad():
        logprobs = trainer.policy.lm(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()
    assert sample["new_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_without_samples_none_are_written(tmp_path):
    args = small(tmp_path / "run", run=RunConfig(dir=str(tmp_path / "run"), iterations=1, samples=0, trackers=[]))
    PPOTrainer(args=args).train()
    assert read_jsonl(tmp_path / "run" / "samples.jsonl") == []
    assert "Where the credit went" not in (tmp_path / "run" / "report.html").read_text()


def test_the_first_iteration_is_the_reference_itself(run):
    folder, *_ = run
    first = read_metrics(folder)[0]
    assert first["kl"] == pytest.approx(0, abs=1e-4)
    assert first["entropy"] == pytest.approx(-first["ref_logprob"], abs=1e-5)


def test_tensorboard_has_every_metric(run):
    folder, *_ = run
    events = EventAccumulator(str(folder / "tensorboard" / "tokencredit")).Reload()
    metrics = read_metrics(folder)
    for name, value in metrics[-1].items():
        if name != "iteration":
            assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert [e.step for e in events.Scalars("reward")] == [1, 2]


def test_another_seed_gives_another_run(run, tmp_path):
    PPOTrainer(args=small(tmp_path / "other", seed=2, run=quiet(tmp_path / "other", samples=1))).train()
    assert read_jsonl(tmp_path / "other" / "samples.jsonl")[0] != read_jsonl(run[0] / "samples.jsonl")[0]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_1_at_the_first_minibatch(model, dtype, model_folders, tmp_path):
    """Sampling and training agree: temperature, padding, dropout, number format."""
    args = small(
        tmp_path / "run",
        model=ModelConfig(name=str(model_folders[model]), dtype=dtype),
        prompts=PromptsConfig(text=["A", "This movie was really quite"]),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8, temperature=0.7),
        ppo=UpdateConfig(epochs=1, minibatches=1),
    )
    metrics, _ = PPOTrainer(args=args).iteration(1)
    assert metrics["first_ratio_error"] == pytest.approx(0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4)


def test_kl_coef_0_loads_no_reference(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path / "run", kl=KLConfig(coef=0.0)))
    summary = trainer.train()
    assert trainer.reference is None
    assert summary["kl_last"] is None
    assert "kl" not in read_metrics(tmp_path / "run")[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_gives_finite_advantages(estimator, tmp_path):
    args = small(
        tmp_path / "run",
        advantage=AdvantageConfig(estimator=estimator),
        critic=CriticConfig(kind="none" if ESTIMATORS[estimator].critic == "unused" else "shared"),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8, per_prompt=4),
    )
    trainer = PPOTrainer(args=args)
    batch, _ = trainer.credit.give(trainer.collect())
    acted = batch.rollout.mask
    assert batch.advantages[acted].isfinite().all()
    assert (batch.advantages[~acted] == 0).all()
    scores = batch.rewards.sum(1)
    if estimator == "leave_one_out":
        expected = scores - (scores.view(2, 4).sum(1, keepdim=True).expand(2, 4).flatten() - scores) / 3
        torch.testing.assert_close(batch.advantages[:, 0], expected)
    if estimator == "uniform":
        second, _ = trainer.credit.give(trainer.collect())
        torch.testing.assert_close(second.advantages[:, 0], second.rewards.sum(1) - scores.mean())


class KLAlone:
    """Of an objective, the KL alone."""

    additive = True

    def __init__(self, objective, rows):
        self.objective, self.rows, self.kl = objective, rows, []

    def __call__(self, now, at):
        places = self.rows.mask.flatten().nonzero().squeeze(1)[at]
        self.kl.append(self.objective.token_losses(now, self.rows, places).get("kl_in_update"))
        return torch.zeros(()) if self.kl[-1] is None else self.kl[-1].sum()


@pytest.mark.parametrize(
    ("place", "estimator"), [("both", "full"), ("loss", "k3"), *proofs(("loss", "k2"), ("loss", "full"))]
)
def test_kl_in_reward_or_loss(place, estimator, tmp_path):
    kl = KLConfig(coef=0.5, place=place, estimator=estimator)
    trainer = PPOTrainer(args=small(tmp_path / "run", kl=kl))
    trainer.iteration(1)
    batch, experience = trainer.credit.give(trainer.collect())
    scored, rollout = batch, batch.rollout
    with torch.no_grad():
        policy = trainer.policy.lm(torch.cat([rollout.prompt_ids, rollout.response_ids], 1)).logits
        reference = trainer.reference.lm(torch.cat([rollout.prompt_ids, rollout.response_ids], 1)).logits
        start = rollout.prompt_ids.shape[1] - 1
        p, q = (x[:, start:-1].log_softmax(-1) for x in (policy, reference))
        exact = (p.exp() * (p - q)).sum(-1)
        loss = KLAlone(trainer.learner.objective, experience)
        now = trainer.learner.passes.evaluate(trainer.learner.wrapped, experience.inputs, loss)
    paid = batch.rewards.clone()
    paid[range(8), rollout.mask.sum(1) - 1] -= scored.total_scores()
    later = -0.5 * kl_of_next(exact, rollout.mask) if place == "both" else torch.zeros_like(paid)
    torch.testing.assert_close(paid, later, atol=1e-5, rtol=1e-3)
    assert trainer.learner.objective.kl_coef == 0.5
    log_ratio = scored.reference.logprobs - rollout.logprobs
    expected = {"full": exact, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[estimator]
    torch.testing.assert_close(torch.cat(loss.kl), expected[rollout.mask], atol=2 * KL_ROUNDING, rtol=1e-3)
    torch.testing.assert_close(now.policy_loss, expected[rollout.mask].sum(), atol=1e-4, rtol=1e-3)


def test_an_adaptive_coefficient_follows_the_kl(tmp_path):
    kl = KLConfig(coef=0.1, target=1000.0, horizon=80)
    trainer = PPOTrainer(args=small(tmp_path / "run", kl=kl))
    trainer.train()
    coefs = [m["kl_coef"] for m in read_metrics(tmp_path / "run")]
    assert coefs == pytest.approx([0.1, 0.1 * (1 - 0.2 * 8 / 80)])


def test_with_an_adapter_the_reference_is_the_model_without_it(tmp_path):
    pytest.importorskip("peft")
    args = small(
        tmp_path / "run", model=ModelConfig(dtype="float32", lora=LoraConfig(rank=4)), optim=OptimConfig(lr=1e-2)
    )
    trainer = PPOTrainer(args=args)
    assert trainer.reference is trainer.policy, "no second copy in memory"
    base = PPOTrainer(args=small(tmp_path / "other")).policy
    trainer.train()
    scored = trainer.collect()
    rollout, reference = scored.rollout, scored.reference
    with torch.no_grad():
        expected = base(rollout.inputs(), temperature=1.0).logprobs
    acted = rollout.mask
    torch.testing.assert_close(reference.logprobs[acted], expected[acted], atol=1e-4, rtol=1e-4)
    assert (rollout.logprobs - reference.logprobs)[acted].abs().max() > 1e-2
    assert (tmp_path / "run" / "policy" / "adapter_config.json").is_file()


def test_a_run_with_checkpointing_and_dropout_trains(model_folders, tmp_path):
    model = ModelConfig(name=str(model_folders["gpt2"]), gradient_checkpointing=True, dropout=True)
    assert PPOTrainer(args=small(tmp_path / "run", model=model)).train()["iterations"] == 2


def test_learning_rates_rise_and_fall(tmp_path):
    optim = OptimConfig(lr=1e-4, warmup=1, schedule="linear", final_scale=0.0)
    run = quiet(tmp_path / "run", 4)
    few = RolloutConfig(batch_size=4, max_new_tokens=2)
    args = small(tmp_path / "run", optim=optim, critic=CriticConfig(lr=1e-3), run=run, rollout=few)
    PPOTrainer(args=args).train()
    metrics = read_metrics(tmp_path / "run")
    assert [m["lr"] for m in metrics] == pytest.approx([5e-5, 1e-4, 1e-4 * 2 / 3, 1e-4 / 3])
    assert [m["value_lr"] for m in metrics] == pytest.approx([10 * m["lr"] for m in metrics])


@pytest.mark.proof
def test_a_rewarded_token_becomes_more_frequent(model_folders, tmp_path):
    """The whole machine on a reward whose best answer is known: say as many e's as possible."""
    args = small(
        tmp_path / "run",
        model=ModelConfig(name=str(model_folders["gpt2"]), dtype="float32"),
        rollout=RolloutConfig(batch_size=32, max_new_tokens=8),
        kl=KLConfig(coef=0.0),
        optim=OptimConfig(lr=3e-3),
        run=RunConfig(dir=str(tmp_path / "run"), iterations=20),
    )
    trainer = PPOTrainer(args=args)
    trainer.pipeline.terms = [Term("e", 1.0, lambda prompts, completions: [float(c.count("e")) for c in completions])]
    summary = trainer.train()
    assert summary["reward_last"] > 1.5 * summary["reward_first"]


def test_evaluation_keeps_the_best_policy(tmp_path):
    evaluation = EvalConfig(every=1, samples=6, best_of=2, max_new_tokens=8)
    trainer = PPOTrainer(args=small(tmp_path / "run", eval=evaluation, optim=OptimConfig(lr=1e-3)))
    policies = []

    class Keep:
        def after_evaluation(self, trainer, metrics):
            policies.append({name: p.detach().clone() for name, p in trainer.policy.lm.state_dict().items()})

    trainer.stages.callbacks.append(Keep())
    trainer.train()
    metrics = read_metrics(tmp_path / "run")
    rewards = [m["eval/reward"] for m in metrics]
    for m in metrics:
        assert m["eval/best"] >= m["eval/reward"] == pytest.approx(m["eval/reward/NEGATIVE"])
        assert 1 <= m["eval/length"] <= 8
        assert 0 < m["eval/distinct"] <= 1
    assert trainer.record.best == max(rewards)
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best").state_dict()
    expected = policies[rewards.index(max(rewards))]
    assert all(torch.equal(best[name], weights) for name, weights in expected.items())


def test_an_evaluation_with_a_reward_that_is_not_finite_is_left_out(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path / "run", eval=EvalConfig(every=1, samples=4, max_new_tokens=4)))
    honest = trainer.pipeline.terms[0].function

    def judge(prompts, completions):
        return [math.nan] * 4 if len(completions) == 4 and trainer.record.history else honest(prompts, completions)

    trainer.pipeline.terms = [Term("odd", 1.0, judge)]
    trainer.train()
    assert ["eval/reward" in m for m in read_metrics(tmp_path / "run")] == [True, False]
    (event,) = read_events(tmp_path / "run")
    assert event.startswith("an evaluation is skipped: reward term 'odd' is nan")


def test_evaluation_does_not_disturb_training(run, tmp_path):
    evaluation = EvalConfig(every=1, samples=2, max_new_tokens=2, temperature=0.5)
    PPOTrainer(args=small(tmp_path / "run", eval=evaluation)).train()
    seen = [
        {k: v for k, v in m.items() if not k.startswith("eval/")} for m in without_times(read_metrics(tmp_path / "run"))
    ]
    assert seen == without_times(read_metrics(run[0]))


def test_the_arguments_of_trls_trainers(model_folders, tokenizer, tmp_path):
    """A loaded model, plain functions, data sets from Python, and columns that reach the reward."""
    model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    before = copy_weights(model)
    seen = []

    def wanted(prompts, completions, word, **columns):
        seen.append((prompts, word, sorted(columns)))
        return [float(w in c) for w, c in zip(word, completions, strict=True)]

    def short(completions, **columns):
        return [-len(c) / 100 for c in completions]

    name, model.config._name_or_path = model.config._name_or_path, ""
    with pytest.raises(ConfigError, match=r"model: the loaded model has no name .*; pass it as processing_class"):
        PPOTrainer(model=model, reward_funcs=short, args=small(tmp_path / "run"))
    model.config._name_or_path = name
    rows = [{"prompt": "A film", "word": "a"}, {"prompt": "This movie was", "word": "e"}]
    trainer = PPOTrainer(
        model=model,
        reward_funcs=[wanted, short],
        args=small(tmp_path / "run", eval=EvalConfig(every=2, samples=2, max_new_tokens=4)),
        train_dataset=rows,
        eval_dataset=rows[:1],
        processing_class=tokenizer,
    )
    trainer.train()
    assert sorted({*zip(seen[0][0], seen[0][1], strict=True)}) == [("A film", "a"), ("This movie was", "e")]
    assert {"completion_ids", "ref_logprobs"} <= set(seen[0][2])
    assert {"reward/wanted", "reward/short"} <= set(read_metrics(tmp_path / "run")[0])
    assert changed_weights(model, before), "it is trained in place"


def test_a_peft_configuration_from_python(model_folders, tmp_path):
    peft = pytest.importorskip("peft")
    trainer = PPOTrainer(
        str(model_folders["llama"]),
        args=small(tmp_path / "run"),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    assert trainer.reference is trainer.policy
    trained = [name for name, p in trainer.policy.lm.named_parameters() if p.requires_grad]
    assert trained
    assert all("q_proj.lora_" in name for name in trained)


def test_an_unreachable_hub_keeps_the_trained_policy(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"push_to_hub is 'not/a/name'; it must be a name such as me/policy"):
        PPOTrainer(
            args=small(tmp_path / "no", run=RunConfig(dir=str(tmp_path / "no"), push_to_hub="not/a/name"))
        ).train()
    monkeypatch.setattr("tokencredit.text.ppo_trainer.check_push", str)
    run = RunConfig(dir=str(tmp_path / "run"), iterations=1, push_to_hub="not/a/name")
    with pytest.raises(RunStopped, match=r"could not upload .*policy to the hub as 'not/a/name'.*hf upload not/a/name"):
        PPOTrainer(args=small(tmp_path / "run", run=run)).train()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")


def test_an_interrupted_run_is_not_uploaded_and_says_how_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tokencredit.text.ppo_trainer.check_push", str)

    class Interrupt(Callback):
        def before_update(self, trainer):
            signal.raise_signal(signal.SIGINT)

    run = RunConfig(dir=str(tmp_path / "run"), iterations=2, push_to_hub="not/a/name")
    with pytest.raises(KeyboardInterrupt):
        PPOTrainer(args=small(tmp_path / "run", run=run), callbacks=[Interrupt()]).train()
    *_, told, last = capsys.readouterr().out.splitlines()
    assert told == "not uploaded to not/a/name: the run is not at its end"
    again = f"with args.run.dir = '{tmp_path / 'run'}' (TRL's output_dir), and call"
    assert last == f"run your script again {again} trainer.train(resume_from_checkpoint=True)"


def test_out_of_memory_says_which_setting_to_lower_and_keeps_what_was_trained(tmp_path, monkeypatch):
    def generate(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    trainer = PPOTrainer(args=small(tmp_path / "run"))
    monkeypatch.setattr(type(trainer.pipeline.engine), "generate", generate)
    advice = r"out of memory in its rollout stage; lower rollout\.batch_size or rollout\.max_new_tokens"
    with pytest.raises(RunStopped, match=advice):
        trainer.train()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")


@pytest.mark.proof
def test_memory_that_runs_out_is_told_from_other_errors(tmp_path):
    """In a process that may have 1 GB of addresses more than its libraries take."""
    program = """
import os, resource, sys
from pathlib import Path
import tokencredit.text.ppo_trainer
from tokencredit.cli import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**30,) * 2)
sys.exit(main(sys.argv[1:]))
"""
    options = ["--rollout.batch_size", "60000", "--rollout.max_new_tokens", "4", "--run.dir", tmp_path / "run"]
    done = warm.python("-c", program, "train", *options)
    assert done.returncode == 1
    assert "out of memory in its rollout stage; lower rollout.batch_size or rollout.max_new_tokens" in done.stderr
    assert "Traceback" not in done.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")


def two_iterations(folder, **model):
    """With prompts and completions of different lengths."""
    trainer = PPOTrainer(
        args=small(
            folder,
            prompts=PromptsConfig(text=["A", "This movie was really quite", "The"]),
            rollout=RolloutConfig(batch_size=6, max_new_tokens=8),
            ppo=UpdateConfig(epochs=1, minibatches=2),
            model=ModelConfig(dtype="float32", **model),
            critic=CriticConfig(kind="separate", prefix_every=0),
        )
    )
    return [trainer.iteration(number) for number in (1, 2)]


def assert_same(run, other_run):
    """The same tokens and, to rounding, the same losses."""
    for (one, samples), (other, other_samples) in zip(run, other_run, strict=True):
        assert [s["token_ids"] for s in samples] == [s["token_ids"] for s in other_samples]
        for name in ("policy_loss", "value_loss", "loss", "kl", "reward", "grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name


def test_splitting_passes_does_not_change_a_run(tmp_path, monkeypatch):
    runs = []
    for overhead in (0, 10**6):
        monkeypatch.setattr("tokencredit.learn.minibatches.PASS_OVERHEAD", overhead)
        runs.append(two_iterations(tmp_path / str(overhead)))
    assert_same(*runs)


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("backend", [None, *proofs("eager", "aot_eager", "inductor")])
def test_compiled_or_not_a_run_is_the_same(backend, tokenizer, tmp_path, monkeypatch):
    """With one layer: each further one costs the compiler seconds and is compiled alike.

    Without a backend the passes are only what would be compiled. All backends take what PyTorch captures of the
    forward passes. The second captures backward passes too, and the third translates them into C++, for half a minute.
    """
    random_lm("gpt2", tokenizer, **SHAPE | {"num_hidden_layers": 1}).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    compiled, really = [], torch.compile

    def compile_by(function, **options):
        compiled.append(function)
        return function if backend is None else really(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_by)
    model = {"name": str(tmp_path / "model")}
    assert_same(
        two_iterations(tmp_path / "plain", **model), two_iterations(tmp_path / "compiled", compile=True, **model)
    )
    assert len(compiled) == 2, "policy and reference"


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"model\.compile needs a C\+\+ compiler"):
        PPOTrainer(args=small(tmp_path / "run", model=ModelConfig(compile=True)))


def odd_in(iterations, bad, honest):
    """A reward that is `bad` in these iterations."""
    calls = []

    def sometimes(prompts, completions):
        calls.append(1)
        return [bad] * len(prompts) if len(calls) in iterations else honest(prompts, completions)

    return [Term("odd", 1.0, sometimes)]


@pytest.mark.parametrize("bad", [math.nan, *proofs(math.inf)])
def test_non_finite_rewards_stop_the_run_and_keep_the_policy(bad, tmp_path, monkeypatch):
    monkeypatch.setattr("tokencredit.runs.recorder.MAX_BAD_STEPS", 2)
    run = tmp_path / "run"
    trainer = PPOTrainer(args=small(run, run=RunConfig(dir=str(run), iterations=9)))
    trainer.pipeline.terms = odd_in((2, 4, 5, 6), bad, trainer.pipeline.terms[0].function)
    with pytest.raises(
        RunStopped,
        match=r"stopped in iteration 5: reward term 'odd' is (nan|inf) for the text 'This movie .*, in 2 steps in a "
        r"row; see .*bad_steps/000005-1; resume with: tokencredit train --resume",
    ):
        trainer.train()
    metrics = read_metrics(run)
    assert [(m["iteration"], m["reward"] is None, m["bad_steps"]) for m in metrics] == [
        (1, False, 0),
        (2, True, 1),
        (3, False, 0),
        (4, True, 1),
    ]
    assert metrics[1]["steps"] == 0
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "numbers that are not finite"
    AutoModelForCausalLM.from_pretrained(run / "policy")
    assert sorted(p.name for p in (run / "bad_steps").iterdir()) == ["000002-1", "000004-1", "000005-1"]
    about = json.loads((run / "bad_steps" / "000002-1" / "about.json").read_text())
    batch = load_file(run / "bad_steps" / "000002-1" / "batch.safetensors")
    assert len(about["texts"]) == len(batch["response_ids"]) == trainer.args.rollout.batch_size
    assert (run / "checkpoints" / "000004").is_dir(), "nothing was learned in iteration 5, so it can begin again"


def test_a_run_in_which_every_step_was_skipped_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("tokencredit.runs.recorder.MAX_BAD_STEPS", 100)
    run = tmp_path / "run"
    trainer = PPOTrainer(args=small(run, run=RunConfig(dir=str(run), iterations=2)))
    before = {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}
    trainer.pipeline.terms = odd_in((1, 2), math.nan, trainer.pipeline.terms[0].function)
    with pytest.raises(RunStopped, match=r"^nothing was learned in 2 iterations: .*run/bad_steps holds the batches"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.named_parameters())
    assert [m["iteration"] for m in read_metrics(run)] == [1, 2]
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "numbers that are not finite"
    assert (run / "checkpoints" / "000002").is_dir()
    assert (run / "report.html").is_file()
    AutoModelForCausalLM.from_pretrained(run / "policy")


def test_a_loss_that_is_not_finite_names_the_text_and_leaves_the_weights_alone(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path / "run"))
    with torch.no_grad():
        trainer.policy.critic.head[-1].bias.fill_(1e30)  # its square is infinite in float32
    before = copy_weights(trainer.policy)
    with pytest.raises(
        RunStopped, match=r"stopped in iteration 1: value loss of the text 'This movie was really.*' is not finite"
    ):
        trainer.train()
    assert not changed_weights(trainer.policy, before)
    minibatch = load_file(tmp_path / "run" / "bad_steps" / "000001-1" / "batch.safetensors")
    assert {"prompt_ids", "response_ids", "advantages", "returns", "logprobs"} <= set(minibatch)


def test_a_policy_with_non_finite_outputs_stops_the_run(tmp_path):
    """Its weights are finite, but what they make of a text is not."""
    trainer = PPOTrainer(args=small(tmp_path / "run", run=RunConfig(dir=str(tmp_path / "run"), iterations=9)))

    class Overflow:
        def after_iteration(self, trainer, metrics, **results):
            if metrics["iteration"] == 1:
                with torch.no_grad():
                    trainer.policy.lm.get_input_embeddings().weight.mul_(1e25)

    trainer.stages.callbacks = [Overflow()]
    with pytest.raises(RunStopped, match=r"a log-probability, value or KL of a completion is not finite, in 3 steps"):
        trainer.train()
    metrics = read_metrics(tmp_path / "run")
    assert [(m["iteration"], m["bad_steps"]) for m in metrics] == [(1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": [ClassifierTerm(classifier="builtin:reviews", label="BAD")]}, "BAD"),
        ({"run": {"trackers": ["wandb"]}}, r"run\.trackers needs wandb, which is not installed: pip install wandb"),
    ],
)
def test_a_refused_setting_leaves_no_folder(changes, message, tmp_path):
    run = RunConfig(dir=str(tmp_path / "run"), **changes.get("run", {}))
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=small(tmp_path / "run", **changes | {"run": run}))
    assert not (tmp_path / "run").exists()
