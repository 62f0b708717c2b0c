"""Scripts for TRL with one line changed: their imports are from tokencredit.trl."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    HfArgumentParser,
    TrainerCallback,
)

from helpers.files import read_metrics
from tokencredit.cli import main
from tokencredit.errors import ConfigError, RunComplete, RunStopped
from tokencredit.settings.training import AuditConfig
from tokencredit.text.models.model_loading import resolve
from tokencredit.trl import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    PPOv2Config,
    create_reference_model,
    respond_to_batch,
)
from tokencredit.trl.arguments import RewardOfIds
from tokencredit.trl.config import further, settings_of
from tokencredit.trl.trainers import SteppingTrainer

TEXTS = ["This movie was", "The actors", "Honestly", "I"] * 2
POLICY = resolve("builtin:reviews", "policy")


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stepping(tokenizer, model=None, **settings):
    """A trainer of TRL up to 0.11 over eight prompts, as its sentiment notebook makes it."""
    rows = [{"input_ids": torch.tensor(tokenizer(text)["input_ids"]), "query": text} for text in TEXTS]
    config = PPOConfig(**{"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3} | settings)
    model = model or AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    collate = lambda data: {key: [row[key] for row in data] for key in data[0]}  # noqa: E731
    return PPOTrainer(config, model, None, tokenizer, dataset=rows, data_collator=collate)


def epoch(trainer):
    """One pass over the prompts, with a reward for short responses; the statistics of its steps."""
    lengths, found = LengthSampler(3, 6), []
    for batch in trainer.dataloader:
        queries = batch["input_ids"]
        responses = trainer.generate(queries, return_prompt=False, length_sampler=lengths, do_sample=True, top_k=0.0)
        batch["response"] = trainer.tokenizer.batch_decode(responses)
        scores = [torch.tensor(-len(text) / 100) for text in batch["response"]]
        found.append(trainer.step(queries, responses, scores))
        trainer.log_stats(found[-1], batch, scores)
    return found


def test_the_loop_of_0_11_runs_with_its_statistics_and_saves(here, tokenizer):
    trainer = stepping(tokenizer)
    first, second = epoch(trainer)
    header = dict(trainer.trainer.overview())
    assert "prompts" not in header, "those of the script, not the default"
    assert header["run"].endswith(", iterations of 4 completions"), "whose number the script decides"
    assert abs(first["objective/kl"]) < 1e-4
    assert first["objective/kl_coef"] == 0.2
    assert first["ppo/mean_scores"] < 0
    assert {"ppo/loss/total", "ppo/policy/clipfrac", "ppo/val/vpred", "objective/logprobs"} <= second.keys()
    assert trainer.accelerator.device == trainer.current_device
    one = trainer.generate(torch.tensor(tokenizer("The film")["input_ids"]), max_new_tokens=3, do_sample=True)
    assert one.shape[0] == 1
    both = trainer.generate([one[0]], generate_ref_response=True, return_prompt=False, max_new_tokens=2)
    assert [len(rows) for rows in both] == [1, 1]
    assert respond_to_batch(trainer.model, one, txt_len=4).shape == (1, 4)
    trainer.save_pretrained("saved")
    AutoModelForCausalLM.from_pretrained("saved")
    assert (here / "saved-critic" / "value_head.safetensors").is_file()
    (folder,) = (here / "runs").iterdir()
    with pytest.raises(RunStopped, match=rf"^could not upload runs/{folder.name}/policy to the hub as 'me/it'"):
        trainer.push_to_hub("me/it", private=True)
    assert (folder / "policy" / "model.safetensors").is_file()
    summary = trainer.close()
    assert summary["stopped_by"] == "close()"
    assert [row["iteration"] for row in read_metrics(folder)] == [1, 2]
    card = (folder / "policy" / "README.md").read_text(encoding="utf-8")
    assert "- prompts and completions from calls in Python\n" in card
    assert "- reward: scores from calls in Python\n" in card


def test_a_seed_gives_the_same_rows_and_responses(here, tokenizer):
    found = []
    for seed in (7, 7, 8):
        trainer = stepping(tokenizer, seed=seed, init_kl_coef=0.0, adap_kl_ctrl=False)
        found.append([stats["ppo/mean_scores"] for stats in epoch(trainer) + epoch(trainer)])
        stats = epoch(trainer)[0]
        assert not {"objective/kl", "objective/kl_dist"} & stats.keys(), "there is no reference"
        trainer.close()
    assert found[0] == found[1] != found[2]
    assert found[0][:2] != found[0][2:], "another order in each epoch"


def test_a_response_ends_at_any_end_of_the_model(here, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    others = list(range(100, len(tokenizer), 2))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *others]
    trainer = stepping(tokenizer, model)
    query = torch.tensor(tokenizer("This movie was")["input_ids"])
    for row in trainer.generate([query] * 4, return_prompt=False, max_new_tokens=8, do_sample=True):
        assert not set(row[:-1].tolist()) & {tokenizer.eos_token_id, *others}, "there is no padding"
    trainer.close()


@torch.no_grad()
def logprob(model, query, response):
    """Log-probability of a response under the policy."""
    logits, *_ = model(input_ids=torch.cat([query, response])[None])
    logprobs = logits[0, len(query) - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(1, response[:, None]).sum())


def test_a_step_of_the_loop_makes_responses_with_high_scores_likelier(here, tokenizer):
    trainer = stepping(tokenizer)
    queries = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS[:4]]
    responses = [torch.tensor(tokenizer(text)["input_ids"]) for text in (" good", " great fun", " bad", " awful stuff")]
    before = [logprob(trainer.model, *pair) for pair in zip(queries, responses, strict=True)]
    trainer.step(queries, responses, [1.0, 1.0, -1.0, -1.0])
    after = [logprob(trainer.model, *pair) for pair in zip(queries, responses, strict=True)]
    good, bad = [sum(after[part]) - sum(before[part]) for part in (slice(2), slice(2, 4))]
    assert good > 0 > bad
    trainer.close()


def test_an_adapter_scores_and_another_is_trained(here, tokenizer):
    base = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1)
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, fan_in_fan_out=True)).save_pretrained("reward")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        POLICY, peft_config=LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True), reward_adapter="reward"
    )
    trainer = stepping(tokenizer, model)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    scores = model.compute_reward_score(torch.tensor([tokenizer("A text")["input_ids"]]))
    assert scores.shape[::2] == (1, 1)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == trained
    assert all("reward" not in name for name in trained)
    epoch(trainer)
    trainer.save_pretrained("saved")
    assert json.loads((here / "saved" / "adapter_config.json").read_text())["r"] == 2
    ids = torch.tensor(tokenizer("A text")["input_ids"])
    values = trainer.trainer.adopt([ids[:1]], [ids[1:]]).rollout.values
    trainer.close()
    again = stepping(tokenizer, AutoModelForCausalLMWithValueHead.from_pretrained(Path("saved")))
    read = again.trainer.adopt([ids[:1]], [ids[1:]]).rollout.values
    torch.testing.assert_close(read, values, rtol=0, atol=2e-3)  # in bfloat16, where a CPU is faster in it
    again.save_pretrained("again")
    assert json.loads((here / "again" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(POLICY)
    again.close()


def test_a_scripts_model_is_the_trained_one_with_an_adapter_of_the_settings_too(here, tokenizer):
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True)
    added, merged = {"model.lora.rank": 2}, {"model.adapter": "merge"}
    adapted = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY, peft_config=lora)
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), lora)
    trainers = [stepping(tokenizer, plain, settings=added), stepping(tokenizer, adapted, settings=merged)]
    trainers.append(training(tokenizer, here / "out", model=peft, settings=merged))
    for number, file in enumerate(("adapter_config.json", "config.json", "config.json")):
        trainers[number].model.save_pretrained(str(number))
        assert (here / str(number) / file).is_file()
        assert (here / str(number) / "adapter_config.json").is_file() == (number == 0), "which would be untrained"
    for trainer in trainers[:2]:
        trainer.close()


class Log(TrainerCallback):
    def __init__(self):
        self.events, self.logs = [], []

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **kwargs):
        self.events.append("begin")

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append("step")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append((state.episode, state.epoch, len(self.logs)))
        control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        self.events.append("save")


def training(tokenizer, folder, **arguments):
    """A trainer of TRL 1.9, as its summarization example makes it."""
    torch.manual_seed(0)
    load = lambda: AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1)  # noqa: E731
    settings = {"output_dir": str(folder), "per_device_train_batch_size": 4, "total_episodes": 8, "report_to": "none"}
    settings |= {"response_length": 6, "num_ppo_epochs": 2, "stop_token": "eos", "learning_rate": 1e-3}
    settings |= {"missing_eos_penalty": 1.5, "settings": arguments.pop("settings", None)}
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    model, value = AutoModelForCausalLM.from_pretrained(POLICY), load()
    given = {"args": PPOConfig(**settings), "processing_class": tokenizer, "model": model, "ref_model": None}
    given |= {"reward_model": load(), "value_model": value, "train_dataset": rows, "eval_dataset": rows[:2]}
    return PPOTrainer(**given | arguments)


def test_the_trainer_of_1_9_trains_with_its_value_model_and_logs(here, tokenizer, capsys):
    log = Log()
    with pytest.warns(UserWarning, match=r"not honoured: .*Log.on_save: it is not called; Log.on_step_begin"):
        trainer = training(tokenizer, here / "out", callbacks=[log])
    later = Log()
    with pytest.warns(UserWarning, match=r"not honoured: Log.on_save: it is not called"):
        trainer.add_callback(later)
    value = trainer.value_model
    assert trainer.trainer.policy.critic.trunk.state_dict()["wte.weight"].equal(value.transformer.wte.weight)
    with pytest.warns(UserWarning, match=r"control.should_training_stop: the run goes on to its end"):
        trainer.train()
    assert log.events == ["begin", (4, 0.5, 1), (8, 1.0, 2)], "logged before each step's end"
    assert later.logs == log.logs
    assert (trainer.policy_model, trainer.processing_class) == (trainer.model, tokenizer)
    assert [row["episode"] for row in log.logs] == [4, 8]
    assert {"objective/kl", "objective/scores", "policy/clipfrac_avg", "loss/value_avg"} <= log.logs[0].keys()
    assert (here / "out-value-model").is_dir()
    first = log.logs[0]
    assert first["truncated"] > 0
    assert first["objective/scores"] == pytest.approx(first["reward"] - 1.5 * first["truncated"])
    assert len(read_metrics(here / "out")) == 2
    size = AuditConfig(completions=2, states=1, continuations=2)
    audit = trainer.audit(size)
    assert audit["credit"]["tokens"] > 0
    assert main(["audit", str(here / "out")]) == 2
    refused = capsys.readouterr().err
    assert "trainer.audit() after trainer.train(), or of another trainer made with the same arguments" in refused
    assert "--reward" not in refused, "for the command cannot be given the model"
    torch.manual_seed(7)
    fresh = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1)
    assert not fresh.score.weight.equal(value.score.weight)
    with pytest.warns(UserWarning, match="not honoured"):
        again = training(tokenizer, here / "out", callbacks=[log], value_model=fresh)
    assert again.audit(size)["credit"] == audit["credit"], "in another process, too, whose score head is another"
    other = {"train_dataset": [{"input_ids": [1, 2]}] * 4, "value_model": fresh}
    changed = training(tokenizer, here / "out", **other)
    with pytest.raises(ConfigError, match=r"^train_dataset is .*go on with") as no:
        changed.train(resume_from_checkpoint=True)
    assert str(no.value).endswith('go on with PPOConfig(settings={"run.allow_changed": ["train_dataset"]})')
    changed = training(tokenizer, here / "out", settings={"run.allow_changed": ["train_dataset"]}, **other)
    with pytest.raises(RunComplete, match="has done all its 2 iterations"):
        changed.train(resume_from_checkpoint=True)
    trainer.save_model(str(here / "out"))
    AutoModelForCausalLM.from_pretrained(here / "out")
    trainer.generate_completions()
    assert "This movie was → " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:of TRL's settings, these are not honoured")
def test_a_run_goes_on_with_its_reference_and_with_a_value_model_beside_its_folder(here, tokenizer):
    def reference(seed):
        model = AutoModelForCausalLM.from_pretrained(POLICY)
        torch.nn.init.normal_(model.transformer.wpe.weight, generator=torch.Generator().manual_seed(seed))
        return model

    def trainer(seed, iterations, **arguments):
        args = PPOConfig(per_device_train_batch_size=4, total_episodes=4 * iterations, response_length=2)
        args.settings = {"run.dir": "run", "run.save_every": 1, "kl.coef": 0.1}
        return training(tokenizer, None, args=args, ref_model=reference(seed), **arguments)

    log = Log()
    trainer(1, 1, callbacks=[log]).train()
    assert log.logs[0]["objective/kl"] > 0
    assert {path.name for path in here.iterdir()} == {"run", "run-value-model"}
    with pytest.raises(ConfigError, match=r'^ref_model is GPT2LMHeadModel .*"run.allow_changed": \["ref_model"\]'):
        trainer(2, 2).train(resume_from_checkpoint=True)
    fresh = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1)
    torch.nn.init.ones_(fresh.score.weight)
    with pytest.raises(
        ConfigError, match=r"^output_dir 'run' holds a run .*; give another output_dir, or move it away"
    ):
        trainer(1, 2).train()
    trainer(1, 2, value_model=fresh).train(resume_from_checkpoint=True)
    assert len(read_metrics(here / "run")) == 2
    training(tokenizer, None, args=PPOConfig(response_length=2))
    assert [path.name.endswith("-value-model") for path in (here / "runs").iterdir()] == [True]


def test_an_adapter_beside_another_of_its_weights_is_the_policy_beside_its_reference(here, tokenizer, recwarn):
    config = LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), config, adapter_name="policy")
    model.save_pretrained("sft")
    names = {"model_adapter_name": "policy", "ref_adapter_name": "reference", "push_to_hub": True}
    with pytest.raises(ConfigError, match=r"^ref_adapter_name is 'reference', and model has the adapters policy$"):
        training(tokenizer, None, model=model, args=PPOConfig(output_dir="out", **names))
    for folder in ("sft/policy", None):
        if folder is None:
            more = LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True, target_modules=["c_attn", "c_fc"])
            model.add_adapter("reference", more)
        else:
            model.load_adapter(folder, "reference")
        args = PPOConfig(output_dir=str(here / "out"), response_length=4, **names)
        if folder is None:
            with pytest.raises(ConfigError, match="ref_adapter_name 'reference' differs from 'policy', whose start is"):
                training(tokenizer, None, model=model, args=args)
        else:
            trainer = training(tokenizer, None, model=model, args=args)
            assert trainer.trainer.pipeline.reference is trainer.trainer.policy
            assert trainer.trainer.args.run.push_to_hub == "out"
    assert not [x for x in recwarn if "adapter_name" in str(x.message)], "the names are honoured"


def test_a_private_repository_is_made_by_a_call_alone(here, tokenizer):
    args = PPOConfig(output_dir=str(here / "out"), push_to_hub=True, hub_private_repo=True)
    with pytest.raises(ConfigError, match=r"^hub_private_repo is true, .*call trainer.push_to_hub\(\)$"):
        training(tokenizer, None, args=args)
    args = PPOConfig(output_dir=str(here / "out"), hub_private_repo=True)
    assert settings_of(args, old=False, rows=8)[1] == []


def test_a_padding_token_beyond_the_vocabulary_does_not_matter(here, tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    trainer = training(tokenizer, here / "out", value_model=None)
    assert trainer.trainer.tokenizer.pad_token != "[PAD]"
    trainer.train()


def test_prompts_are_what_a_tokenizer_returns_without_padding(here, tokenizer):
    arguments = {"folder": here / "out", "value_model": None}
    trainer = training(tokenizer, train_dataset=[tokenizer(text) for text in TEXTS], **arguments)
    assert trainer.trainer.prompts.batch(0, 8).mask.sum() == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    refused = r"^input_ids of train_dataset hold padding; tokenize them with padding=False$"
    with pytest.raises(ConfigError, match=refused):
        training(tokenizer, train_dataset=Dataset.from_dict(dict(tokenizer(TEXTS, padding=True))), **arguments)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    rows = [{"input_ids": torch.tensor(row)} for row in tokenizer(TEXTS, padding=True)["input_ids"]]
    with pytest.raises(ConfigError, match=refused):
        training(tokenizer, train_dataset=rows, **arguments)
    with pytest.raises(ConfigError, match=r"^train_dataset is of type IterableDataset; it must be a datasets.Dataset"):
        training(tokenizer, train_dataset=Dataset.from_list([{"input_ids": [1]}]).to_iterable_dataset(), **arguments)
    with pytest.raises(ConfigError, match=r"^train_dataset has the columns prompt; it must have input_ids, a prompt's"):
        training(tokenizer, train_dataset=[{"prompt": text} for text in TEXTS], **arguments)
    with pytest.raises(ConfigError, match=r"^eval_dataset is of type dict; it must be a datasets.Dataset"):
        training(tokenizer, eval_dataset={"test": rows}, **arguments)
    training(tokenizer, eval_dataset=None, **arguments).generate_completions()
    with pytest.raises(ConfigError, match=r"^eval_dataset must hold token ids: "):
        training(tokenizer, eval_dataset=[{"input_ids": "a text"}], **arguments).generate_completions()


def test_the_reward_is_the_score_of_the_last_token_that_is_no_padding(here, tokenizer):
    fresh = {"ref_model": AutoModelForCausalLM.from_pretrained(POLICY)}  # the same beside an adapter
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", fan_in_fan_out=True)
    trainer = training(tokenizer, here / "out", peft_config=lora, **fresh)
    assert trainer.trainer.pipeline.reference is trainer.trainer.policy
    trainer.model.save_pretrained("adapter")
    assert (here / "adapter" / "adapter_config.json").is_file(), "not the base with layers of another name"
    reward = trainer.trainer.pipeline.terms[0].function
    ids, end = tokenizer("The film is great")["input_ids"], tokenizer.eos_token_id
    with torch.no_grad():
        states = reward.model.transformer(torch.tensor([ids])).last_hidden_state
        expected = float(reward.model.score(states[0, -1]))
    completions = [ids[2:], [*ids[2:], end], [*ids[2:], end, ids[0]]]
    assert reward(None, None, [ids[:2]] * 3, completions) == pytest.approx([expected] * 3, abs=1e-5)
    assert reward(None, None, [ids], [[end]]) == pytest.approx([expected], abs=1e-5)
    moved = RewardOfIds(reward.model, tokenizer, torch.device("meta")).model
    assert moved.device.type == "meta", "the policy's device"


def test_a_score_head_may_be_a_method(tokenizer):
    class Scorer(torch.nn.Module):
        base_model_prefix = "trunk"

        def __init__(self):
            super().__init__()
            self.trunk = AutoModelForCausalLM.from_pretrained(POLICY).transformer
            self.head = torch.nn.Linear(self.trunk.config.n_embd, 1)

        def score(self, states):
            return self.head(states.float())

    assert len(RewardOfIds(Scorer(), tokenizer, torch.device("cpu"))(None, None, [[5, 6]], [[7]])) == 1


def test_defaults_are_trls_of_the_version_whose_names_are_set():
    new, old = PPOConfig(output_dir="out", missing_eos_penalty=1.0), PPOConfig(model_name="gpt2", log_with="wandb")
    assert (new.response_length, new.learning_rate, new.seed, new.kl_coef, new.lam) == (53, 3e-6, 42, 0.05, 0.95)
    assert (old.batch_size, old.learning_rate, old.seed, old.target, old.ppo_epochs) == (128, 1.41e-5, 0, 6.0, 4)
    settings, _ = settings_of(new, old=False, rows=64)
    assert settings["seed"] == new.seed == 42
    assert settings["rollout.max_new_tokens"] == 53
    assert settings["run.iterations"] == 24  # 3 epochs of 64 rows in batches of 8
    assert settings["rollout.temperature"] == 0.7
    assert (settings["ppo.minibatches"], settings["critic.coef"], settings["optim.lr"]) == (1, 0.1, 3e-6)
    settings, _ = settings_of(old, old=True)
    assert (settings["kl.coef"], settings["kl.target"], settings["critic.lr"]) == (0.2, 6.0, 1.41e-5)
    assert settings["optim.schedule"] == "constant"
    assert settings_of(PPOConfig(init_kl_coef=0.0), old=True)[0]["kl.target"] is None


def test_each_process_gets_a_batch_of_its_own():
    settings, _ = settings_of(PPOConfig(output_dir="out"), old=False, rows=64, world_size=2)
    assert (settings["rollout.batch_size"], settings["run.iterations"]) == (16, 12)


@pytest.mark.proof
def test_two_processes_train_on_twice_the_rows_with_a_value_model_and_by_steps(here):
    """A script that torchrun starts twice, from the module's own functions."""
    script = here / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]\n"
        "from test_trl import POLICY, TEXTS, AutoTokenizer, stepping, training\n"
        "tokenizer = AutoTokenizer.from_pretrained(POLICY)\n"
        "trainer = training(tokenizer, 'out')\n"
        "assert (trainer.args.batch_size, trainer.args.world_size, trainer.state.max_steps) == (8, 2, 1)\n"
        "trainer.train()\n"
        "loop = stepping(tokenizer, settings={'run.dir': 'steps'})\n"
        "(batch,) = loop.dataloader\n"
        "same = [loop.dataset[0]['input_ids']] * 4\n"
        "ids = loop.generate(same, return_prompt=False, max_new_tokens=8, do_sample=True)\n"
        "loop.step(batch['input_ids'], ids, [1.0, 0.0, 0.0, 1.0])\n"
        "texts = loop.trainer.processes.texts\n"
        "assert sorted(sum([text.split('|') for text in texts('|'.join(batch['query']))], [])) == sorted(TEXTS)\n"
        "one, two = texts(str([row.tolist() for row in ids]))\n"
        "assert one != two, 'each process samples by a seed of its own'\n"
        "assert dict(loop.trainer.overview())['run'] == 'steps, iterations of 8 completions'\n"
        "loop.close()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["tokens"] > 8 for row in read_metrics(here / "out")] == [True], "one iteration of 8 completions"
    assert [row["tokens"] > 8 for row in read_metrics(here / "steps")] == [True]


