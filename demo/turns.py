"""Build the models `builtin:grid` and `builtin:calculator` from scratch: `python -m demo.turns`.

Each is an ordinary Hugging Face folder with a small GPT-2, trained only on the episodes of `demo.transcripts`.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from demo.build import save
from demo.training import END, Size, fit_language_model, gpt2
from demo.transcripts import calculator_messages, calculator_row, grid_pieces, grid_row, rendered

FOLDER = Path(__file__).parents[1] / "src" / "tokencredit" / "demo"
SIZE = Size(width=128, layers=2, readings=1, batch=16, lr=2e-3)
EPISODES, TOKENIZED, HELD_OUT = 40_000, 1_000, 200
VOCABULARY = 512

TEMPLATE = """\
{%- if tools %}
<|im_start|>system
You may call tools, each with JSON between <tool_call> and </tool_call>:
{%- for tool in tools %}
{{ '\\n' }}{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
"""Chat template: ChatML, with tools and calls as in Hermes models."""


def grid_tokenizer(rng: random.Random) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer in which a word keeps the space or line break before it: a turn is two tokens."""
    words = pre_tokenizers.Split(Regex(r"\s?\S+|\s+"), behavior="isolated")
    pieces = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    texts = [piece for _ in range(TOKENIZED) for piece in grid_pieces(rng)]
    return trained(texts, pieces, positions=256, special=[END], eos_token=END)


def calculator_tokenizer(rng: random.Random) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with single digits, the tokens of ChatML and of calls, and the chat template."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    texts = [rendered(calculator_messages(rng), blank) for _ in range(TOKENIZED)]
    special = [END, "<|im_end|>", "<|im_start|>"]
    tokenizer = trained(texts, pieces, positions=384, special=special, eos_token="<|im_end|>")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def trained(
    texts: Sequence[str], pieces: pre_tokenizers.PreTokenizer, positions: int, special: list[str], eos_token: str
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer that first splits texts into `pieces`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, pad_token=END, model_max_length=positions
    )


@dataclass(frozen=True)
class World:
    """A policy to build: its tokenizer, a row of token ids of an episode, and the text of its model card."""

    tokenizer: Callable[[random.Random], PreTrainedTokenizerBase]
    row: Callable[[PreTrainedTokenizerBase, random.Random], list[int]]
    card: str


WORLDS = {
    "grid": World(grid_tokenizer, grid_row, ""),
    "calculator": World(calculator_tokenizer, calculator_row, ""),
}


def build(world: str, out: Path, seed: int, episodes: int) -> dict[str, float]:
    """Train a policy on `episodes` episodes and write its folder; returns figures."""
    rng, parts = random.Random(seed), WORLDS[world]
    tokenizer = parts.tokenizer(rng)
    rows = [parts.row(tokenizer, rng) for _ in range(episodes)]
    model = gpt2(tokenizer, SIZE, tokenizer.model_max_length, seed)
    print(f"{world}: {episodes:,} episodes, {sum(map(len, rows)):,} tokens")
    fit_language_model(model, rows, SIZE, rng)
    folder = out / world
    save(model, tokenizer, folder)
    return {"parameters": float(model.num_parameters())}


def main(argv: Sequence[str] | None = None) -> None:
    """Build the models, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", choices=[[], *WORLDS], default=list(WORLDS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the folders go")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    disable_progress_bar()
    for world in args.worlds:
        for name, value in build(world, args.out, args.seed, EPISODES).items():
            print(f"{world:12} {name:42} {value:,.4g}")


if __name__ == "__main__":
    main()
