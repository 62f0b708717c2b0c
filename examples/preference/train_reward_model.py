"""Train a reward model on the pairs with TRL's RewardTrainer, in an environment that has TRL.

It starts from the built-in policy: `python examples/preference/train_reward_model.py`, from the repository's root.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

HERE = Path(__file__).parent
BUILT_IN = HERE.parents[1] / "src" / "tokencredit" / "demo" / "reviews" / "policy"


def main():
    """Train, evaluate on held-out pairs, and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", default=str(HERE / "pairs.jsonl"))
    parser.add_argument("--model", default=str(BUILT_IN))
    parser.add_argument("--out", default=str(HERE / "reward-model"))
    args = parser.parse_args()
    torch.manual_seed(1)
    data = load_dataset("json", data_files=args.pairs, split="train").train_test_split(test_size=0.1, seed=1)
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32),
        args=RewardConfig(
            output_dir=args.out,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            learning_rate=3e-4,
            max_length=128,
            bf16=False,
            gradient_checkpointing=False,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            seed=1,
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    print({name: value for name, value in trainer.evaluate().items() if "accuracy" in name or "loss" in name})
    trainer.save_model(args.out)  # saves the tokenizer too


if __name__ == "__main__":
    main()
