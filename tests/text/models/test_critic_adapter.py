"""A separate critic as a second adapter on the policy's frozen base."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.files import read_metrics
from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.learn.training_mode import checkpointing_modules, training
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.engines.plain_weights import plain_weights
from tokencredit.text.models.adapters import CRITIC
from tokencredit.text.models.model_checks import example_inputs
from tokencredit.text.models.run_models import build_policy, load_start, merged, save_policy
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load

pytest.importorskip("peft")
ADAPTER = CriticConfig(kind="separate", lora=LoraConfig(rank=2), init="default")


def policy_of(folder, critic=ADAPTER, **model):
    torch.manual_seed(1)
    args = ModelConfig(name=str(folder), **{"lora": LoraConfig(rank=4)} | model)
    lm, tokenizer = load_start(args)
    policy, _ = build_policy(lm, tokenizer, args, critic)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    return policy


def outputs(policy):
    inputs = example_inputs(policy.lm.config.vocab_size, policy.lm.device)
    return policy(inputs, 1.0, policy_loss=None)


def test_policy_critic_and_reference_are_one_base_and_two_adapters(model_folders):
    policy = policy_of(model_folders["llama"])
    assert policy.adapter.hold_reference()
    before = outputs(policy)
    with policy.adapter.reference(), torch.no_grad():
        reference = policy.logprobs(example_inputs(policy.lm.config.vocab_size, policy.lm.device), 1.0)[0]
    below, _ = policy.critic.own_parameters()
    for parameter in below:
        parameter.data.normal_(std=0.5)
    after = outputs(policy)
    assert torch.equal(after.logprobs, before.logprobs), "the policy does not read the critic's adapter"
    assert (after.values - before.values).abs().max() > 1e-3
    names = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert {CRITIC in name for name in names} == {True, False}
    with policy.adapter.reference(), torch.no_grad():
        again = policy.logprobs(example_inputs(policy.lm.config.vocab_size, policy.lm.device), 1.0)[0]
    assert torch.equal(again, reference)
    assert {name for name, p in policy.lm.named_parameters() if p.requires_grad} == names
    policy.critic_outputs(example_inputs(policy.lm.config.vocab_size, policy.lm.device)).values.sum().backward()
    trained = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert trained
    assert all(CRITIC in name or name.startswith("critic.head") for name in trained)


def test_a_checkpointed_layer_is_recomputed_with_its_adapter(model_folders):
    """The backward pass comes when the policy's adapter is on again."""
    gradients = []
    for checkpointing in (False, True):
        policy = policy_of(model_folders["llama"], gradient_checkpointing=checkpointing)
        inputs = example_inputs(policy.lm.config.vocab_size, policy.lm.device)
        with training(checkpointing_modules(policy)):
            results = policy(inputs, 1.0, policy_loss=Sum())
            (results.policy_loss + results.values.square().sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


class Sum:
    additive = True

    def __call__(self, now, at):
        return now.logprobs.sum()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"critic.epochs": 1, "critic.coef": 0}, *proofs({"model.dtype": "bfloat16"})])
