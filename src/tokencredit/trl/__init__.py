"""TRL's PPO under TRL's names: `from tokencredit.trl import PPOConfig, PPOTrainer` in place of TRL's own line.

Scripts for TRL 0.12 to 1.9 (`args`, `reward_model`, `train`) and up to 0.11 (`config`, `generate`, `step`) run over
`tokencredit.PPOTrainer`; docs/from-trl.md says what differs.
"""

from __future__ import annotations

from typing import Any

from tokencredit.trl.config import PPOConfig as PPOConfig
from tokencredit.trl.trainers import PPOTrainer as PPOTrainer
from tokencredit.trl.value_head import AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead
from tokencredit.trl.value_head import AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead
from tokencredit.trl.value_head import LengthSampler as LengthSampler
from tokencredit.trl.value_head import create_reference_model as create_reference_model
from tokencredit.trl.value_head import respond_to_batch as respond_to_batch


def __getattr__(name: str) -> Any:
    """Any other name, from TRL or Transformers where it is installed."""
    if not name.startswith("_"):
        for package in ("trl", "transformers"):
            try:
                return getattr(__import__(package), name)
            except (ImportError, AttributeError):
                continue
    raise AttributeError(f"tokencredit.trl has no {name}, and no installed TRL has it; import it from where it is")
