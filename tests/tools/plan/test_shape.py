"""The numbers of parameters are those of real models."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.shapes import SMALL, costs
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.critic import build_value_head
from tokencredit.tools.plan import shape as shapes


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*costs.SHAPES, *SMALL.values()], ids=lambda shape: f"{shape.name}-{shape.family}")
def test_parameters_are_those_of_the_real_model(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(costs.config_of(shape))
    assert shapes.parameters(shape) == model.num_parameters()
    within = ("h.",) if shape.family == "gpt2" else ("layers.",)
    named = [(name, p) for name, p in trunk_of(model).named_parameters() if name.startswith(within)]
    assert shapes.trunk_matrices(shape) == sum(p.numel() for _, p in named if p.dim() == 2)
    assert shape.layers * shapes.layer_parameters(shape) == sum(p.numel() for _, p in named)
    assert shapes.projection(shape) == model.get_output_embeddings().weight.numel()
    assert shapes.trunk_parameters(shape) == sum(p.numel() for p in trunk_of(model).parameters())


@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("outputs", [1, 51])
def test_parameters_of_value_heads(kind, outputs):
    head = build_value_head(kind, 64, bins=None if outputs == 1 else outputs)
    assert shapes.head_parameters(SMALL["gpt2"], kind, outputs) == sum(p.numel() for p in head.parameters())


def test_numbers_worked_by_hand():
    # GPT-2 with a vocabulary of 97 and a width of 64: 3 layers of 64·192 + 64·64 + 2·64·160 and their biases and norms.
    layer = 12_288 + 4_096 + 20_480 + (192 + 64 + 160 + 64) + 4 * 64
    assert shapes.layer_parameters(SMALL["gpt2"]) == layer
    assert shapes.parameters(SMALL["gpt2"]) == 3 * layer + 97 * 64 + 128 * 64 + 2 * 64
    assert shapes.lora_parameters(SMALL["gpt2"], 4) == 3 * 4 * (256 + 128 + 2 * 224)
