"""Parts of a language model as Transformers builds it: its trunk, and the width of its states."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def trunk_of(lm: PreTrainedModel) -> PreTrainedModel:
    """A language model without its output projection."""
    trunk = lm.get_decoder()
    # Llama 4 for text answers with itself, ModernBERT's decoder with its projection.
    return trunk if trunk is not lm and isinstance(trunk, PreTrainedModel) else lm.model


def width(model: PreTrainedModel) -> int:
    """The size of a model's last hidden states."""
    config = model.config.get_text_config()
    # Some sizes of OPT project their states down before the vocabulary.
    return int(getattr(config, "word_embed_proj_dim", config.hidden_size))


def weight_hash(weight: Tensor) -> int:
    """A number that tells whether a weight is what it was."""
    return int(torch.hash_tensor(weight).view(torch.int64))
