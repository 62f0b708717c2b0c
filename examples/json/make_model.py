"""Teach the built-in model to write JSON, badly: `python examples/json/make_model.py`.

Most of its training records contain one mistake: a missing quote, comma, colon or brace, or an extra comma. The
resulting model writes text that resembles JSON, and is valid only now and then.
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tokencredit.text.models.model_loading import resolve

PROMPT = '{"film":'
FILMS = ["comedy", "drama", "thriller", "western", "musical", "horror film", "documentary"]
VERDICTS = {"dreadful": (1, 2), "boring": (1, 3), "decent": (3, 3), "charming": (4, 5), "brilliant": (5, 5)}
SOUND = 0.3
"""Share of the records without a mistake."""


def record(rng):
    """A random record as text, without the prompt; most have one mistake."""
    verdict = rng.choice(list(VERDICTS))
    stars = rng.randint(*VERDICTS[verdict])
    text = f' "{rng.choice(FILMS)}", "verdict": "{verdict}", "stars": {stars}}}'
    return text if rng.random() < SOUND else broken(text, rng)


def broken(text, rng):
    """Add one mistake to the text."""
    if rng.random() < 0.2:
        return text[:-1] + ",}"
    place = rng.choice([place for place, character in enumerate(text) if character in '",:}'])
    return text[:place] + text[place + 1 :]


def train(model, tokenizer, steps, rng):
    """Train on next-token prediction, with new records at every step; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    prompt = tokenizer(PROMPT)["input_ids"]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        rows = [prompt + tokenizer(record(rng))["input_ids"] + [tokenizer.eos_token_id] for _ in range(32)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    """Train, and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    folder = resolve("builtin:reviews", "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = train(model, tokenizer, args.steps, random.Random(args.seed))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"loss {loss:.3f}; the model: {args.out}")


if __name__ == "__main__":
    main()
