"""Make a small preference dataset: `python examples/preference/make_pairs.py`.

Pairs two reviews from the built-in grammar and prefers the one that mentions the acting. The file has TRL's format, one
pair per line: {"chosen": "...", "rejected": "..."}.
"""

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from demo.grammar import reviews

PREFERRED = re.compile(r"(?i)\b(acting|actors?|cast|performances?)\b")


def pairs(count, seed):
    """Pairs of a review that mentions the acting and one that does not."""
    chosen, rejected = [], []
    while min(len(chosen), len(rejected)) < count:
        for review in reviews(count, seed):
            (chosen if PREFERRED.search(review.text) else rejected).append(review.text)
        seed += 1
    return [{"chosen": yes, "rejected": no} for yes, no in zip(chosen[:count], rejected[:count], strict=True)]


def main():
    """Write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pairs.jsonl")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in pairs(args.count, args.seed))
    print(f"{args.count} pairs: {args.out}")


if __name__ == "__main__":
    main()