@pytest.mark.parametrize(
    ("old", "names", "message"),
    [
        (False, {"init_kl_coef": 0.5, "ppo_epochs": 1}, "init_kl_coef, ppo_epochs: TRL's up to 0.11; this"),
        (True, {"kl_coef": 0.5}, "kl_coef: TRL's from 0.12 on; this trainer is that of TRL up to 0.11"),
        (False, {"use_cpu": True}, "use_cpu: here it is the variable ACCELERATE_USE_CPU=true; leave them out"),
        (False, {"optim_args": "betas=(0.9,0.95)"}, "optim_args: it has no counterpart here; leave them out"),
    ],
)
def test_a_name_that_would_be_ignored_is_refused(old, names, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_of(PPOConfig(output_dir="out", **names) if not old else PPOConfig(**names), old=old, rows=64)


def test_names_without_effect_are_listed():
    _, lines = settings_of(PPOConfig(output_dir="out", data_seed=3, max_steps=5), old=False, rows=64)
    assert "data_seed: it has no counterpart here" in lines
    assert "max_steps: TRL's PPO does not read it, and neither does this" in lines
    assert PPOConfig().batch_size is None, "computed later"
    _, lines = settings_of(PPOConfig(save_strategy="epoch", eval_strategy="epoch"), old=False, rows=64)
    assert [line.partition(":")[0] for line in lines] == ["run.save_every", "eval_strategy"], "nothing else is trained"
    assert settings_of(PPOConfig(eval_strategy="no"), old=False, rows=64)[1] == []
    with pytest.raises(AttributeError, match=r"^PPOConfig of tokencredit.trl has no n_gpu$"):
        _ = PPOConfig().n_gpu
    settings_of(PPOConfig(adam_beta1=0.9, lr_scheduler_kwargs={}, optim_args=""), old=False, rows=64)
    assert settings_of(PPOConfig(stop_token_id=3), old=False, rows=64)[1] == [], "which the trainer reads"


def test_names_of_transformers_4_and_of_trl_0_12_are_known():
    names = {"warmup_ratio": 0.1, "logging_dir": "logs", "exp_name": "one", "overwrite_output_dir": False}
    settings, lines = settings_of(PPOConfig(total_episodes=160, evaluation_strategy="no", **names), old=False, rows=64)
    assert settings["optim.warmup"] == 2
    assert [line.partition(":")[0] for line in lines] == ["exp_name", "logging_dir"]


def test_a_trainer_shows_what_it_computed_and_the_defaults_of_its_version(here, tokenizer):
    args = PPOConfig(output_dir="out", per_device_train_batch_size=4, batch_size=None, mini_batch_size=2)
    assert (args.seed, args.learning_rate) == (42, 3e-6), "both versions have mini_batch_size"
    with pytest.warns(UserWarning, match="mini_batch_size: computed there"):
        trainer = training(tokenizer, None, args=args, value_model=None)
    assert (args.local_batch_size, args.mini_batch_size) == (4, 2), "the script's mini_batch_size stays"
    assert (args.batch_size, args.num_total_batches, args.total_episodes, args.world_size) == (4, 6, 24, 1)
    assert trainer.state.max_steps == 6
    loop = stepping(tokenizer, gamma=0.9)
    assert (loop.config.seed, loop.config.kl_penalty) == (0, "kl")
    loop.close()


def test_the_flags_of_trls_scripts_are_parsed():
    flags = [
        "--num_train_epochs",
        "0.5",
        "--output_dir",
        "out",
        "--total_episodes",
        "100",
        "--stop_token",
        "eos",
        "--learning_rate",
        "1e-5",
    ]
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses([*flags, "--whiten_rewards", "--bf16", "False"])
    assert (args.total_episodes, args.stop_token, args.learning_rate, args.bf16) == (100, "eos", 1e-5, False)
    assert args.num_train_epochs == 0.5
    assert args.to_dict().keys() == {
        "num_train_epochs",
        "output_dir",
        "total_episodes",
        "stop_token",
        "learning_rate",
        "bf16",
        "whiten_rewards",
    }
    assert args.eval_strategy == "no"


def test_what_would_train_something_else_is_refused(here, tokenizer):
    with pytest.raises(ConfigError, match=r"adam_beta1"):
        settings_of(PPOConfig(output_dir="out", adam_beta1=0.5), old=False, rows=8)
    with pytest.raises(ConfigError, match="missing_eos_penalty needs stop_token='eos' here"):
        training(tokenizer, None, args=PPOConfig(output_dir="out", missing_eos_penalty=1.0))
    with pytest.raises(ConfigError, match=r"optim.schedule .*polynomial"):
        training(tokenizer, None, args=PPOConfig(output_dir="out", lr_scheduler_type="polynomial"))
    with pytest.raises(ConfigError, match="optimizers would train otherwise"):
        training(tokenizer, here / "out", optimizers=(torch.optim.SGD([torch.zeros(1)], lr=1), None))
    with pytest.raises(ConfigError, match=r"Identity, which has no score head .*ClassifierTerm"):
        training(tokenizer, here / "out", reward_model=torch.nn.Identity())
    two = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=2)
    with pytest.raises(
        ConfigError, match=r"which has a score head of 2 outputs; load a reward model with num_labels=1"
    ):
        training(tokenizer, here / "out", reward_model=two)
    with pytest.raises(ConfigError, match=r"PPOTrainer has no argument value_modle; did you mean value_model\?"):
        training(tokenizer, here / "out", value_modle=1)
    with pytest.raises(ConfigError, match="must be an AutoModelForCausalLMWithValueHead"):
        stepping(tokenizer, AutoModelForCausalLM.from_pretrained(POLICY))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": POLICY}, "model is of type str; it must be a loaded model"),
        ({"ref_model": POLICY}, "ref_model is of type str; it must be a loaded model"),
        ({"processing_class": POLICY}, "processing_class is of type str; it must be a tokenizer"),
        ({"args": {"output_dir": "out"}}, "args is of type dict; it must be a PPOConfig of tokencredit.trl"),
        ({"callbacks": Log()}, "callbacks is of type Log; it must be a list of TrainerCallbacks"),
        ({"callbacks": [Log, object()]}, "callbacks[1] is of type object; it must be a TrainerCallback"),
        (
            {"args": PPOConfig(output_dir="out", model_adapter_name="policy")},
            "model_adapter_name is 'policy', and model has no adapter",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(here, tokenizer, arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        training(tokenizer, here / "out", **{"value_model": None} | arguments)


def test_arguments_of_the_loop_are_named_too(here, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    with pytest.raises(ConfigError, match=r"^config is of type NoneType; it must be a PPOConfig of tokencredit.trl$"):
        PPOTrainer(None, model, None, tokenizer)
    with pytest.raises(ConfigError, match=r"^tokenizer is of type NoneType; it must be a tokenizer"):
        PPOTrainer(PPOConfig(), model)


def test_tensors_of_the_loop_are_checked_and_cut_as_trl_does(here, tokenizer, monkeypatch):
    trainer = stepping(tokenizer, init_kl_coef=0.0)
    one, end = torch.tensor(tokenizer("The film")["input_ids"]), tokenizer.eos_token_id
    for call in (lambda: trainer.generate(one[None]), lambda: trainer.step([one[None]] * 4, [one] * 4, [1.0] * 4)):
        with pytest.raises(ConfigError, match=r"holds a tensor of shape \[1, \d\] and torch.int64; .*in one dimension"):
            call()
    for wrong in ([one.float()], [one[:0]], [5, 6]):
        with pytest.raises(ConfigError, match=r"^query_tensor holds a tensor of shape .*; it must hold token ids"):
            trainer.generate(wrong)
    with pytest.raises(ConfigError, match=r"^query_tensor must hold token ids: "):
        trainer.generate(["The film"])
    for scores in ([None] * 4, [torch.ones(2)] * 4):
        with pytest.raises(ConfigError, match=r"^scores must be one number per response: "):
            trainer.step([one] * 4, [one] * 4, scores)
    sampled = torch.cat([one, torch.tensor([end, 7])])
    monkeypatch.setattr(trainer.model.pretrained_model, "generate", lambda **_: sampled[None])
    assert trainer.generate([one], return_prompt=False)[0].tolist() == [end]
    assert trainer.generate([one], return_prompt=False, remove_padding=False)[0].tolist() == [end, 7]
    assert trainer.generate(one, return_prompt=False).tolist() == [[end, 7]]
    trainer.close()


def test_a_subclass_is_of_one_of_the_two_trainers(here, tokenizer):
    arguments = PPOConfig(batch_size=4), AutoModelForCausalLMWithValueHead.from_pretrained(POLICY), None, tokenizer
    with pytest.raises(
        ConfigError, match=r"^Mine must be a subclass of TrainingTrainer \(which has train\) or Stepping"
    ):
        type("Mine", (PPOTrainer,), {})(*arguments)
    trainer = type("Mine", (SteppingTrainer,), {})(*arguments)
    assert type(trainer).__name__ == "Mine"
    trainer.close()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learning_rte", "did you mean learning_rate?"),
        (
            "num_generations",
            'here it is rollout.per_prompt (docs page "Coming from TRL"); keys here go into PPO',
        ),
        ("kl_target", "here it is kl.target; keys here go into PPOConfig(settings={KEY: VALUE})"),
        ("rollout_func", "it has no counterpart here (an environment with step gives the loop to your code)"),
        ("foo", "it takes TRL's names, and keys here in settings={KEY: VALUE}"),
    ],
)
def test_a_name_that_trls_configuration_lacks_is_answered(name, advice):
    with pytest.raises(ConfigError, match=f"^PPOConfig has no argument {name}; {re.escape(advice)}"):
        PPOConfig(output_dir="out", **{name: 1})


def test_keys_here_go_into_settings(here, tokenizer):
    flags = ["--output_dir", "out", "--settings", "{kl.target: 6.0, rollout: {top_k: 5}}"]
    for args in (
        PPOConfig(settings={"kl.target": 6.0, "rollout": {"top_k": 5}}),
        HfArgumentParser(PPOConfig).parse_args_into_dataclasses(flags)[0],
    ):
        assert further(args) == {"kl.target": 6.0, "rollout.top_k": 5}
    trainer = training(tokenizer, here / "out", value_model=None, settings={"kl.target": 6.0})
    assert (trainer.trainer.args.kl.target, trainer.trainer.args.kl.coef) == (6.0, 0.05)
    with pytest.raises(ConfigError, match=r"unknown key kl\.tarrget; did you mean kl\.target\?"):
        training(tokenizer, here / "out", value_model=None, settings={"kl.tarrget": 6.0})
    with pytest.raises(ConfigError, match=r"settings is '\[1'; it must be a dict of keys and values, or its YAML"):
        further(PPOConfig(settings="[1"))


def test_a_value_model_that_cannot_be_the_critic_is_named_with_the_cure(here, tokenizer):
    other = AutoModelForSequenceClassification.from_pretrained(resolve("builtin:grid"), num_labels=1)
    small = GPT2ForSequenceClassification(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, num_labels=1))
    for value, message in (
        ("reward-model", "value_model is a str, and must be a loaded model without an adapter, such as AutoModel"),
        (other, r"value_model is from \S*grid, whose tokenizer has other ids for \d+ of the policy's 2048 tokens"),
        (small, "value_model: the tokenizer has 2048 tokens, but the embedding of value_model only 10"),
    ):
        with pytest.raises(
            ConfigError, match=f"^{message}.*; or leave value_model out: the critic then begins as a"
        ) as no:
            training(tokenizer, here / "out", value_model=value)
        assert "critic.name" not in str(no.value)
        assert "out-value-model" not in str(no.value)


