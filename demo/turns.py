"""Build the models `builtin:grid` and `builtin:calculator` from scratch: `python -m demo.turns`.

Each is an ordinary Hugging Face folder with a small GPT-2, trained only on the episodes of `demo.transcripts`.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from demo.build import save
from demo.training import END, Size, fit_language_model, gpt2
from demo.transcripts import calculator_messages, calculator_row, grid_pieces, grid_row, rendered
from tokencredit.distributed.processes import Processes
from tokencredit.settings.run_kind import ModelSource
from tokencredit.settings.text import PPOConfig
from tokencredit.text.evaluation import load_pipeline
from tokencredit.text.ppo_setup import evaluation_tasks

FOLDER = Path(__file__).parents[1] / "src" / "tokencredit" / "demo"
SIZE = Size(width=128, layers=2, readings=1, batch=16, lr=2e-3)
EPISODES, TOKENIZED, HELD_OUT = 40_000, 1_000, 1_000
LONGEST = 160
"""Longest sampled episode, in tokens after the prompt."""
VOCABULARY = 512
HEADER = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
"""

TEMPLATE = """\
{%- if tools %}
<|im_start|>system
Call a tool with <tool_call>. There are:
{%- for tool in tools | map(attribute="function") %}
{{ '\\n' }}{{ tool.name }}({{ tool.parameters.properties | join(", ") }}): {{ tool.description }}
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
    tokenizer = trained(texts, pieces, positions=256, special=special, eos_token="<|im_end|>")
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
    "grid": World(
        grid_tokenizer,
        grid_row,
        """# A small GPT-2 that wanders on a grid

The base policy of Tokencredit's built-in world `builtin:grid`: a GPT-2 architecture with a byte-level BPE vocabulary
of its own, in which a turn is a word and `<|endoftext|>`. It was trained on episodes of a player who mostly avoids
walls and holes and pays no attention to where the goal is. It knows this game and nothing else.
""",
    ),
    "calculator": World(
        calculator_tokenizer,
        calculator_row,
        """# A small GPT-2 that rarely calculates

The base policy of Tokencredit's built-in world `builtin:calculator`: a GPT-2 architecture with a byte-level BPE
vocabulary of its own and a chat template in ChatML with tools, in which `<|im_end|>` ends a turn. It was trained on
episodes of a player who mostly hands in one of the question's numbers, and calculates in three of ten episodes. It
knows this task and nothing else.
""",
    ),
}


def build(world: str, out: Path, seed: int, episodes: int, held_out: int) -> dict[str, float]:
    """Train a policy on `episodes` episodes and write its folder; returns figures, of `held_out` sampled episodes."""
    rng, parts = random.Random(seed), WORLDS[world]
    tokenizer = parts.tokenizer(rng)
    rows = [parts.row(tokenizer, rng) for _ in range(episodes)]
    model = gpt2(tokenizer, SIZE, tokenizer.model_max_length, seed)
    print(f"builtin:{world}", flush=True)
    fit_language_model(model, rows, SIZE, rng)
    folder = out / world
    save(model, tokenizer, folder)
    solved, texts = play(world, folder, seed, held_out)
    figures = {
        "parameters": float(model.num_parameters()),
        "megabytes": sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".md") / 1e6,
        "tokens of training": float(sum(map(len, rows))),
        f"share of {held_out} episodes solved": solved,
    }
    (folder / "README.md").write_text(HEADER + parts.card + made(figures, texts, seed, episodes), encoding="utf-8")
    return figures


def play(world: str, folder: Path, seed: int, episodes: int) -> tuple[float, list[str]]:
    """Share of sampled episodes that a policy solves, and their texts."""
    settings = {"model.name": str(folder), "model.dtype": "float32", "kl.coef": 0, "env.factory": f"builtin:{world}"}
    config = PPOConfig.from_dict({**settings, "eval.max_new_tokens": LONGEST, "seed": seed})
    _, pipeline = load_pipeline(ModelSource(str(folder), config), "policy", None, Processes())
    uniforms = torch.rand(episodes, LONGEST, generator=torch.Generator().manual_seed(seed))
    scored = pipeline.collect(evaluation_tasks(config).batch(0, episodes), config.evaluation_sampling(), uniforms)
    return scored.total_scores().mean().item(), scored.texts()


def made(figures: dict[str, float], texts: list[str], seed: int, episodes: int) -> str:
    """Section of the model card: build command, figures and an episode."""
    table = "\n".join(f"| {name} | {value:,.4g} |" for name, value in figures.items())
    return f"""
Made by `python -m demo.turns --seed {seed}` from {episodes:,} episodes; float16 weights.

| | |
|---|---|
{table}

An episode:

```
{texts[0]}
```
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Build the models, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the folders go")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    disable_progress_bar()
    for world in WORLDS:
        for name, value in build(world, args.out, args.seed, EPISODES, HELD_OUT).items():
            print(f"{name:42} {value:,.4g}")


if __name__ == "__main__":
    main()
