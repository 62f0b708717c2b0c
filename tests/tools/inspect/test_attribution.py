import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.attribution import attribute, freeze, log_odds, total
from tokencredit.tools.inspect.parts import Part, read_parts
from tokencredit.tools.inspect.recording import record

UP, DOWN = torch.tensor([5, 6]), torch.tensor([9, 10, 11])


def test_log_odds_are_those_of_the_model(models, ids):
    parts = models[0]
    seen, logits = record("it", parts, ids), parts.lm(input_ids=ids[None]).logits[0]
    odds = log_odds(parts, seen.states[-1], UP, DOWN)
    assert torch.allclose(odds.float(), logits[:, UP].mean(-1) - logits[:, DOWN].mean(-1), atol=1e-4)


def test_parts_add_up_to_the_whole(models, ids):
    for parts in models:
        seen = record("it", parts, ids)
        for position in (0, 5, 11):
            contributions = attribute(parts, seen, position, UP, DOWN)
            whole = float(log_odds(parts, seen.states[-1][position], UP, DOWN))
            assert total(contributions) == pytest.approx(whole, abs=1e-4)


def test_heads_and_bias_add_up_to_the_attention(models, ids):
    parts = models[1]
    contributions = attribute(parts, record("it", parts, ids), 7, UP, DOWN)
    for layer in (1, 2):
        heads = [contributions[Part("head", layer, head)] for head in range(1, 5)]
        attention = contributions[Part("attention", layer)]
        assert sum(heads) + contributions[Part("bias", layer)] == pytest.approx(attention, abs=1e-4)
        assert max(map(abs, heads)) > 1e-3


def test_other_families(other, ids):
    seen = record("it", other, ids)
    contributions = attribute(other, seen, 7, UP, DOWN)
    assert total(contributions) == pytest.approx(float(log_odds(other, seen.states[-1][7], UP, DOWN)), abs=1e-4)
    heads = [contributions[Part("head", 1, head)] for head in range(1, 5)]
    attention = contributions[Part("attention", 1)]
    assert sum(heads) + contributions[Part("bias", 1)] == pytest.approx(attention, abs=1e-4)


def test_a_model_by_hand():
    """Width 2, one layer: the attention adds (0, 1) by its bias, the MLP (3, 0); the embedding is (1, 2).

    The last state is (4, 3): mean 3.5, deviation 0.5. The norm makes it (1, −1); log-odds of token 0 = (1, 0) against
    token 1 = (0, 1) are 2. A part (a, b) contributes (a − b) / 0.5.
    """
    lm = GPT2LMHeadModel(
        GPT2Config(vocab_size=2, n_positions=4, n_embd=2, n_layer=1, n_head=1, eos_token_id=None, bos_token_id=None)
    ).eval()
    for parameter in lm.requires_grad_(False).parameters():
        parameter.zero_()
    block, trunk = lm.transformer.h[0], lm.transformer
    lm.lm_head.weight = nn.Parameter(torch.eye(2), requires_grad=False)
    trunk.wpe.weight.copy_(torch.tensor([[1.0, 2.0]]).expand(4, 2))
    trunk.wte.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    block.attn.c_proj.bias.copy_(torch.tensor([0.0, 1.0]))
    block.mlp.c_proj.bias.copy_(torch.tensor([3.0, 0.0]))
    trunk.ln_f.weight.fill_(1)
    parts = read_parts("it", lm)
    contributions = attribute(parts, record("it", parts, torch.tensor([0, 1])), 1, torch.tensor([0]), torch.tensor([1]))
    expected = {
        "embedding": -2,
        "layer 1 attention": -2,
        "layer 1 head 1": 0,
        "layer 1 attention bias": -2,
        "layer 1 mlp": 6,
        "bias": 0,
    }
    assert {part.name: x for part, x in contributions.items()} == pytest.approx(expected, abs=1e-3)


NORMS = {"layer": nn.LayerNorm, "rms": LlamaRMSNorm, "gemma": GemmaRMSNorm}


@pytest.fixture(params=NORMS)
def norm(request):
    torch.manual_seed(1)
    module = NORMS[request.param](8).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    return module


def test_layer_norm_by_hand():
    # (1, 3): mean 2, deviation 1. With gain (2, 4) and bias (10, 20): (2·(1 − 2) + 10, 4·(3 − 2) + 20).
    module = nn.LayerNorm(2, eps=1e-12).requires_grad_(False)
    module.weight.copy_(torch.tensor([2.0, 4.0]))
    module.bias.copy_(torch.tensor([10.0, 20.0]))
    frozen = freeze(module, torch.tensor([1.0, 3.0]))
    assert frozen.centred
    assert frozen.gain.tolist() == pytest.approx([2, 4])
    assert frozen.bias.tolist() == [10, 20]
    assert float(frozen.scale) == pytest.approx(1)
    vector, constant = frozen.pull_back(torch.tensor([1.0, 0.0]).double())
    assert vector.tolist() == pytest.approx([1, -1])  # 2·(x₁ − (x₁ + x₂)/2)
    assert constant == 10


def test_rms_norm_by_hand():
    # (1, 7): root mean square 5.
    frozen = freeze(LlamaRMSNorm(2, eps=1e-12).requires_grad_(False), torch.tensor([1.0, 7.0]))
    assert not frozen.centred
    assert float(frozen.scale) == pytest.approx(0.2)
    assert frozen.pull_back(torch.tensor([1.0, 0.0]).double())[0].tolist() == pytest.approx([0.2, 0])


def test_summands_add_up_to_the_norm(norm):
    summands, direction = torch.randn(5, 8), torch.randn(8).double()
    state = summands.sum(0)
    vector, constant = freeze(norm, state).pull_back(direction)
    assert float((summands.double() @ vector).sum() + constant) == pytest.approx(
        float(norm(state).double() @ direction), abs=1e-5
    )


def test_other_norms_are_refused():
    with pytest.raises(ConfigError, match="Tanh is neither a layer norm nor an RMS norm"):
        freeze(nn.Tanh(), torch.linspace(-1, 1, 8))
