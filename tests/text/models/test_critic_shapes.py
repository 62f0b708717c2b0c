"""Critics on fewer layers and from classifiers."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification

from helpers.configs import text_config
from helpers.models import random_lm
from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.training import OptimConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import layers_of, trunk_of
from tokencredit.text.models.critic import Critic
from tokencredit.text.models.model_loading import load_language_model, resolve
from tokencredit.text.models.run_models import build_policy, save_policy
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rollout_passes import rollout_values

SEPARATE = {"kind": "separate", "head": "linear"}
NORMS = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}
"""Names of trunks' last norms, where it is not `norm`."""


def small(folder, iterations=1, **critic):
    optim = OptimConfig(lr=1e-3, warmup=0)
    return text_config(folder, iterations, critic=CriticConfig(prefix_every=0, **critic), optim=optim)


@pytest.fixture
def folder(architecture, model_folders):
    return str(model_folders[architecture])


def built(folder, **critic):
    """A policy with a critic whose values differ from state to state."""
    args = ModelConfig(name=folder)
    lm, tokenizer = load_language_model(args)
    policy, notes = build_policy(lm, tokenizer, args, CriticConfig(**critic))
    torch.manual_seed(1)
    for parameter in policy.critic.head.parameters():
        nn.init.normal_(parameter)
    return policy, tokenizer, notes


def batch():
    """Two prompts and two responses of different lengths."""
    prompt_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    prompt_mask = torch.tensor([[False, False, True, True], [True] * 4])
    response_ids = torch.tensor([[11, 12, 13], [14, 15, 0]])
    mask = torch.tensor([[True] * 3, [True, True, False]])
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "mask": mask}


def by_hand(trunk, inputs, value):
    """Values of states of rows read alone; `value` maps all hidden states of a row to its values."""
    values = torch.zeros(inputs["mask"].shape)
    for row, (own, acted) in enumerate(zip(inputs["prompt_mask"], inputs["mask"], strict=True)):
        prompt, response = inputs["prompt_ids"][row][own], inputs["response_ids"][row][acted]
        ids = torch.cat([prompt, response])[:-1].unsqueeze(0)
        hidden = trunk(input_ids=ids, output_hidden_states=True).hidden_states
        values[row, : len(response)] = value(hidden)[0, len(prompt) - 1 :]
    return values


