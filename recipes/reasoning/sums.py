"""Chains of sums, worked digit by digit, their verifier, and a small policy that gets about a third of them right.

`python recipes/reasoning/sums.py` builds the policy, training problems and held-out ones under runs/models/sums.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path("runs/models/sums")
SYMBOLS = "0123456789+=,;"
END = "end"
TERMS = (2, 5)
"""Fewest and most terms of a problem; each has two digits."""
PROBLEMS = {"train": 4096, "held_out": 512}
BATCH, LR = 32, 2e-3
FIRST_CHECK, CHECK_EVERY = 140, 10
"""Steps of pretraining before the pass rate is measured, and between two measurements."""
PASS_RATE = 0.3
"""Pretraining ends when this share of `CHECKED` held-out problems is solved, sampled at temperature 1."""
CHECKED = 256


def problem(rng: random.Random) -> tuple[int, ...]:
    """The terms of a random problem."""
    return tuple(rng.randrange(10, 100) for _ in range(rng.randint(*TERMS)))


def question(terms: Sequence[int]) -> str:
    """The prompt: `38+47+29=`."""
    return "+".join(map(str, terms)) + "="


def solution(terms: Sequence[int]) -> str:
    """The worked solution: units, tens with the carry, and sum of each addition.

    >>> solution([38, 47, 29])
    '8+7=15,3+4+1=08,085;5+9=14,8+2+1=11,114'
    """
    total, steps = terms[0], []
    for term in terms[1:]:
        units, carry = total % 10 + term % 10, (total % 10 + term % 10) // 10
        tens = total // 10 % 10 + term // 10 + carry
        low, high = f"{total % 10}+{term % 10}={units:02}", f"{total // 10 % 10}+{term // 10}+{carry}={tens:02}"
        total += term
        steps.append(f"{low},{high},{total:03}")
    return ";".join(steps)


def correct(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 if the last number of a completion is the answer, else 0; the steps before it are not read."""
    last = [text.replace(";", ",").split(",")[-1] for text in completions]
    return [float(number == right) for number, right in zip(last, answer, strict=True)]


def problems(count: int, seed: int, without: frozenset[tuple[int, ...]] = frozenset()) -> list[tuple[int, ...]]:
    """Different random problems."""
    rng, drawn = random.Random(seed), dict[tuple[int, ...], None]()
    while len(drawn) < count:
        if (terms := problem(rng)) not in without:
            drawn[terms] = None
    return list(drawn)


def build(folder: Path, seed: int = 0) -> None:
    """Pretrain a policy of 1.2 M parameters on worked solutions, and save it with its problems."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    held_out = problems(PROBLEMS["held_out"], seed)
    parts = {"held_out": held_out, "train": problems(PROBLEMS["train"], seed + 1, frozenset(held_out))}
    # A token per symbol.
    symbols = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate((*SYMBOLS, END))}))
    symbols.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    symbols.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=symbols, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False, padding_side="left"
    )
    # A decoder with rotary positions, which finds the digits of a step sooner than learned positions.
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    shape = {"hidden_size": 160, "intermediate_size": 432, "num_hidden_layers": 4, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "initializer_range": 0.04}
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **heads, **ends))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    rng, step, excluded = random.Random(seed + 2), 0, frozenset(held_out)
    while True:
        # Worked solutions of fresh problems; the loss is that of the solution.
        batch = [terms for terms in (problem(rng) for _ in range(BATCH)) if terms not in excluded]
        rows = [tokenizer(question(terms) + solution(terms) + END).input_ids for terms in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
        starts = torch.tensor([[len(question(terms))] for terms in batch])
        lengths = torch.tensor([[len(row)] for row in rows])
        places = torch.arange(longest)
        labels = ids.masked_fill((places < starts) | (places >= lengths), -100)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 100)
        loss = lm(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step >= FIRST_CHECK and step % CHECK_EVERY == 0:
            rate = pass_rate(lm, tokenizer, held_out[:CHECKED])
            print(f"step {step}: loss {loss.item():.3f}, pass rate {rate:.3f}", flush=True)
            if rate >= PASS_RATE:
                break
    lm.save_pretrained(folder)
    for name, part in parts.items():
        lines = [json.dumps({"prompt": question(terms), "answer": f"{sum(terms):03}"}) for terms in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer.save_pretrained(folder)  # last, since `main` takes it for the mark of a whole build


def pass_rate(lm: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Sequence[int]]) -> float:
    """Share of problems solved by one completion each, sampled at temperature 1."""
    questions = [question(terms) for terms in asked]
    inputs = tokenizer(questions, padding=True, return_tensors="pt", return_token_type_ids=False)
    most = len(solution([10] * TERMS[1])) + 1
    ids = lm.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=most)[:, inputs.input_ids.shape[1] :]
    texts = tokenizer.decode(ids, skip_special_tokens=True)
    return sum(correct(texts, [f"{sum(terms):03}" for terms in asked])) / len(asked)


def main() -> None:
    """Build what is not there yet."""
    if not (FOLDER / "tokenizer_config.json").is_file():
        build(FOLDER)


if __name__ == "__main__":
    main()
