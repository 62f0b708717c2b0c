import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.norms import freeze

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