def test_shared_layers_are_frozen_in_both(tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    reference = create_reference_model(model, num_shared_layers=1)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert trained
    assert not any(".h.0." in name or "wte" in name for name in trained)
    assert not any(x.requires_grad for x in reference.parameters())
    with pytest.raises(ConfigError, match=r"^num_shared_layers is 100; it must be below the number of layers$"):
        create_reference_model(model, num_shared_layers=100)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == trained


def test_shared_layers_without_effect_are_named(here, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(POLICY)
    with pytest.warns(UserWarning, match="num_shared_layers: ref_model is given, and shares no layers"):
        trainer = PPOTrainer(
            PPOConfig(batch_size=4), model, create_reference_model(model), tokenizer, num_shared_layers=1
        )
    assert all(x.requires_grad for x in model.parameters())
    trainer.close()


def test_other_names_come_from_an_installed_trl():
    trl = pytest.importorskip("trl")
    from tokencredit.trl import ScriptArguments

    assert ScriptArguments is trl.ScriptArguments
    with pytest.raises(ImportError):
        from tokencredit.trl import NothingOfTheKind  # noqa: F401


def test_modules_of_trl_are_this_one():
    from tokencredit.trl.core import LengthSampler as Sampler
    from tokencredit.trl.experimental.ppo import PPOConfig as Config
    from tokencredit.trl.trainer.ppov2_trainer import PPOv2Trainer
    from tokencredit.trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

    assert (Sampler, Config, PPOv2Config, PPOv2Trainer) == (LengthSampler, PPOConfig, PPOConfig, PPOTrainer)
    assert "Assistant:" in SIMPLE_CHAT_TEMPLATE
