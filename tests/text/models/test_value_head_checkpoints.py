"""Checkpoints of TRL and LLaMA-Factory with a value head, and reward models, as the start of policy and critic."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.proofs import proofs
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.value_heads import ScaledHead
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy, save_policy
from tokencredit.text.ppo_trainer import PPOTrainer

WIDTH = 32
WEIGHT, BIAS = torch.linspace(-1, 1, WIDTH)[None], torch.tensor([0.25])
HEAD = {"v_head.summary.weight": WEIGHT, "v_head.summary.bias": BIAS}
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def checkpoint(model_folders, tmp_path):
    """A function that makes a folder of GPT-2 with these weights, from its own."""

    def make(weights, head=None):
        folder = tmp_path / "checkpoint"
        shutil.copytree(model_folders["gpt2"], folder)
        save_file(weights(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
        if head is not None:
            save_file(head, folder / "value_head.safetensors")
        return folder

    return make


def built(folder, name=None, **critic):
    args = ModelConfig(name=str(folder))
    config = CriticConfig(prefix_every=0, **({"kind": "separate", "name": str(name)} if name else {}), **critic)
    return build_policy(*load_language_model(args), args, config)


def expected(model, weight=WEIGHT, bias=BIAS):
    return (model(IDS, output_hidden_states=True).hidden_states[-1] @ weight[0] + bias).detach()


def convert(message):
    """Run the command that a message gives."""
    command = re.search('python (-c ".*")', message)[1]
    subprocess.run(f"{shlex.quote(sys.executable)} {command}", shell=True, check=True)


def values(policy, hidden):
    return policy.critic(hidden).detach()


@pytest.mark.parametrize(
    ("weights", "head"),
    [
        (lambda own: own | HEAD, None),
        (lambda own: {f"pretrained_model.{key}": x for key, x in own.items()} | HEAD, None),
        (lambda own: own, HEAD),
    ],
    ids=["TRL", "TRL, wrapped", "LLaMA-Factory"],
)
def test_a_checkpoint_with_a_value_head_loses_and_invents_nothing(weights, head, checkpoint, model_folders, caplog):
    folder = checkpoint(weights, head)
    original = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]).eval()
    hidden = original(IDS, output_hidden_states=True).hidden_states[-1]
    for kind in ("mlp", "linear"):
        policy, (note,) = built(folder, head=kind)
        for key, x in original.state_dict().items():
            assert torch.equal(policy.lm.state_dict()[key], x), key
        torch.testing.assert_close(values(policy, hidden), expected(original), atol=1e-5, rtol=1e-5)
        file = folder / ("model.safetensors" if head is None else "value_head.safetensors")
        assert note == f"the critic begins with the values of v_head.summary.weight [1, {WIDTH}] of {file}"
    policy, _ = built(model_folders["gpt2"], folder)
    own = policy.critic.trunk(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(values(policy, own), expected(original), atol=1e-5, rtol=1e-5)
    assert not caplog.records


def test_a_runs_first_values_are_the_heads(checkpoint, tmp_path):
    folder = checkpoint(lambda own: own | HEAD)
    keys = {
        "model.name": str(folder),
        "critic.prefix_every": 0,
        "model.dtype": "float32",
        "run.dir": str(tmp_path / "run"),
    }
    keys |= {"prompts.text": ["A film", "The actors were"], "reward": [{"function": "length"}]}
    trainer = PPOTrainer(args=PPOConfig.from_dict(keys | {"rollout.batch_size": 4, "rollout.max_new_tokens": 5}))
    batch, experience = trainer.credit.give(trainer.collect())
    rollout, model = batch.rollout, AutoModelForCausalLM.from_pretrained(folder).eval()
    for row in range(4):
        ids = torch.cat(
            [rollout.prompt_ids[row][rollout.prompt_mask[row]], rollout.response_ids[row][rollout.mask[row]]]
        )
        states = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        length = int(rollout.mask[row].sum())
        wanted = (states @ WEIGHT[0] + BIAS)[-length - 1 : -1].detach()
        torch.testing.assert_close(rollout.values[row, :length], wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(experience.values, rollout.values)


def test_a_hub_ids_value_head_is_read_and_its_base_keeps_its_id(model_folders, tmp_path, monkeypatch, caplog):
    """From the cache, beside an adapter and in a model's weights."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def cached(name):
        (tmp_path / f"models--org--{name}" / "refs").mkdir(parents=True)
        (tmp_path / f"models--org--{name}" / "refs" / "main").write_text("abc")
        return tmp_path / f"models--org--{name}" / "snapshots" / "abc"

    shutil.copytree(model_folders["llama"], cached("base"))
    args = ModelConfig(name="org/base", lora=LoraConfig(rank=2))
    critic = CriticConfig(kind="separate", lora=LoraConfig(rank=2))
    lm, tokenizer = load_language_model(args)
    policy, _ = build_policy(lm, tokenizer, args, critic)
    for name in (adapter := cached("adapter"), tmp_path / "again"):
        save_policy(name, policy, tokenizer, beside=tmp_path / "critic")
        for folder in (name, tmp_path / "critic"):
            assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == "org/base"
        args = ModelConfig(name=str(adapter))
        policy, (note,) = build_policy(*load_language_model(args), args, replace(critic, name=str(tmp_path / "critic")))
        assert note.startswith("the critic continues from the one saved in")
    save_file(HEAD, adapter / "value_head.safetensors")
    shutil.copytree(model_folders["gpt2"], whole := cached("whole"))
    for layer, file in (("v_head", "model"), ("value_head", "model")):
        weights = load_file(whole / f"{file}.safetensors") | {f"{layer}.weight": WEIGHT, f"{layer}.bias": BIAS}
        save_file(weights, whole / f"{file}.safetensors", {"format": "pt"})
    for name, layer in (("org/adapter", "v_head.summary"), ("org/whole", "v_head")):
        _, (note,) = built(name)
        assert note.startswith(f"the critic begins with the values of {layer}.weight")
    assert not caplog.records


