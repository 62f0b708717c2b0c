"""Families of models that differ in what a run relies on: cache, state, logits, positions.

benchmarks/families.py has all.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, T5Config, T5ForConditionalGeneration

from helpers.models import loud, random_lm
from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_checks import check_policy
from tokencredit.text.models.run_models import load_start

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 64}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
MAMBA = SMALL | {"state_size": 8}
BART = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
TRAINED = {
    "mamba": MAMBA,  # a recurrent state, and no position ids
    "mamba2": MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "jamba": SHAPE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "lfm2": SHAPE | {"layer_types": ["conv", "full_attention"]},
    "granite": SHAPE | {"logits_scaling": 3.0},
    "cohere": SHAPE | {"logit_scale": 5.0},
    "gemma2": SHAPE | {"final_logit_softcapping": 2.0, "sliding_window": 4},
    "opt": SMALL | {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "llama4_text": SHAPE | {"intermediate_size_mlp": 48, "num_local_experts": 2},  # its decoder has a name of its own
}
REFUSED = {
    "rwkv": (SMALL, "RwkvForCausalLM.* gives other log-probabilities for a prompt that is padded on the left"),
    "bart": (BART, r"BartForCausalLM.* gives other log-probabilities .* padded on the left, by up to [\d.]+ nats"),
    "bert": (SMALL | {"num_attention_heads": 4, "intermediate_size": 48}, "BertLMHeadModel.* is not causal"),
    "modernbert-decoder": (SHAPE, "ModernBertDecoderForCausalLM.* shapes its logits in a way that is not supported"),
}


@pytest.fixture(params=TRAINED)
def lm(request, tokenizer):
    return random_lm(request.param, tokenizer, pad_token_id=0, **TRAINED[request.param])


@pytest.mark.parametrize("per_prompt", [*proofs(1), 3])
def test_a_rollout_has_the_log_probs_of_the_models_own_pass(lm, per_prompt, tokenizer):
    model = ActorCritic(lm, Critic(build_value_head("linear", width(lm))))
    torch.nn.init.normal_(model.critic.head[-1].weight)
    texts = ["This movie was really", "A film", "I did not think that the second act"]
    prompts = Prompts(texts, tokenizer).batch(0, 9, per_prompt)
    uniforms = torch.rand(9, 6, generator=torch.Generator().manual_seed(0))
    rollout = sample(model, prompts, uniforms, SamplingConfig(), tokenizer, range(400), per_prompt)
    assert len(set(rollout.mask.sum(1).tolist())) > 1, "some rows end early"
    with torch.no_grad():
        now = model(rollout.inputs(), temperature=1.0)
        for row, mask in enumerate(rollout.mask):
            prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
            response = rollout.response_ids[row][mask]
            logits = lm(torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(rollout.logprobs[row][mask], own, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(now.logprobs[row][mask], own, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.values[rollout.mask], now.values[rollout.mask], atol=1e-4, rtol=1e-4)


def test_an_exact_kl_to_the_same_model_is_zero(tokenizer):
    """The reference's logits are scaled too."""
    lm = random_lm("granite", tokenizer, pad_token_id=0, **TRAINED["granite"])
    model = ActorCritic(lm)
    inputs = {"prompt_ids": torch.tensor([[5, 6]]), "prompt_mask": torch.ones(1, 2, dtype=torch.bool)}
    inputs |= {"response_ids": torch.tensor([[7, 8]]), "mask": torch.ones(1, 2, dtype=torch.bool)}
    inputs["ref_hidden"] = model.response_hidden(inputs).detach()
    kl = model(inputs, temperature=1.0, reference=ActorCritic(lm)).stats.kl
    assert kl.abs().max() < 1e-5, "the rounding of log-probs near 8 nats, whose order depends on the processor"


@pytest.mark.slow
def test_a_check_at_the_start_finds_nothing_and_draws_nothing(lm, tokenizer):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    check_policy("name", lm)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert not lm.training


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_train_on_other_numbers_is_refused(kind, tokenizer):
    shape, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        load_start(ModelConfig(), random_lm(kind, tokenizer, pad_token_id=0, **shape), tokenizer)


class Forgetful(LlamaModel):
    """Reads each token as if nothing stood before it."""

    def forward(self, input_ids, attention_mask=None, cache=None, past_key_values=None, **inputs):
        return super().forward(input_ids, attention_mask=attention_mask[:, -input_ids.shape[1] :], **inputs)


class Failing(LlamaModel):
    """Fails in a pass."""

    def forward(self, input_ids, past_key_values=None, **inputs):
        raise IndexError("no such\n  row")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetful, r"LlamaForCausalLM gives other log-probabilities with its cache, by up to [\d.]+ nats"),
        (Failing, "LlamaForCausalLM cannot be used here: a pass through it ends in IndexError: no such row"),
    ],
)
def test_a_trunk_with_a_mistake_is_refused(kind, message, tokenizer):
    lm = loud(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)))
    lm.model = kind(lm.config)
    with pytest.raises(ConfigError, match=message):
        check_policy("", loud(lm))


class Cut(LlamaModel):
    """Another process ends during a pass, in which its part of the weights is gathered."""

    def forward(self, input_ids, past_key_values=None, **inputs):
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer")


def test_the_loss_of_another_process_is_no_mistake_of_the_model(tokenizer):
    """A restart of the job cures it, and a `ConfigError` would not be tried again."""
    lm = loud(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)))
    lm.model = Cut(lm.config)
    with pytest.raises(RuntimeError, match=r"^.*gloo.*Connection reset by peer$"):
        check_policy("", loud(lm))


@pytest.mark.slow
def test_a_model_with_an_encoder_is_refused(tokenizer, tmp_path):
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    lm = T5ForConditionalGeneration(config)
    lm.config.eos_token_id = tokenizer.eos_token_id
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration.* has an encoder"):
        load_start(ModelConfig(), lm, tokenizer)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot load .*T5Config.* AutoModelForCausalLM\.$"):
        load_start(ModelConfig(name=str(tmp_path)))