def close(now, expected):
    torch.testing.assert_close(now, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("detach", [False, True])
def test_a_tap_reads_the_normalised_states_after_its_layers(folder, detach):
    policy, _, _ = built(folder, layers=1, head="linear", detach=detach)

    def value(hidden):
        scale = hidden[1].var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
        return policy.critic.head((hidden[1] - hidden[1].mean(-1, keepdim=True)) / scale).squeeze(-1)

    expected = by_hand(trunk_of(policy.lm), batch(), value)
    close(policy(batch(), temperature=1.0).values, expected)
    close(policy.critic_outputs(batch()).values, expected)
    assert not torch.allclose(expected, by_hand(trunk_of(policy.lm), batch(), lambda x: policy.critic(x[2])))


def test_layers_that_add_nothing_leave_the_embedding_to_the_tap(model_folders):
    """Worked by hand: GPT-2's blocks add their outputs to the sum of token and position embeddings."""
    policy, _, _ = built(str(model_folders["gpt2"]), layers=1, head="linear")
    trunk = policy.lm.transformer
    with torch.no_grad():
        for layer in trunk.h:
            for output in (layer.attn.c_proj, layer.mlp.c_proj):
                output.weight.zero_()
                output.bias.zero_()
    embedded = trunk.wte.weight[[6, 11, 12]] + trunk.wpe.weight[[1, 2, 3]]
    states = (embedded - embedded.mean(1, keepdim=True)) / (embedded.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    close(policy(batch(), temperature=1.0).values[0], policy.critic.head(states).squeeze(-1))


def test_a_tap_moves_only_the_layers_beneath_it(folder):
    policy, _, _ = built(folder, layers=1, head="linear")
    policy(batch(), temperature=1.0).values.sum().backward()
    below, above = layers_of(trunk_of(policy.lm))
    assert all(p.grad.abs().sum() > 0 for p in below.parameters() if p.dim() > 1)
    assert all(p.grad is None for p in above.parameters())
    policy.zero_grad()
    probe = ActorCritic(policy.lm, Critic(policy.critic.head, detach=True, tap=1))
    for values in (probe(batch(), temperature=1.0).values, policy.critic_outputs(batch()).values):
        values.sum().backward()
        assert all(p.grad is None for p in policy.lm.parameters())
        assert policy.critic.head[-1].weight.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_values_alone_compute_no_layer_above(folder, kind):
    policy, _, _ = built(folder, kind=kind, layers=1)
    trunk = trunk_of(policy.lm) if kind == "shared" else policy.critic.trunk
    calls = []
    for number, layer in enumerate(layers_of(trunk)):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    with torch.no_grad():
        policy.critic_outputs(batch())
    assert calls == [0]
    if kind == "separate":
        assert trunk.config.num_hidden_layers == len(layers_of(trunk)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_all_layers_are_the_same_as_null(folder, kind):
    values = [built(folder, kind=kind, layers=layers)[0].critic_outputs(batch()).values for layers in (None, 2)]
    assert torch.equal(*values)


@pytest.mark.slow
def test_a_cut_trunk_normalises_the_states_of_its_last_layer_and_is_loaded_as_it_was(folder, architecture, tmp_path):
    policy, tokenizer, _ = built(folder, layers=1, **SEPARATE)
    norm = getattr(trunk_of(policy.lm), NORMS.get(architecture, "norm"))
    expected = by_hand(trunk_of(policy.lm), batch(), lambda x: policy.critic.head(norm(x[1])).squeeze(-1))
    close(policy(batch(), temperature=1.0).values, expected)
    save_policy(tmp_path / "policy", policy, tokenizer, tmp_path / "critic")
    args = ModelConfig(name=str(tmp_path / "policy"))
    for layers in (None, 1):
        again, notes = build_policy(*load_language_model(args), args, CriticConfig(layers=layers, **SEPARATE))
        assert notes == [f"the critic continues from the one saved in {tmp_path / 'critic'}"]
        assert torch.equal(again.critic_outputs(batch()).values, policy.critic_outputs(batch()).values)
    with pytest.raises(ConfigError, match=r"critic\.layers is 2, and the critic saved in .* has 1 layers; leave"):
        build_policy(*load_language_model(args), args, CriticConfig(layers=2, **SEPARATE))


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_more_layers_than_there_are_are_refused(kind, model_folders):
    with pytest.raises(ConfigError, match=r"critic\.layers is 3; it must be at most 2, the number of layers of Llama"):
        built(str(model_folders["llama"]), kind=kind, layers=3)


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GEMMA = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 2048, "num_kv_shared_layers": 0}
HYBRID = {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 16}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def random_policy(family, shape, tokenizer, **critic):
    lm = random_lm(family, tokenizer, pad_token_id=0, **shape)
    return build_policy(lm, tokenizer, ModelConfig(name=""), CriticConfig(head="linear", **critic))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), [("opt", OPT), *proofs(("mamba", MAMBA), ("lfm2", SHAPE | HYBRID))])
def test_families_whose_layers_or_states_differ_are_read_cut_saved_and_loaded(family, shape, tokenizer, tmp_path):
    """OPT projects its last states and saves a part of what its configuration builds; Mamba counts its states anew."""
    tap = random_policy(family, shape, tokenizer, layers=1)
    nn.init.normal_(tap.critic.head[-1].weight)
    seen = []
    hook = layers_of(trunk_of(tap.lm))[0].register_forward_hook(
        lambda *call: seen.append(call[2][0] if isinstance(call[2], tuple) else call[2])
    )
    trunk_of(tap.lm)(input_ids=torch.tensor([[7, 8, 9, 10, 14]]), use_cache=False)
    hook.remove()
    expected = tap.critic.head(nn.functional.layer_norm(seen[0], [32])).squeeze(-1)[0, 3:]
    close(tap(batch(), temperature=1.0).values[1, :2], expected)
    for layers in (None, 1):
        policy = random_policy(family, shape, tokenizer, kind="separate", layers=layers)
        nn.init.normal_(policy.critic.head[-1].weight)
        run = tmp_path / str(layers)
        save_policy(run / "policy", policy, tokenizer, run / "critic")
        args = ModelConfig(name=str(run / "policy"))
        again, _ = build_policy(*load_language_model(args), args, CriticConfig(**SEPARATE))
        close(again.critic_outputs(batch()).values, policy.critic_outputs(batch()).values)


