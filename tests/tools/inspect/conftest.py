"""Pairs of small models of every architecture: one, and a copy whose weights moved."""

from copy import deepcopy

import pytest

from helpers.models import SHAPE, random_lm


@pytest.fixture(scope="session")
def load(model_folders):
    """A function that loads the model of an architecture."""
    from transformers import AutoModelForCausalLM

    return lambda architecture: AutoModelForCausalLM.from_pretrained(model_folders[architecture]).eval()


@pytest.fixture
def models(architecture, load):
    """A model of an architecture, and the same after a step of noise, as parts."""
    return moved(load(architecture))


@pytest.fixture
def gpt2(load):
    """The same for GPT-2 alone."""
    return moved(load("gpt2"))


@pytest.fixture
def gemma2(tokenizer):
    """A model with norms after attention and MLP, and a soft cap on its logits."""
    return unusual("gemma2", tokenizer)


@pytest.fixture(params=["gemma2", "opt", "bloom", "cohere", "falcon", "granite", "mixtral"])
def other(request, tokenizer):
    """A model of a family with something unusual, in whose sum of parts it matters."""
    return unusual(request.param, tokenizer)


def unusual(family, tokenizer):
    """Parts of a small random model."""
    from tokencredit.tools.inspect.parts import read_parts

    shape = SHAPE | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    own = {
        "gemma2": {"final_logit_softcapping": 4.0},
        "opt": {"ffn_dim": 48},  # its MLPs read rows of all batches at once
        "bloom": {},  # its attention and MLP add the residual stream themselves
        "cohere": {"logit_scale": 3.0},  # parallel; its norms are a class of its own
        "falcon": {"head_dim": None, "new_decoder_architecture": True},  # adds to outputs in place
        "granite": {"logits_scaling": 2.0},
        "mixtral": {"num_local_experts": 2},
    }
    config = {key: value for key, value in (shape | own[family]).items() if value is not None}
    return read_parts(family, random_lm(family, tokenizer, **config).requires_grad_(False))


def moved(lm):
    """Parts of a model, and of a copy with noise on all its parameters."""
    import torch

    from tokencredit.tools.inspect.parts import read_parts

    other, generator = deepcopy(lm), torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return read_parts("base", lm.requires_grad_(False)), read_parts("tuned", other.requires_grad_(False))


@pytest.fixture
def ids():
    """Token ids of a text."""
    import torch

    return torch.arange(40, 52)
