"""Chat templates of many models, written from their public descriptions, and tokenizers with their special tokens.

The assistant's turns stand in `{% generation %}`, from which Transformers computes the masks that tests compare with.
"""

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

TEMPLATES = Path(__file__).parent.parent / "text/turns/chat/templates"

LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words that end with line breaks, and numbers of at most three digits."""
SENTENCES = [
    "The user asks a tool, and the assistant answers: system, tool_call, tool_response, function, name, arguments.",
    "I was singing in the rain, and it was good!\n\nYes. 3 + 4 = 7, 한국어, a café and 😀.",
    '{"name": "look_up", "arguments": {"word": "rain", "limit": 3}}',
] * 20


@dataclass(frozen=True)
class Model:
    """A template with its tokens."""

    special: tuple[str, ...]
    """Special tokens."""
    eos: str
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    swallows: bool = False
    """True if special tokens swallow the white space after them."""
    tools: bool = False
    several: bool = True
    """True if a turn may have several calls."""
    system: bool = True
    """True if there may be a system message."""
    ends: bool = True
    """True if a turn of text ends with a token of its own; else the next speaker's header ends it."""
    thinks: bool = False
    """True if the template writes thinking."""


def tokens(names):
    """Names of tokens, separated by spaces."""
    return tuple(names.split())


TOOL_TOKENS = ("<tool_call>", "</tool_call>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

MODELS = {
    "ChatML": Model(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "Qwen2.5": Model(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", TOOL_TOKENS, tools=True),
    "Qwen3": Model(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        (*TOOL_TOKENS, "<think>", "</think>", "<tool_response>", "</tool_response>"),
        tools=True,
        thinks=True,
    ),
    "Qwen3-Coder": Model(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", TOOL_TOKENS, tools=True),
    "Llama 3": Model(LLAMA_TOKENS, "<|eot_id|>", bos="<|begin_of_text|>"),
    "Llama 3.1": Model(
        (*LLAMA_TOKENS, "<|eom_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        tools=True,
        several=False,
    ),
    "Mistral": Model(
        tokens(
            "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
        ),
        "</s>",
        bos="<s>",
        tools=True,
        system=False,
    ),
    "Gemma 2": Model(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", bos="<bos>", system=False),
    "FunctionGemma": Model(
        tokens(
            "<bos> <eos> <start_of_turn> <end_of_turn> <start_function_declaration> "
            "<end_function_declaration> <start_function_call> <end_function_call> "
            "<start_function_response> <end_function_response> <escape>"
        ),
        "<eos>",
        bos="<bos>",
        tools=True,
    ),
    "Phi-3": Model(
        ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), "<|endoftext|>", swallows=True
    ),
    "Phi-4-mini": Model(
        tokens(
            "<|endoftext|> <|end|> <|user|> <|assistant|> <|system|> <|tool|> <|/tool|> <|tool_call|> "
            "<|/tool_call|> <|tool_response|>"
        ),
        "<|end|>",
        tools=True,
    ),
    "Zephyr": Model(("<s>", "</s>"), "</s>"),
    "DeepSeek-V3": Model(
        tokens(
            "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
            "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
            "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
        ),
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        tools=True,
    ),
    "Granite 3": Model(
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"), "<|end_of_text|>", tools=True
    ),
    "Command R": Model(
        tokens(
            "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> "
            "<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
        ),
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        tools=True,
    ),
    "GLM-4.5": Model(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|user|>",
        (*TOOL_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
        tools=True,
        ends=False,
    ),
    "Vicuna": Model(("<s>", "</s>"), "</s>"),
}

BYTES = ("DeepSeek-V3", "FunctionGemma", "GLM-4.5", "Vicuna")
"""Other tokenizers decode their formats to other texts, or have tokens that begin in the prompt and end in the turn."""
COMBINED = [
    (name, kind)
    for name in MODELS
    for kind in ("bytes", "split", "metaspace", "prepend")
    if kind in ("bytes", "split") or name not in BYTES
]
"""Templates with kinds of tokenizers."""


def template_of(name):
    """The source of a model's template."""
    return (TEMPLATES / (name.lower().replace(" ", "-") + ".jinja")).read_text()


@cache
def chat_tokenizer(name, kind="bytes"):
    """A tokenizer with the special tokens and the template of a model.

    Args:
        name: the model's.
        kind: `bytes` as in GPT-2; `split` as in Qwen and Llama 3, with line breaks that end words; `metaspace` as in
            Mistral, with a space before the first word of a text; `prepend` as in Llama 2, with a space before the
            first word after each special token too.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    model = MODELS[name]
    kinds = {
        "bytes": byte_level,
        "split": partial(byte_level, LINES),
        "metaspace": sentence_pieces,
        "prepend": partial(sentence_pieces, prepend=True),
    }
    tokenizer = kinds[kind]()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=model.swallows) for token in model.special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in model.added])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=model.eos, bos_token=model.bos)
    made.chat_template = template_of(name)
    return made


def byte_level(pattern=None):
    """A byte-level BPE; its words are GPT-2's, or those of another pattern."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if pattern:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def sentence_pieces(prepend=False):
    """A BPE as SentencePiece makes it, with bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    sentences = [sentence.replace("한국어", "").replace("😀", "") for sentence in SENTENCES]
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=500, special_tokens=["<unk>", *alphabet], max_token_length=12
    )
    tokenizer.train_from_iterator(sentences, trainer)
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(written))
