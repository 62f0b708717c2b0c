import pytest
import torch
from torch import nn

from helpers.models import SHAPE, random_lm
from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.parts import Part, read_parts


def test_names_count_layers_and_heads_from_one():
    parts = [Part("embedding"), Part("attention", 2), Part("mlp", 1), Part("head", 2, 3), Part("bias", 2), Part("bias")]
    assert [part.name for part in parts] == [
        "embedding",
        "layer 2 attention",
        "layer 1 mlp",
        "layer 2 head 3",
        "layer 2 attention bias",
        "bias",
    ]
    assert Part("head", 2, 3).record() == {"name": "layer 2 head 3", "kind": "head", "layer": 2, "head": 3}


def test_parts_of_every_architecture(models):
    parts = models[0]
    assert (len(parts.layers), parts.heads) == (2, 4)
    assert [part.name for part in parts.components()][:6] == [
        "embedding",
        *(f"layer 1 head {head}" for head in range(1, 5)),
        "layer 1 mlp",
    ]
    assert len(parts.components()) == 1 + 2 * (4 + 1)


def test_direction_is_the_difference_of_mean_logits(models):
    parts, normed = models[0], torch.linspace(-1, 1, 32)
    direction, constant = parts.direction(torch.tensor([1, 2]), torch.tensor([3]))
    logits = parts.lm.get_output_embeddings()(normed)
    assert normed.double() @ direction + constant == pytest.approx(float((logits[1] + logits[2]) / 2 - logits[3]))


def test_direction_has_the_bias_and_the_factor_of_the_logits(tokenizer):
    lm = random_lm("cohere", tokenizer, **SHAPE, intermediate_size=48, num_key_value_heads=2, logit_scale=3.0)
    parts, up, down = read_parts("cohere", lm), torch.tensor([1]), torch.tensor([2])
    weight = lm.get_output_embeddings().weight
    assert torch.allclose(parts.direction(up, down)[0].float(), 3 * (weight[1] - weight[2]))
    lm.get_output_embeddings().bias = nn.Parameter(torch.arange(len(weight)).float())
    assert parts.direction(up, down)[1] == -1


def test_logprobs_have_the_soft_cap(gemma2, ids):
    seen = gemma2.lm(input_ids=ids[None])
    hidden = gemma2.trunk(input_ids=ids[None]).last_hidden_state
    assert torch.allclose(gemma2.logprobs(hidden), seen.logits.log_softmax(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "shape", "missing"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "one attention with .* in layer 1"),
        (
            "lfm2",
            SHAPE | {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2},
            "one final norm with a known name",
        ),
    ],
)
def test_a_model_without_a_part_is_refused(tokenizer, family, shape, missing):
    with pytest.raises(ConfigError, match=f"'it' cannot be inspected: .* lacks {missing}.*another architecture"):
        read_parts("it", random_lm(family, tokenizer, **shape))


def test_a_model_without_layers_or_an_mlp_is_refused(load):
    lm = load("gpt2")
    del lm.transformer.h[1].mlp
    with pytest.raises(ConfigError, match=r"lacks an MLP with a known name .* in layer 2"):
        read_parts("it", lm)
    lm.transformer.h = lm.transformer.h[:1]
    with pytest.raises(ConfigError, match="lacks one list of decoder layers"):
        read_parts("it", lm)
