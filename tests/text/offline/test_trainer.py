"""Runs that learn from a data set, and what they hand over."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

import tokencredit as tc
from helpers import forking
from helpers.commands import COMMAND, refused
from helpers.files import read_metrics, without_times
from helpers.models import SHAPE, random_lm
from helpers.proofs import proofs
from helpers.runs import assert_same
from helpers.warm import together
from tokencredit.cli import main
from tokencredit.errors import ConfigError, RunComplete, RunStopped
from tokencredit.report.reading import read_run
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig
from tokencredit.text.offline.offline_trainer import OfflineTrainer
from tokencredit.text.rewards.reward_models import load

pytestmark = pytest.mark.slow
KINDS = {"sft": SFTConfig, "reward-model": RewardModelConfig, "dpo": DPOConfig}


@pytest.fixture
def data(tmp_path, answers, preferences):
    """The data set of each command."""
    files = {}
    for command, rows in {"sft": answers, "reward-model": preferences, "dpo": preferences}.items():
        files[command] = tmp_path / f"{command}.jsonl"
        files[command].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def settings(folder, **more):
    return {
        "model.dtype": "float32",
        "data.batch_size": 4,
        "optim.lr": 1e-3,
        "run": {"dir": str(folder), "iterations": 4, "trackers": [], "save_every": 2},
    } | more


def flags(values):
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def options(folder, file, **more):
    given = {"data.dataset": str(file), "run.dir": str(folder), "run.iterations": 4, "run.save_every": 2}
    return flags(
        {"model.dtype": "float32", "data.batch_size": 4, "optim.lr": 1e-3, "run.trackers": [], **given, **more}
    )


@pytest.mark.parametrize("command", ["sft", *proofs("reward-model", "dpo")])
def test_a_run_learns_and_leaves_a_run_folder(command, data, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main([command, *options(folder, data[command], **{"data.held_out": 0.25})]) == 0
    shown = capsys.readouterr().out
    assert "data    9 rows of" in shown
    assert "3 held out" in shown
    run = read_run(folder)
    assert [row["iteration"] for row in run.metrics] == list(range(1, 5))
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert run.metrics[-1]["eval/loss"] < run.metrics[0]["loss"]
    assert "eval/loss" not in run.metrics[0]
    assert run.summary["stopped_by"] == "iterations"
    saved = "reward_model" if command == "reward-model" else "policy"
    kind = AutoModelForSequenceClassification if command == "reward-model" else AutoModelForCausalLM
    assert kind.from_pretrained(folder / saved).config.model_type == "gpt2"
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "metrics.jsonl", "report.html", "checkpoints"}
    assert [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")] == []
    assert main(["report", str(folder)]) == main(["doctor", str(folder)]) == 0


@pytest.mark.parametrize("command", ["sft", *proofs("reward-model", "dpo")])
def test_a_resumed_run_is_the_same_to_the_last_bit(command, data, tmp_path):
    more = {"run.iterations": 2, "run.save_every": 1}
    lora = {} if command == "reward-model" else {"model.lora.rank": 2, "model.lora.dropout": 0.2}
    if command == "dpo":  # texts of many lengths, so that log-probs depend on who shares a micro-batch
        rows = [
            {"prompt": "It is", "chosen": " bad" * (1 + i % 7), "rejected": " good" * (1 + i % 5)} for i in range(40)
        ]
        data[command].write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([command, *options(whole, data[command], **lora, **more)]) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "000002")
    (cut / "summary.json").unlink()
    assert main([command, "--resume", str(cut)]) == 0
    assert_same(whole, cut)


def test_epochs_become_iterations(answers, tmp_path):
    config = SFTConfig.from_dict(
        settings(tmp_path / "run", **{"data.epochs": 2, "run": {"dir": str(tmp_path / "run")}})
    )
    trainer = OfflineTrainer(config, train_dataset=answers)
    assert trainer.steps == 6
    passes = [[tuple(row["input_ids"]) for _ in range(3) for row in trainer._next_batch()] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(tuple(row["input_ids"]) for row in trainer.examples)
    assert passes[0] != passes[1]
    OfflineTrainer(config, train_dataset=answers).train()
    with pytest.raises(RunComplete, match=r"all its 6 iterations; raise data\.epochs to continue \(it is 2\)"):
        OfflineTrainer(config, train_dataset=answers).train(resume_from_checkpoint=True)
    config = replace(config, data=replace(config.data, batch_size=2))
    with pytest.raises(ConfigError, match=r"data\.batch_size is 2, and this run read 24 rows in 6 iterations; epochs"):
        OfflineTrainer(config, train_dataset=answers).train(resume_from_checkpoint=True)


def test_a_step_that_is_not_finite_is_skipped_and_kept(answers, tmp_path):
    trainer = OfflineTrainer(SFTConfig.from_dict(settings(tmp_path / "run")), train_dataset=answers)
    trainer.model.lm.transformer.ln_f.weight.data[0] = math.nan
    with pytest.raises(RunStopped, match=r"not finite, in 3 steps in a row"):
        trainer.train()
    assert len(list((tmp_path / "run" / "bad_steps").iterdir())) == 3


def test_other_data_in_python_are_told_from_those_of_the_command(answers, data, tmp_path):
    config = SFTConfig.from_dict(settings(tmp_path / "run"))
    OfflineTrainer(config, train_dataset=answers, eval_dataset=answers[:2]).train()
    assert "eval/loss" in read_metrics(tmp_path / "run")[-1]
    with pytest.raises(ConfigError, match=r"data\.dataset is missing"):
        OfflineTrainer(config)
    longer = replace(config, run=replace(config.run, iterations=5))
    with pytest.raises(ConfigError, match=r"^the rows to train on, or those held out, are not those"):
        OfflineTrainer(longer, train_dataset=answers).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("command", KINDS)
def test_mistakes_leave_nothing_behind(command, data, tmp_path, capsys):
    assert refused(capsys, command).startswith("data.dataset is missing; give a .jsonl")
    missing = options(tmp_path / "run", tmp_path / "none.jsonl")
    assert refused(capsys, command, *missing).endswith("none.jsonl', which does not exist")
    assert refused(
        capsys, command, *options(tmp_path / "run", data[command], **{"data.column": "question"})
    ).startswith("data.column is 'question'; the columns of")
    assert not (tmp_path / "run").exists()


def test_an_adapter_from_sft_goes_on_in_a_reward_model_in_ppo_with_that_reward_and_in_dpo(data, tmp_path):
    sft, rm, ppo, dpo = (tmp_path / name for name in ("sft", "rm", "ppo", "dpo"))
    assert main(["sft", *options(sft, data["sft"], **{"run.iterations": 1, "model.lora.rank": 2})]) == 0
    assert (sft / "policy" / "adapter_config.json").is_file()
    start = {"model.name": str(sft / "policy"), "run.iterations": 1, "optim.lr": 1e-12}
    assert main(["reward-model", *options(rm, data["reward-model"], **start)]) == 0
    from tokencredit.text.models.model_loading import resolve

    name = "transformer.h.0.attn.c_attn.weight"
    before = load_file(f"{resolve('builtin:reviews', 'policy')}/model.safetensors")[name]
    change = load_file(rm / "reward_model" / "model.safetensors")[name] - before
    assert 1e-4 < change.norm() < before.norm()
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2, "it is the adapter's"
    reward = json.dumps([{"reward_model": str(rm / "reward_model"), "name": "learned"}])
    small = flags({"rollout.batch_size": 8, "rollout.max_new_tokens": 6, "run.iterations": 1, "run.trackers": []})
    start = ["--model.name", str(sft / "policy"), "--reward", reward, *small]
    assert main(["train", *start, "--run.dir", str(ppo)]) == 0
    assert abs(read_metrics(ppo)[0]["reward"]) > 0
    start = {"model.name": str(ppo / "policy"), "run.iterations": 1}
    assert main(["dpo", *options(dpo, data["dpo"], **start)]) == 0
    assert (dpo / "policy" / "adapter_config.json").is_file()


@pytest.mark.parametrize("kind_of_model", ["llama", *proofs("gemma", "gpt2", "qwen3", "gpt_neox")])
def test_an_architecture_of_each_kind(kind_of_model, model_folders, answers, preferences, tmp_path):
    for kind, rows in ((SFTConfig, answers), (RewardModelConfig, preferences), (DPOConfig, preferences)):
        more = {"model.name": str(model_folders[kind_of_model])}
        more["run"] = {"dir": str(tmp_path / kind.__name__), "iterations": 1, "trackers": []}
        config = kind.from_dict(settings(tmp_path / kind.__name__, **more))
        OfflineTrainer(config, train_dataset=rows).train()
        losses = [row["loss"] for row in read_metrics(tmp_path / kind.__name__)]
        assert all(map(math.isfinite, losses))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("command", ["sft", *proofs("dpo")])  # means over tokens; rows
def test_two_processes_train_as_one_does(command, data, tmp_path):
    more = {"data.held_out": 0.25, "data.micro_batch": 2, "run.iterations": 2}
    assert main([command, *options(tmp_path / "one", data[command], **more)]) == 0
    arguments = options(tmp_path / "two", data[command], **more)
    done = together(2, *COMMAND, command, *arguments, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iteration 2/2") == 1
    one, two = (without_times(read_metrics(tmp_path / name)) for name in ("one", "two"))
    for alone, shared in zip(one, two, strict=True):
        assert alone.keys() == shared.keys()
        for name, value in alone.items():
            if (name, alone["iteration"]) == ("accuracy", 1):
                continue  # DPO's margins are 0 then, up to rounding
            assert shared[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_runs_are_compared_and_kept_apart_like_their_configurations(data, tmp_path, capsys):
    dpo, sft = (str(tmp_path / command) for command in ("dpo", "sft"))
    for command, run in (("dpo", dpo), ("sft", sft)):
        assert main([command, *options(run, data[command], **{"run.iterations": 1})]) == 0
    assert main(["compare", dpo, shutil.copytree(dpo, f"{dpo}2"), "--out", str(tmp_path / "page")]) == 0
    capsys.readouterr()
    assert main(["compare", dpo, sft, "--out", str(tmp_path / "mixed")]) == 2
    assert "is a run of tokencredit dpo and" in capsys.readouterr().err
    assert main(["compare", dpo, sft, "--metric", "loss", "--out", str(tmp_path / "mixed")]) == 0
    capsys.readouterr()
    said = refused(capsys, "sft", "--config", f"{dpo}/config.yaml")
    assert said.endswith("config.yaml: it is a configuration of tokencredit dpo")


@pytest.mark.proof  # above: epochs; tools/sweep/test_runner.py: finished runs are left alone
def test_a_sweep_by_epochs_is_finished_once(data, tmp_path, capsys):
    sweep = tmp_path / "sweep.yaml"
    base = {"data.dataset": str(data["sft"]), "data.epochs": 1, "run.trackers": [], "model.dtype": "float32"}
    sweep.write_text(
        json.dumps({"kind": "sft", "dir": str(tmp_path / "out"), "base": base, "variants": {"a": {}}, "seeds": [1]})
    )
    done = forking.python("tokencredit.cli", "sweep", sweep)
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in (tmp_path / "out").rglob("summary.json"))
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert main(["sweep", str(sweep)]) == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before


def test_other_rows_are_noticed_when_a_run_goes_on(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["sft", *options(run, data["sft"], **{"data.held_out": 0.25, "run.iterations": 1})]) == 0
    capsys.readouterr()
    said = refused(capsys, "sft", "--resume", str(run), "--run.iterations", "6", "--data.held_out", "0.5")
    assert said.startswith("the rows to train on, or those held out, are not those that this run began with")
    other = refused(capsys, "sft", "--resume", str(run), "--run.iterations", "6", "--sft.loss_on", "all")
    assert other.startswith("sft.loss_on is 'all', but this run was begun with 'completion'; it cannot change any more")
    file = data["sft"]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert refused(capsys, "sft", "--resume", str(run), "--run.iterations", "6") == said


def test_a_resumed_run_reads_on_where_it_was_whatever_its_batches(answers, tmp_path):
    rows = [{"prompt": f"Film {i}", "completion": " bad."} for i in range(16)]
    config = SFTConfig.from_dict(settings(tmp_path / "run", **{"run": {"dir": str(tmp_path / "run"), "iterations": 2}}))
    OfflineTrainer(config, train_dataset=rows).train()
    more = {"data.batch_size": 8, "run": {"dir": str(tmp_path / "run"), "iterations": 3}}
    trainer = OfflineTrainer(SFTConfig.from_dict(settings(tmp_path / "run", **more)), train_dataset=rows)
    seen = [tuple(row["input_ids"]) for row in (trainer.examples[trainer._position(i)] for i in range(8))]
    read, step = [], trainer._step

    def noted(number, batch):
        read.extend(tuple(row["input_ids"]) for row in batch)
        return step(number, batch)

    trainer._step = noted
    trainer.train(resume_from_checkpoint=True)
    assert len(set(read) | set(seen)) == 16
    assert dict(trainer.overview())["run"].endswith(": 1 × the data"), "2 × 4 rows and 8"


def test_dpo_that_goes_on_after_an_error_keeps_its_reference(preferences, tmp_path):
    run = {"dir": str(tmp_path / "run"), "iterations": 3, "save_every": 1, "trackers": []}
    trainer = OfflineTrainer(DPOConfig.from_dict(settings(tmp_path / "run", run=run)), train_dataset=preferences)
    step = trainer._step

    def fails(number, batch):
        if number == 2:
            raise OSError("the disk is gone")
        return step(number, batch)

    trainer._step = fails
    with pytest.raises(RunStopped, match="the disk is gone"):
        trainer.train()
    before = [dict(row) for row in trainer.examples]
    trainer._step = step
    trainer.train(resume_from_checkpoint=True)
    assert [dict(row) for row in trainer.examples] == before


def test_dpo_is_evaluated_before_training_and_trains_as_without(preferences, tmp_path):
    runs = []
    for name in ("evaluated", "plain"):
        trainer = OfflineTrainer(DPOConfig.from_dict(settings(tmp_path / name)), preferences, preferences[:3])
        if name == "evaluated":
            assert trainer.evaluate()["loss"] == pytest.approx(math.log(2))
        trainer.train()
        runs.append(without_times(read_metrics(tmp_path / name)))
    assert runs[0] == runs[1]


def test_a_reward_model_is_not_begun_with_random_layers(data, tmp_path, tokenizer, capsys):
    from safetensors.torch import save_file

    lm = random_lm("gpt2", tokenizer, **SHAPE)
    lm.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"
    kept = {name: x for name, x in load_file(file).items() if ".h.1." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    given = options(tmp_path / "rm", data["reward-model"], **{"model.name": str(tmp_path / "half")})
    capsys.readouterr()  # the bar of saving
    assert "lack transformer.h.1." in refused(capsys, "reward-model", *given)


def test_another_head_is_replaced_with_a_word(preferences, tmp_path):
    from tokencredit.text.models.model_loading import resolve

    config = RewardModelConfig.from_dict(settings(tmp_path, **{"model.name": resolve("builtin:reviews", "sentiment")}))
    trainer = OfflineTrainer(config, train_dataset=preferences)
    assert any("is replaced by a new one with one score" in note for note in trainer.notes)


def test_held_out_rows_come_from_one_place(answers, tmp_path, capsys, data):
    config = SFTConfig.from_dict(settings(tmp_path / "run", **{"data.held_out": 0.5}))
    with pytest.raises(ConfigError, match=r"eval_dataset and data\.held_out are both given"):
        OfflineTrainer(config, train_dataset=answers, eval_dataset=answers)
    config = SFTConfig.from_dict(settings(tmp_path / "run", **{"data.dataset": str(data["sft"])}))
    with pytest.raises(ConfigError, match=r"train_dataset and data\.dataset are both given"):
        OfflineTrainer(config, train_dataset=answers)
    config = SFTConfig.from_dict(settings(tmp_path / "run", **{"eval.every": 2}))
    with pytest.raises(ConfigError, match=r"eval\.every is 2, and no rows are held out"):
        OfflineTrainer(config, train_dataset=answers)
    with pytest.raises(ConfigError, match=r"no rows are held out; set data\.held_out or eval\.dataset"):
        OfflineTrainer(SFTConfig(), train_dataset=answers).evaluate()
    with pytest.raises(ConfigError, match=r"eval_dataset is of type dict; it must be a datasets\.Dataset"):
        OfflineTrainer(SFTConfig(), train_dataset=answers, eval_dataset={"train": answers})
    OfflineTrainer(config, train_dataset=answers, eval_dataset=answers[:3]).train()
    rows = read_metrics(tmp_path / "run")
    assert ["eval/perplexity" in row for row in rows] == [False, True, False, True]
    capsys.readouterr()
    said = refused(capsys, "sft", *options(tmp_path / "other", data["sft"]), "--eval.every", "2")
    assert said.startswith("eval.every is 2, which has no effect without data.held_out or eval.dataset")


def test_a_model_without_an_end_is_refused(tmp_path, tokenizer, answers):
    random_lm("gpt2", tokenizer, **SHAPE).save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        OfflineTrainer(SFTConfig.from_dict({"model.name": str(tmp_path / "lm")}), train_dataset=answers)


@pytest.mark.parametrize("lora", [*proofs(0), 2])
def test_a_run_is_generated_from_evaluated_and_inspected(lora, data, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert (
        main(["dpo", *options(run, data["dpo"], **{"model.lora.rank": lora, "run.iterations": 1, "optim.lr": 0.1})])
        == 0
    )
    capsys.readouterr()
    assert "has no prompts of its own; give --prompt, --prompts.text or" in refused(capsys, "generate", run)
    assert main(["generate", run, "--prompt", "The film is", "-n", "2"]) == 0
    assert main(["generate", run, "--base", "--prompt", "The film is", "-n", "2"]) == 0
    assert capsys.readouterr().out.count("The film is") == 4
    given = ["--prompts.text", "The film is", "--reward", "[{classifier: builtin:reviews}]", "--samples", "8"]
    assert main(["evaluate", run, *given, "--reference", "builtin:reviews"]) == 0
    shown = capsys.readouterr().out
    assert float(re.search(r"^kl +([\d.]+)", shown, re.MULTILINE)[1]) > 0
    assert main(["inspect", run, "--prompt", "The film is"]) == 0
    assert json.loads((tmp_path / "run" / "inspect.json").read_text())["critic"] is None
    assert tc.load(run).generate("The film is", n=2) == tc.load(run).generate("The film is", n=2)


@pytest.mark.parametrize(("repeated", "noted"), [(2, True), (1, False)])
def test_completions_that_repeat_their_prompts_are_noted(repeated, noted):
    rows = [{"prompt": "A film", "completion": "A film was good." if i < repeated else " was good."} for i in range(3)]
    notes = OfflineTrainer(SFTConfig(), train_dataset=rows).notes
    told = "rows of data have the whole prompt at the start of 'completion' again, so the model reads it twice"
    assert any(told in note for note in notes) == noted


@pytest.mark.parametrize("config", [DPOConfig, RewardModelConfig])
def test_equal_completions_are_noted(config):
    rows = [{"prompt": "A film", "chosen": " was good.", "rejected": text} for text in (" was good.", " was bad.")]
    assert "1 of 2 rows of data have the same tokens" in " ".join(OfflineTrainer(config(), train_dataset=rows).notes)


@pytest.mark.parametrize("quantization", ["nf4", *proofs("int8", None)])
def test_an_adapter_on_a_quantised_model_learns_in_float32(quantization, model_folders, answers, preferences, tmp_path):
    pytest.importorskip("bitsandbytes")
    for kind, rows in ((SFTConfig, answers), (RewardModelConfig, preferences), (DPOConfig, preferences)):
        folder = tmp_path / kind.__name__
        own = {"model.name": str(model_folders["llama"]), "model.lora.rank": 2, "model.quantization": quantization}
        own["run"] = {"dir": str(folder), "iterations": 1, "trackers": []}
        trainer = OfflineTrainer(kind.from_dict(settings(folder, **own)), train_dataset=rows)
        assert {p.dtype for p in trainer.parameters} == {torch.float32}
        assert sum(p.numel() for p in trainer.parameters) < 20_000
        trainer.train()
        assert math.isfinite(read_metrics(folder)[0]["loss"])
    reward = tmp_path / "RewardModelConfig" / "reward_model"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in reward.iterdir()}
    model, _ = load(str(reward), "cpu")
    trained = load_file(reward / "adapter_model.safetensors")
    assert torch.equal(model.score.weight, trained["base_model.model.score.weight"])


def test_a_reward_models_adapter_scores_as_trained_and_above_a_merged_one_is_saved_whole(
    model_folders, preferences, tmp_path
):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    sft = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    sft.save_pretrained(tmp_path / "sft")
    for name, files in ((model_folders["llama"], "adapter_model"), (tmp_path / "sft", "model")):
        folder = tmp_path / files
        keys = {"model.name": str(name), "model.lora.rank": 2, "run": {"dir": str(folder), "iterations": 1}}
        trainer = OfflineTrainer(RewardModelConfig.from_dict(settings(folder, **keys)), train_dataset=preferences)
        trainer.train()
        assert (folder / "reward_model" / f"{files}.safetensors").is_file()
        saved, _ = load(str(folder / "reward_model"), "cpu")
        own, ids = trainer.model.lm.eval(), torch.tensor([[5, 6, 7, 8]])
        saved.config.pad_token_id = own.config.pad_token_id
        torch.testing.assert_close(saved(ids).logits, own(ids).logits, atol=1e-5, rtol=1e-4)
    before, _ = load(name := str(tmp_path / "adapter_model" / "reward_model"), "cpu")
    own = {"model.name": name, "run": {"dir": str(tmp_path / "again"), "iterations": 1}}
    again = OfflineTrainer(RewardModelConfig.from_dict(settings(tmp_path / "again", **own)), train_dataset=preferences)
    assert any("is merged, and its score head is trained further" in note for note in again.notes)
    before.config.pad_token_id = again.model.lm.config.pad_token_id
    torch.testing.assert_close(again.model.lm(ids).logits, before(ids).logits, atol=1e-5, rtol=1e-4)
    changes = {"model.name": str(tmp_path / "sft"), "model.lora.rank": 2, "model.quantization": "nf4"}
    config = RewardModelConfig.from_dict(settings(tmp_path / "run", **changes))
    with pytest.raises(ConfigError, match=r"model\.quantization is nf4, and .* is an adapter, which is merged"):
        OfflineTrainer(config, train_dataset=preferences)


def test_a_reward_model_begins_with_a_value_head(model_folders, preferences, tmp_path):
    folder = shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    weight = torch.linspace(-1, 1, 32)[None]
    save_file(
        {"v_head.summary.weight": weight, "v_head.summary.bias": torch.ones(1)}, folder / "value_head.safetensors"
    )
    config = RewardModelConfig.from_dict(settings(tmp_path / "run", **{"model.name": str(folder)}))
    trainer = OfflineTrainer(config, train_dataset=preferences)
    assert any("the score head begins with v_head.summary.weight of" in note for note in trainer.notes)
    assert torch.equal(trainer.model.lm.score.weight, weight)
    assert trainer.model.lm.score.bias is None


def test_a_quantised_start_without_an_adapter_is_refused_in_one_message(model_folders, tokenizer, answers, tmp_path):
    pytest.importorskip("bitsandbytes")
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": "cpu"}}
    AutoModelForCausalLM.from_pretrained(model_folders["llama"], **options).save_pretrained(tmp_path / "int8")
    tokenizer.save_pretrained(tmp_path / "int8")
    for kind in (RewardModelConfig, SFTConfig):
        config = kind.from_dict(settings(tmp_path / "run", **{"model.name": str(tmp_path / "int8")}))
        with pytest.raises(ConfigError, match=r"are quantised, and only an adapter can be trained on them"):
            OfflineTrainer(config, train_dataset=answers)
