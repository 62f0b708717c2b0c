"""Weights under the names of a checkpoint, with adapters merged."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

from helpers.models import SHAPE, copy_weights, random_lm
from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.text.engines import plain_weights as module
from tokencredit.text.engines.plain_weights import plain_weights, write_weights
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.peft_models import merge
from tokencredit.text.models.run_models import build_policy

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

ADAPTERS = {
    "lora": peft.LoraConfig(r=2, lora_alpha=8),
    "lora of embeddings": peft.LoraConfig(r=2, lora_alpha=8, target_modules=["embed_tokens", "q_proj"]),
    "trained biases": peft.LoraConfig(r=2, lora_alpha=8, bias="lora_only"),
    "biases of its own": peft.LoraConfig(r=2, lora_alpha=8, lora_bias=True),
    "rank-stabilised": peft.LoraConfig(r=2, lora_alpha=8, use_rslora=True),
    "dora": peft.LoraConfig(r=2, lora_alpha=8, use_dora=True),
    "whole modules": peft.LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn"], modules_to_save=["c_proj"]),
    "lokr": peft.LoKrConfig(r=2, alpha=8, target_modules=["up_proj"]),
}


def adapted(model_folders, adapter, family="gpt2", **model):
    """A policy whose adapter changes the model."""
    args = ModelConfig(name=str(model_folders[family]), **model)
    lm, tokenizer = load_language_model(args)
    torch.manual_seed(1)
    policy, _ = build_policy(lm, tokenizer, args, CriticConfig(kind="none"), adapter)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    return policy


def test_names_and_tensors_are_those_of_a_checkpoint(architecture, model_folders):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders[architecture])))
    weights = dict(plain_weights(ActorCritic(lm)))
    saved = load_file(model_folders[architecture] / "model.safetensors")
    tied = set(weights) - set(saved)
    assert set(saved) <= set(weights)
    assert tied <= {"lm_head.weight"}
    assert all(torch.equal(weights[name], x) for name, x in saved.items())
    if tied:
        assert weights["lm_head.weight"] is not None
        assert torch.equal(weights["lm_head.weight"], lm.get_input_embeddings().weight)


def test_files_hold_all_weights_however_they_are_cut(architecture, model_folders, tmp_path, monkeypatch):
    policy = ActorCritic(load_language_model(ModelConfig(name=str(model_folders[architecture])))[0])
    expected, counts = dict(plain_weights(policy)), []
    for size in (1, 50_000, 2**30):
        monkeypatch.setattr(module, "FILE_BYTES", size)
        write_weights(plain_weights(policy), tmp_path / str(size))
        files = list((tmp_path / str(size)).glob("*.safetensors"))
        assert {file.stat().st_mode & 0o044 for file in files} == {(tmp_path / str(size)).stat().st_mode & 0o044}
        found = {name: x for file in files for name, x in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
        counts.append(len(files))
    assert counts[0] == len(expected) > counts[1] > counts[2] == 1


def test_fused_experts_are_taken_apart(tmp_path, tokenizer):
    shape = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    lm = random_lm("mixtral", tokenizer, **shape)
    lm.save_pretrained(tmp_path)
    weights, saved = dict(plain_weights(ActorCritic(lm))), load_file(tmp_path / "model.safetensors")
    assert set(weights) == set(saved)
    assert all(torch.equal(weights[name], x) for name, x in saved.items())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_merged_and_the_trained_model_stays_as_it_is(adapter, model_folders):
    # GPT-2's embeddings are tied and cannot be merged, and its layers are transposed.
    family = "llama" if adapter in ("lora of embeddings", "lokr") else "gpt2"
    policy = adapted(model_folders, deepcopy(ADAPTERS[adapter]), family)
    before = copy_weights(policy.lm)
    weights = dict(plain_weights(policy))
    expected = merge(deepcopy(policy.lm)).state_dict()
    assert set(weights) == set(expected)
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, atol=1e-6, rtol=1e-6)
    own, _ = load_language_model(ModelConfig(name=str(model_folders[family])))
    start = dict(own.state_dict())
    assert any(not torch.equal(weights[name], x) for name, x in start.items()), "the adapter changes the model"
    assert all(torch.equal(x, before[name]) for name, x in policy.lm.named_parameters())


def test_an_adapter_that_cannot_be_merged_is_refused_with_a_way_out(model_folders):
    policy = adapted(model_folders, peft.LoraConfig(r=2, lora_alpha=8, target_modules=["wte"]))  # tied to the head
    message = r"^cannot merge the model's LORA adapter: .*; rollout\.engine takes over merged weights: set it to local$"
    with pytest.raises(ConfigError, match=message):
        plain_weights(policy)


def test_the_adapter_of_a_reference_model_takes_no_part(model_folders):
    policy = adapted(model_folders, None, "llama", lora=LoraConfig(rank=2))
    expected = dict(plain_weights(policy))
    policy.adapter.off_is_start = False
    assert policy.adapter.hold_reference()
    assert policy.adapter.has_reference
    weights = dict(plain_weights(policy))
    assert all(torch.equal(weights[name], x) for name, x in expected.items())
    assert set(weights) == set(expected)
