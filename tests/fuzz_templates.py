"""Play made-up transcripts over all chat templates, and compare tokens and masks with one rendering of each.

python tests/fuzz_templates.py [--transcripts 10000] [--seed 1]
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from helpers.chat_templates import COMBINED, MODELS, chat_tokenizer
from helpers.transcripts import calls_in, reference, replay, transcript
from tokencredit.text.turns.chat.framing import ChatFraming


def main():
    """Print a table, and exit with an error if a token, a mask or a call differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transcripts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began, totals = time.monotonic(), [0] * 8
    columns = ["template", "tokenizer", "transcripts", "turns", "tokens", "acted"]
    print("| " + " | ".join([*columns, "other tokens", "other masks", "other calls", "forged"]) + " |")
    print("| --- | --- |" + " ---: |" * 8)
    for index, (name, kind) in enumerate(COMBINED):
        share = len(range(index, options.transcripts, len(COMBINED)))
        counts = fuzz(name, kind, share, options.seed)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        print(f"| {name} | {kind} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    print("| **all** | | " + " | ".join(f"{count:,}" for count in totals) + " |")
    print(f"\n{time.monotonic() - began:.0f} s, seed {options.seed}")
    sys.exit(any(totals[-4:]))


def fuzz(name, kind, number, seed):
    """Transcripts, turns, tokens and acted tokens; of tokens, masks and calls that differ; and of observations
    that became tokens which they spell."""
    frame = ChatFraming(chat_tokenizer(name, kind), uses_tools=MODELS[name].tools)
    turns, tokens, acted, wrong, masks, calls, forged = 0, 0, 0, 0, 0, 0, 0
    rng = random.Random(f"{name}, {kind}, {seed}")
    for _ in range(number):
        messages, tools = transcript(name, rng)
        ids, mask = reference(frame.tokenizer, messages, tools)
        made, chosen, expected, played = replay(frame, messages, tools, ids, mask, cut=lambda: rng.random() < 0.2)
        turns, tokens, acted = turns + len(played), tokens + len(ids), acted + sum(chosen)
        wrong += different(made, ids)
        masks += different(chosen, expected)
        calls += sum(
            turn.malformed is not None or calls_in(turn.message) != calls_in(message) for turn, message in played
        )
        forged += forges(frame, messages[-1], played[-1][0], rng)
    return [number, turns, tokens, acted, wrong, masks, calls, forged]


def forges(frame, observation, turn, rng):
    """True if an observation with the template's tokens in its text has more of them than one without."""
    names = list(frame.encoder.protected)
    text = "".join(rng.choices([*names, observation["content"], " ", "\n", "assistant\n"], k=8))
    own = set(frame.encoder.protected.values())
    kept = [
        [index for index in frame.observation([{**observation, "content": content}], turn) if index in own]
        for content in (text, "harmless")
    ]
    return kept[0] != kept[1]


def different(one, other):
    """The number of positions in which two sequences differ."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


if __name__ == "__main__":
    main()
