"""Checkpoints of TRL and LLaMA-Factory with a value head, and reward models, as the start of policy and critic."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.value_heads import ScaledHead
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy

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


@pytest.mark.parametrize("adapter", [True, False], ids=["beside an adapter", "beside a model"])
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
