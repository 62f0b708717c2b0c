"""The main job by TRL 1.9.2's PPOTrainer: its reward and KL per iteration, beside ours (`make beside-trl`).

    TRL_PYTHON benchmarks/beside_trl.py [--seeds 1 2 3 4 5]

Runs in an environment with `torch==2.13.0 trl==1.9.2`, with the main job's settings: 40 iterations of 64 completions of
24 tokens, 4 epochs of 4 minibatches, a rate of 1e-4 that decays, λ = 0.95, a KL coefficient of 0.05. Differences: TRL
uses one rate for policy and critic, which decays to 0 without a warm-up, a critic of the policy's size, initialised
from it, and no gradient clipping. Figures go to benchmarks/findings-data/beside-trl.json; runs already there are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

DATA = Path(__file__).parent / "findings-data" / "beside-trl.json"
WORLD = Path(__file__).parents[1] / "src" / "tokencredit" / "demo" / "reviews"
PROMPT = "This movie was really"
ITERATIONS, BATCH, TOKENS = 40, 64, 24
PADDING = 255
"""A byte that occurs in no review; the policy gives it probability 1e-8 per token."""


class Judge(nn.Module):
    """The built-in classifier in TRL's form: a backbone, and a `score` layer from hidden states to rewards.

    The classifier has a vocabulary of its own, so texts are decoded and read anew, as Tokencredit does.
    """

    base_model_prefix = "backbone"

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__()
        self.score = nn.Identity()
        self.classifier = AutoModelForSequenceClassification.from_pretrained(WORLD / "sentiment", dtype=torch.float32)
        self.words, self.tokenizer = AutoTokenizer.from_pretrained(WORLD / "sentiment"), tokenizer

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """P(negative), the main job's reward, as a hidden state `[batch, time, 1]`, equal at every token."""
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        texts = [self.tokenizer.decode(ids[own], skip_special_tokens=True) for ids, own in rows]
        logits = self.classifier(**self.words(texts, return_tensors="pt", padding=True, truncation=True)).logits
        scores = logits.softmax(-1)[:, self.classifier.config.label2id["NEGATIVE"]]
        return SimpleNamespace(hidden_states=[scores.view(-1, 1, 1).expand(-1, input_ids.shape[1], -1)])


class Course(TrainerCallback):
    """Reward, KL per sequence, and seconds since the start, of each iteration."""

    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = {"reward": [], "kl": [], "clock": []}
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        for name, key in (("reward", "objective/scores"), ("kl", "objective/kl")):
            self.figures[name].append(float(f"{logs[key]:.4g}"))
        self.figures["clock"].append(round(time.perf_counter() - self.began, 2))


def run(seed: int, folder: str) -> dict[str, list[float]]:
    """Train once; returns the metrics per iteration."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(WORLD / "policy", padding_side="left")
    # TRL strips padding from texts, so padding can be neither the end-of-text token nor any token that is sampled.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PADDING)
    policy, reference, critic = (
        kind.from_pretrained(WORLD / "policy", dtype=torch.float32, **options)
        for kind, options in (
            (AutoModelForCausalLM, {}),
            (AutoModelForCausalLM, {}),
            (AutoModelForSequenceClassification, {"num_labels": 1}),
        )
    )
    critic.config.pad_token_id = PADDING
    course = Course()
    ids = tokenizer(PROMPT)["input_ids"]
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=folder,
            seed=seed,
            total_episodes=ITERATIONS * BATCH,
            per_device_train_batch_size=BATCH,
            local_rollout_forward_batch_size=BATCH,
            num_mini_batches=4,
            num_ppo_epochs=4,
            response_length=TOKENS,
            stop_token="eos",
            temperature=1.0,
            learning_rate=1e-4,
            kl_coef=0.05,
            vf_coef=0.5,
            lam=0.95,
            num_sample_generations=0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=Judge(tokenizer),
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": [ids] * BATCH}),
        eval_dataset=Dataset.from_dict({"input_ids": [ids] * BATCH}),
        callbacks=[course],
    )
    course.began = time.perf_counter()
    trainer.train()
    return course.figures


def main() -> int:
    """Run the missing seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    kept = json.loads(DATA.read_text()) if DATA.is_file() else {}
    runs = kept.setdefault("TRL 1.9.2", {})
    for seed in options.seeds:
        if str(seed) not in runs:
            with tempfile.TemporaryDirectory() as folder:
                runs[str(seed)] = run(seed, folder)
            DATA.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