@pytest.mark.parametrize(
    ("family", "shape", "critic", "message"),
    [
        (
            "minicpm3",
            SHAPE | MLA,
            {"kind": "separate", "layers": 1},
            r"separate critic MiniCPM3Model with critic\.layers: 1 gives other states once it is saved and loaded",
        ),
        (
            "gemma3n_text",
            SHAPE | GEMMA,
            {"layers": 1},
            r"Gemma3nForCausalLM with critic\.layers: 1 has hidden states of a shape that no value head can read",
        ),
        (
            "gpt_neox_japanese",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
            {"kind": "separate", "layers": 1},
            r"GPTNeoXJapaneseModel with critic\.layers: 1 cannot be truncated: .*; leave it out",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(family, shape, critic, message, tokenizer):
    with pytest.raises(ConfigError, match=message):
        random_policy(family, shape, tokenizer, **critic)


def test_a_model_without_a_list_of_its_layers_is_refused(model_folders):
    lm, tokenizer = load_language_model(ModelConfig(name=str(model_folders["gpt2"])))
    lm.config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match=r"critic\.layers needs a model with one list of its layers, and GPT2Model"):
        build_policy(lm, tokenizer, ModelConfig(), CriticConfig(layers=1))


def test_sampling_leaves_the_values_of_a_tap_to_a_pass(model_folders):
    policy, tokenizer, _ = built(str(model_folders["llama"]), layers=1)
    prompts = Prompts(["A film", "This movie was really"], tokenizer).batch(0, 4)
    rollout = sample(policy, prompts, torch.rand(4, 6), SamplingConfig(), tokenizer, [tokenizer.eos_token_id])
    assert rollout.values is None
    with torch.no_grad():
        close(rollout_values(policy, rollout, None), policy(rollout.inputs(), temperature=1.0).values)


def test_a_saved_tap_goes_on_at_the_same_layer_only(tmp_path):
    first = PPOTrainer(args=small(tmp_path / "a", layers=1, detach=True))
    first.train()
    weights = {key: x.clone() for key, x in first.policy.critic.state_dict().items()}
    assert weights["head.2.weight"].abs().sum() > 0
    model = ModelConfig(name=str(tmp_path / "a" / "policy"), dtype="float32")
    other = "starting a new one"
    for critic, note in [
        ({"layers": 1}, "the critic continues from"),
        ({}, other),
        ({"kind": "separate"}, other),
        ({"kind": "separate", "layers": 1}, other),
    ]:
        policy, notes = build_policy(*load_language_model(model), model, CriticConfig(**critic))
        assert len(notes) == 1
        assert note in notes[0]
        assert torch.equal(policy.critic.head[2].weight, weights["head.2.weight"]) == (critic == {"layers": 1})


def test_a_causal_classifier_with_the_policys_tokens_starts_a_critic(tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": len(tokenizer)}
    classifier = GPT2ForSequenceClassification(GPT2Config(pad_token_id=0, **shape))
    classifier.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    args = small(tmp_path / "run", kind="separate", name=str(tmp_path / "classifier"), layers=1)
    trainer = PPOTrainer(args=args)
    expected, critic = classifier.transformer.state_dict(), trainer.policy.critic
    assert all(torch.equal(x, expected[key]) for key, x in critic.trunk.state_dict().items())
    assert critic.head[2].weight.abs().sum() == 0, "a score head of classes is no value head"
    trainer.iteration(1)


def test_the_built_in_classifier_reads_other_tokens(tmp_path):
    name = resolve("builtin:reviews", "sentiment")
    with pytest.raises(
        ConfigError,
        match=r"2048 tokens, but the embedding of '.*sentiment' only 1265; give a model with",
    ):
        PPOTrainer(args=small(tmp_path, kind="separate", name=name))
