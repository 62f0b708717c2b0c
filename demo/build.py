"""Build the models `builtin:reviews` from scratch: `python -m demo.build`.

Writes two ordinary Hugging Face folders: `policy`, a small GPT-2 that writes film reviews, and `sentiment`, a small
DistilBERT that classifies them as positive or negative. Both are trained only on the reviews of
`demo.grammar`. A `--size` other than medium builds only a policy of that size.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from demo.grammar import reviews
from demo.measures import PROMPT, measure
from demo.training import (
    POLICIES,
    SENTIMENT,
    policy_tokenizer,
    sentiment_tokenizer,
    train_policy,
    train_sentiment,
)

FOLDER = Path(__file__).parents[1] / "src" / "tokencredit" / "demo" / "reviews"
REVIEWS, HELD_OUT = 150_000, 2_000
SAMPLES_SHOWN = 8

CARDS = {
    "policy": """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# A small GPT-2 that writes film reviews

The base policy of Tokencredit's built-in world `builtin:reviews`: a GPT-2 architecture with a byte-level BPE
vocabulary of its own and `<|endoftext|>` as beginning, end and padding, trained on generated reviews of which three
in four are praise. It knows film reviews of one to six sentences and nothing else; it is there so that a run of PPO
can be seen on any machine.
""",
    "sentiment": """---
license: apache-2.0
language: en
pipeline_tag: text-classification
---
# A small DistilBERT that tells praise from blame

The reward of Tokencredit's built-in world `builtin:reviews`: a DistilBERT architecture with the labels NEGATIVE and
POSITIVE. It was trained on generated film reviews, whole and cut short, and on babble, whose target is the share of
praise among the reviews: text without meaning earns nothing. It knows these reviews and nothing else; it is no
general judge of sentiment.
""",
}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary Hugging Face folder, with the weights in half precision."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(out: Path, seed: int, count: int, held_out: int, size: str = "medium") -> tuple[dict[str, float], list[str]]:
    """Train on `count` reviews and write the folders under `out`; returns metrics and samples.

    `size` is the policy's, one of `POLICIES`. All sizes share one classifier: the medium build trains it, the others
    are measured with the built-in one.
    """
    drawn = reviews(count, seed)
    texts = [review.text for review in drawn]
    print("the language model")
    bpe = policy_tokenizer(texts[:20_000])
    save(train_policy(texts, bpe, POLICIES[size], seed), bpe, out / "policy")
    folders = {"policy": out / "policy"}
    if size == "medium":
        print("the classifier")
        word_piece = sentiment_tokenizer(texts[:20_000])
        save(train_sentiment(drawn, word_piece, SENTIMENT, seed), word_piece, out / "sentiment")
        folders["sentiment"] = out / "sentiment"
    figures, samples = measure({"sentiment": FOLDER / "sentiment"} | folders, seed + 1, held_out)
    for name, folder in folders.items():
        card = CARDS[name] + made(figures, samples, seed, count, size)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return figures, samples


def made(figures: dict[str, float], samples: list[str], seed: int, count: int, size: str) -> str:
    """Section of the model card: build command, metrics and samples."""
    table = "\n".join(f"| {name} | {value:,.4g} |" for name, value in figures.items())
    quoted = "\n".join(f"- {sample}" for sample in samples[:SAMPLES_SHOWN])
    other = "" if size == "medium" else f" --size {size}"
    return f"""
Made by `python -m demo.build --seed {seed}{other}` from {count:,} reviews; float16 weights.
The policy and its classifier:

| | |
|---|---|
{table}

The policy after "{PROMPT}":

{quoted}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Build the models, and print metrics and samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the folders go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=POLICIES, default="medium", help="of the policy; the built-in one is medium")
    args = parser.parse_args(argv)
    if args.size != "medium" and args.out == FOLDER:
        parser.error(f"--size {args.size} needs --out, so that the built-in world stays as it is")
    disable_progress_bar()
    start = time.perf_counter()
    figures, samples = build(args.out, args.seed, REVIEWS, HELD_OUT, args.size)
    for name, value in (figures | {"minutes": (time.perf_counter() - start) / 60}).items():
        print(f"{name:42} {value:,.4g}")
    print("\n".join(samples[:SAMPLES_SHOWN]))


if __name__ == "__main__":
    main()