def test_a_model_that_cannot_be_loaded_is_named_with_its_key(model_folders, tmp_path):
    shutil.copytree(model_folders["gpt2"], broken := tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    keys = {"prompts.text": "A film", "reward": [{"function": "length"}], "critic.kind": "separate"}
    for model, critic, start in (
        (broken, None, r"^model\.name: cannot load"),
        (model_folders["gpt2"], broken, r"^critic\.name: cannot load"),
        (model_folders["gpt2"], tmp_path, r"^critic\.name: .* is not a model folder"),
    ):
        given = {"model.name": str(model), "critic.name": critic and str(critic), "run.dir": str(tmp_path / "run")}
        with pytest.raises(ConfigError, match=start):
            PPOTrainer(args=PPOConfig.from_dict(keys | given))


def test_a_reward_models_score_head_is_the_start_of_the_value_head(model_folders, tmp_path):
    """It has no bias, and may be in bfloat16."""
    reward = AutoModelForSequenceClassification.from_pretrained(model_folders["gpt2"], num_labels=1)
    reward.bfloat16().save_pretrained(tmp_path / "reward")
    policy, (note,) = built(model_folders["gpt2"], tmp_path / "reward")
    assert f"score.weight [1, {WIDTH}] of {tmp_path / 'reward' / 'model.safetensors'}" in note
    hidden = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(values(policy, hidden), hidden @ reward.score.weight[0].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("labels", "critic", "reason"),
    [
        (3, {}, "it has several outputs, and a value is one"),
        (1, {"loss": "histogram"}, "critic.loss is histogram"),
        (1, {"layers": 1}, "critic.layers is 1, and it reads all"),
    ],
)
def test_a_score_head_that_is_no_value_head_is_left_out_with_the_reason(
    labels, critic, reason, model_folders, tmp_path
):
    reward = AutoModelForSequenceClassification.from_pretrained(model_folders["gpt2"], num_labels=labels)
    reward.save_pretrained(tmp_path / "reward")
    policy, (note,) = built(model_folders["gpt2"], tmp_path / "reward", **critic)
    assert note.endswith(f"is not taken as value head: {reason}; starting a new one")
    assert policy.critic(torch.randn(2, WIDTH)).abs().max() == 0


def test_the_first_returns_leave_values_that_were_learned_elsewhere():
    head, hidden = ScaledHead(torch.nn.Linear(4, 1)), torch.randn(8, 4)
    head.keep_values()
    before = head(hidden)
    head.adapt(torch.full((1, 8), 30.0) + torch.randn(1, 8), torch.ones(1, 8, dtype=torch.bool), Processes().alone())
    torch.testing.assert_close(head(hidden), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("adapter", [True, *proofs(False)], ids=["beside an adapter", "beside a model"])
def test_a_pickle_is_refused_with_a_command_that_works(adapter, model_folders, tmp_path):
    peft = pytest.importorskip("peft")
    folder, model = tmp_path / "checkpoint", AutoModelForCausalLM.from_pretrained(model_folders["gpt2"])
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    model.save_pretrained(folder)
    for file in model_folders["gpt2"].glob("tokenizer*"):
        shutil.copy(file, folder)
    torch.save({"other": torch.ones(1)} | HEAD, folder / ("pytorch_model.bin" if adapter else "value_head.bin"))
    with pytest.raises(ConfigError, match="is a pickle, which can run code and is not read; convert it once") as raised:
        built(folder)
    convert(str(raised.value))
    assert load_file(folder / "value_head.safetensors").keys() == HEAD.keys()
    _, (note,) = built(folder)
    assert note.startswith("the critic begins with the values of v_head.summary.weight")


def test_a_model_in_a_pickle_is_refused_with_a_command_that_works(model_folders, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(model_folders["gpt2"], folder)
    torch.save(load_file(folder / "model.safetensors") | HEAD, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle") as raised:
        built(folder)
    convert(str(raised.value))
    _, (note,) = built(folder)
    assert note.startswith("the critic begins with the values of v_head.summary.weight")
