"""Small real models, made once: a random GPT-2 and a random Llama with the built-in tokenizer."""

import os

# Tests run side by side, and their models are small: two threads each would mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tokencredit.text.models import resolve


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """Folders as people have them on disk."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **shape)),
        "llama": LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=False,
                **shape,
            )
        ),
    }
    folders = {}
    for name, model in models.items():
        for parameter in model.parameters():  # the usual small initialisation makes all texts alike
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders
