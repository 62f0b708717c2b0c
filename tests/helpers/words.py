"""A policy of five tokens, whose values can be counted out."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from helpers.models import loud

WORDS = ["<e>", "a", "b", "c", "d"]
END, PROMPT = 0, [1, 2]
WORTH = torch.tensor([0.3, 1.0, -0.5, 0.2, -1.0])


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<e>")


def model(seed=0):
    torch.manual_seed(seed)
    shape = {"vocab_size": 5, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return loud(GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval(), std=0.6)
