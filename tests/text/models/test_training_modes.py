"""What an update switches on: the layers that checkpoint, and dropout that was asked for; no other noise."""

import pytest
import torch
from transformers import (
    CTRLConfig,
    CTRLLMHeadModel,
    FalconConfig,
    FalconForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from helpers.models import SHAPE, loud
from tokencredit.errors import ConfigError
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig, UpdateConfig
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy
from tokencredit.text.ppo_trainer import PPOTrainer

PHIMOE = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}


def phimoe(tokenizer):
    return PhimoeForCausalLM(PhimoeConfig(vocab_size=len(tokenizer), **PHIMOE, eos_token_id=0, router_jitter_noise=0.5))


def opt(tokenizer):
    shape = SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32}
    noise = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.9}
    return OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), **shape, **noise, eos_token_id=0))


def trainer_of(lm, tokenizer, folder, **settings):
    torch.manual_seed(0)
    args = PPOConfig(
        model=ModelConfig(dtype="float32", **settings),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=6),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=RunConfig(dir=str(folder), trackers=[], iterations=1),
    )
    return PPOTrainer(loud(lm), lengths, args, processing_class=tokenizer)


def lengths(prompts, completions):
    return [float(len(text)) for text in completions]


def updated(trainer):
    """First ratio error of an update, and the gradient of its one step."""
    gradients = {}

    def keep(name):
        return lambda gradient: gradients.__setitem__(name, gradients.get(name, 0) + gradient.clone())

    hooks = [p.register_hook(keep(name)) for name, p in trainer.policy.lm.named_parameters()]
    metrics = trainer.update(1, *trainer.credit.give(trainer.collect()))
    for hook in hooks:
        hook.remove()
    return metrics["first_ratio_error"], gradients


@pytest.mark.parametrize("build", [phimoe, opt])
def test_checkpointing_changes_neither_ratio_nor_gradient(build, tokenizer, tmp_path):
    (_, plain), (error, gradients) = (
        updated(trainer_of(build(tokenizer), tokenizer, tmp_path / str(on), gradient_checkpointing=on))
        for on in (False, True)
    )
    assert error < 1e-5
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-4)


def test_only_layers_are_in_training_mode_while_they_checkpoint(tokenizer, tmp_path):
    trainer = trainer_of(phimoe(tokenizer), tokenizer, tmp_path, gradient_checkpointing=True)
    layers, seen = list(trainer.policy.lm.model.layers), []
    hook = layers[0].self_attn.register_forward_hook(
        lambda *_: seen.append({x for x in trainer.policy.modules() if x.training})
    )
    batch = trainer.credit.give(trainer.collect())
    seen.clear()
    trainer.update(1, *batch)
    hook.remove()
    assert len(seen) == 2, "once forward, and again for the backward pass"
    assert all(modules == set(layers) for modules in seen)
    assert not any(module.training for module in trainer.policy.modules())


def test_noise_that_a_layer_reads_elsewhere_is_refused(tokenizer, tmp_path):
    """Falcon's layers read their rates from the configuration."""
    shape = SHAPE | {"attention_dropout": 0.5, "hidden_dropout": 0.5, "eos_token_id": 0}
    lm = FalconForCausalLM(FalconConfig(vocab_size=len(tokenizer), **shape))
    trainer_of(lm, tokenizer, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"FalconForCausalLM.* with model\.gradient_checkpointing, by up to"):
        trainer_of(lm, tokenizer, tmp_path / "checkpointing", gradient_checkpointing=True)


def test_a_model_that_cannot_checkpoint_is_refused(tokenizer, tmp_path):
    lm = CTRLLMHeadModel(CTRLConfig(vocab_size=len(tokenizer), n_embd=32, dff=48, n_layer=1, n_head=2, eos_token_id=0))
    with pytest.raises(ConfigError, match=r"model\.gradient_checkpointing is true: CTRL.* does not support"):
        trainer_of(lm, tokenizer, tmp_path, gradient_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("by_config", [True, False])
@pytest.mark.parametrize("dora", [True, False])
def test_an_adapters_dropout_is_on_in_updates_whoever_asked_for_it(by_config, dora, model_folders):
    peft = pytest.importorskip("peft")
    lora = LoraConfig() if by_config else LoraConfig(rank=2, dropout=0.5)
    args = ModelConfig(name=str(model_folders["llama"]), lora=lora)
    given = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", use_dora=dora) if by_config else None
    policy, _ = build_policy(*load_language_model(args), args, CriticConfig(), given)
    for name, parameter in policy.lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.bool)
    batch = {"prompt_ids": ids, "prompt_mask": mask, "response_ids": ids, "mask": mask}
    assert torch.equal(policy.response_hidden(batch), policy.response_hidden(batch))
    with training(training_modules(policy)):
        assert not torch.equal(policy.response_hidden(batch), policy.response_hidden(batch))


def test_dropout_drops_as_in_training_mode_and_layers_are_never_left_out(tokenizer, tmp_path):
    """All of the model's dropout, and nothing else, at the same random numbers."""
    trainer = trainer_of(opt(tokenizer), tokenizer, tmp_path, dropout=True)
    policy = trainer.policy
    assert policy.lm.model.decoder.layerdrop == 0
    inputs = trainer.collect().rollout.inputs()
    torch.manual_seed(1)
    with training(training_modules(policy)):
        ours = policy.response_hidden(inputs)
    torch.manual_seed(1)
    whole = policy.train().response_hidden(inputs)
    assert torch.equal(ours, whole)
    assert not torch.equal(ours, policy.eval().response_hidden(inputs))