def test_a_run_saves_its_critic_and_another_goes_on_with_it(more, model_folders, tmp_path):
    keys = {"critic.kind": "separate", "critic.lora.rank": 2, "critic.lr": 0.01, "model.dtype": "float32"} | more
    keys |= {"reward": [{"function": "length"}], "prompts.text": "A film", "optim.lr": 0.01, "optim.warmup": 0}
    keys |= {"rollout.batch_size": 8, "rollout.max_new_tokens": 6, "ppo.minibatches": 2}

    def trainer(name, folder, **own):
        args = PPOConfig.from_dict(keys | {"model.name": str(name), "run.dir": str(folder), "run.iterations": 2} | own)
        return PPOTrainer(args=args)

    first = trainer(model_folders["llama"], tmp_path / "first", **{"model.lora.rank": 4})
    rates = {group["metric"]: len(group["params"]) for group in first.learner.optimizer.param_groups}
    assert rates == {"lr": 28, "trunk_lr": 28, "value_lr": 4}
    first.train()
    assert first.reference is first.policy
    assert all(row["first_ratio_error"] < 1e-4 for row in read_metrics(tmp_path / "first"))
    files = {file.name for file in (tmp_path / "first" / "critic").iterdir()}
    assert files >= {"adapter_model.safetensors", "adapter_config.json", "value_head.safetensors"}
    assert not list((tmp_path / "first" / "policy").glob("value_head*"))
    second = trainer(tmp_path / "first" / "policy", tmp_path / "second")
    assert any("the critic continues from" in note for note in second.notes)
    pairs = zip(*(trainer.policy.critic.own_parameters()[0] for trainer in (first, second)), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    inputs = example_inputs(first.policy.lm.config.vocab_size, first.policy.lm.device)
    with torch.no_grad():
        expected = first.policy.critic_outputs(inputs).values
        assert torch.equal(load(tmp_path / "first").model.critic_outputs(inputs).values, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic.kind": "shared"}, r"critic\.lora\.rank is 2, and critic\.kind is shared; .* change one of them"),
        ({"critic.layers": 1}, r"critic\.lora\.rank is 2, and critic\.layers is 1"),
        ({"critic.detach": True}, r"critic\.lora\.rank is 2, and critic\.detach is true"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig.from_dict({"critic.kind": "separate", "critic.lora.rank": 2} | changes)


def test_a_critic_that_could_not_be_loaded_again_or_reads_another_base_is_refused(model_folders, tmp_path):
    import peft

    lm = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    peft.get_peft_model(lm, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    args = ModelConfig(name=str(tmp_path), adapter="merge", lora=LoraConfig(rank=4))
    lm, tokenizer = load_start(args)
    with pytest.raises(ConfigError, match=r"critic\.lora\.rank is 2, and no folder holds the base below the policy's"):
        build_policy(merged(args, lm), tokenizer, args, ADAPTER)
    name = str(model_folders["llama"])
    with pytest.raises(ConfigError, match=rf"critic\.lora\.rank is 2, and critic\.name is '{name}'"):
        policy_of(model_folders["llama"], replace(ADAPTER, name=name))


def test_a_value_head_beside_an_adapter_reads_a_copy_of_that_adapter(model_folders, tmp_path):
    import peft

    lm = AutoModelForCausalLM.from_pretrained(model_folders["llama"]).eval()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    own = peft.get_peft_model(lm, config)
    own.save_pretrained(tmp_path)
    weight = torch.linspace(-1, 1, lm.config.hidden_size)[None]
    save_file({"v_head.summary.weight": weight}, tmp_path / "value_head.safetensors")
    args, critic = ModelConfig(name=str(tmp_path)), replace(ADAPTER, init="saved", prefix_every=0)
    with pytest.raises(
        ConfigError, match=r"critic\.lora\.rank is 2, and .* has rank 4; give that, or, for a new critic, set"
    ):
        build_policy(*load_start(args), args, critic)
    policy, notes = build_policy(*load_start(args), args, replace(critic, lora=LoraConfig(rank=4)))
    assert notes[0].startswith("the critic begins with the values of v_head.summary.weight")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    expected = own(ids, output_hidden_states=True).hidden_states[-1] @ weight[0]
    inputs = {"prompt_ids": ids[:, :2], "response_ids": ids[:, 2:]}
    inputs |= {"prompt_mask": torch.ones(1, 2, dtype=torch.bool), "mask": torch.ones(1, 3, dtype=torch.bool)}
    torch.testing.assert_close(policy.critic_outputs(inputs).values, expected[:, 1:4], atol=1e-4, rtol=1e-4)


def test_an_adapter_given_as_critic_name_is_not_the_trunk_of_a_separate_critic(model_folders, tmp_path):
    _, tokenizer = load_start(ModelConfig(name=str(model_folders["llama"])))
    save_policy(tmp_path / "policy", policy_of(model_folders["llama"]), tokenizer, tmp_path / "critic")
    alone = replace(ADAPTER, lora=LoraConfig(), name=str(tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"is an adapter; set .* for a new critic, leave out critic\.name$"):
        policy_of(model_folders["llama"], alone)


def test_the_base_of_a_saved_critic_is_told_by_its_weights(model_folders, tmp_path):
    """Whatever folder it lies in."""
    first = policy_of(model_folders["llama"])
    save_policy(
        tmp_path / "policy", first, load_start(ModelConfig(name=str(model_folders["llama"])))[1], tmp_path / "critic"
    )
    again = replace(ADAPTER, init="saved", head="mlp")
    for name, other in (("copy", False), ("other", True)):
        base = shutil.copytree(model_folders["llama"], tmp_path / name)
        if other:
            changed = load_file(base / "model.safetensors")
            changed["model.norm.weight"] += torch.rand(changed["model.norm.weight"].shape)
            save_file(changed, base / "model.safetensors", {"format": "pt"})
        config = json.loads((tmp_path / "policy" / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(base)
        (tmp_path / "policy" / "adapter_config.json").write_text(json.dumps(config))
        args = ModelConfig(name=str(tmp_path / "policy"))
        if not other:
            _, notes = build_policy(*load_start(args), args, again)
            assert notes == [f"the critic continues from the one saved in {tmp_path / 'critic'}"]
        else:
            with pytest.raises(
                ConfigError, match=r"has the base '.*other', other weights; for a new .* critic\.init: zeros"
            ):
                build_policy(*load_start(args), args, again)


def test_a_model_is_trained_again_with_a_new_critic(model_folders):
    args, own = ModelConfig(name=""), policy_of(model_folders["llama"])
    first = own.critic.own_parameters()[0]
    _, tokenizer = load_start(ModelConfig(name=str(model_folders["llama"])))
    policy, _ = build_policy(own.lm, tokenizer, args, ADAPTER)
    second = policy.critic.own_parameters()[0]
    assert len(second) == len(first)
    assert not set(second) & set(first)


def test_an_engines_weights_leave_layers_alone_that_the_critic_alone_adapts(model_folders):
    policy = policy_of(model_folders["llama"], lora=LoraConfig(rank=4, target_modules=["q_proj"]))
    weights, dense = dict(plain_weights(policy)), load_start(ModelConfig(name=str(model_folders["llama"])))[0]
    for name, x in dense.state_dict().items():
        assert torch.equal(weights[name], x) != ("q_proj.weight" in name), name


def test_it_needs_a_plain_adapter_of_the_policy(model_folders):
    from peft import LoraConfig as Peft

    with pytest.raises(ConfigError, match=r"no frozen base to share; set model\.lora\.rank"):
        policy_of(model_folders["llama"], lora=LoraConfig())
    args = ModelConfig(name=str(model_folders["llama"]))
    lm, tokenizer = load_start(args)
    with pytest.raises(ConfigError, match=r"the policy's adapter has use_dora; .*leave out critic\.lora"):
        build_policy(lm, tokenizer, args, ADAPTER, Peft(r=2, target_modules=["q_proj"], use_dora=True))
