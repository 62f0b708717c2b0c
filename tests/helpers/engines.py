"""Policies, rollouts and broken syncs for the tests of vLLM, in this process and on a server."""

import torch

from helpers.models import random_lm
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import Critic, build_value_head

CPU = torch.device("cpu")
ENDS = list(range(60))
LIMIT = 16
TEXTS = ["This movie was really", "A film", "I did not think that the second act"]
# vLLM's attention on a CPU takes heads of 32 or more, and its prefix cache has blocks of 128 tokens.
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
GATED = SHAPE | {"intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 32}
FAMILIES = {
    "gpt2": SHAPE,
    "llama": GATED | {"tie_word_embeddings": False},
    "qwen3": GATED | {"tie_word_embeddings": True},
    "gpt_neox": SHAPE | {"intermediate_size": 96},  # vLLM runs it in Transformers' own classes
    "olmo2": GATED | {"pad_token_id": 0},
}
BROKEN = {
    "half": lambda weights: dict(list(weights.items())[::2]),
    "without the tied head": lambda weights: {name: x for name, x in weights.items() if name != "lm_head.weight"},
    "rounded": lambda weights: {name: x.bfloat16().float() for name, x in weights.items()},
}


def policy_of(tokenizer, family="gpt2"):
    lm = random_lm(family, tokenizer, **FAMILIES[family])
    policy = ActorCritic(lm, Critic(build_value_head("linear", width(lm))))
    torch.nn.init.normal_(policy.critic.head[-1].weight)
    return policy.requires_grad_(False)


def generate(engine, rows=12, limit=LIMIT, seed=0, started=None, **settings):
    prompts = Prompts(TEXTS, engine.tokenizer).batch(0, rows)
    uniforms = torch.rand(rows, limit, generator=torch.Generator().manual_seed(seed))
    settings = SamplingConfig(**{"temperature": 0.7, "max_new_tokens": limit} | settings)
    return engine.generate(prompts, settings, uniforms, started=started)


def changed(policy, size=0.05):
    """Change all weights, as an update does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def assert_equal_logprobs(rollout, policy, temperature=0.7, atol=1e-4):
    with torch.no_grad():
        now = policy.logprobs(rollout.inputs(), temperature)[0]
    mask = rollout.mask
    torch.testing.assert_close(rollout.behavior_logprobs[mask], now[mask], atol=atol, rtol=0)


def with_first_weights(engine, weights):
    """The engine with these weights, synced and proven as at its start."""
    engine.policy.lm.load_state_dict(weights)
    engine.probe = None
    engine.weights_changed()
    return engine
