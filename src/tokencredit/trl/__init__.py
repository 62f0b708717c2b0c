"""TRL's PPO under TRL's names: `from tokencredit.trl import PPOConfig, PPOTrainer` in place of TRL's own line.

Scripts for TRL 0.12 to 1.9 (`args`, `reward_model`, `train`) and up to 0.11 (`config`, `generate`, `step`) run over
`tokencredit.PPOTrainer`; docs/from-trl.md says what differs.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from tokencredit.trl.config import PPOConfig as PPOConfig
from tokencredit.trl.trainers import PPOTrainer as PPOTrainer
from tokencredit.trl.value_head import AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead
from tokencredit.trl.value_head import AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead
from tokencredit.trl.value_head import LengthSampler as LengthSampler
from tokencredit.trl.value_head import create_reference_model as create_reference_model
from tokencredit.trl.value_head import respond_to_batch as respond_to_batch

PPOv2Config, PPOv2Trainer = PPOConfig, PPOTrainer
"""The names of TRL 0.9 to 0.11 for those of later versions."""
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The chat template of TRL's example scripts."""
MODULES = "core models models.modeling_value_head trainer trainer.ppo_config trainer.ppo_trainer trainer.utils "
MODULES += "trainer.ppov2_config trainer.ppov2_trainer experimental experimental.ppo"
"""TRL's modules, whose names are all here: `from tokencredit.trl.core import LengthSampler`."""
for _module in MODULES.split():
    sys.modules[f"{__name__}.{_module}"] = globals()[_module.partition(".")[0]] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """Any other name, from TRL or Transformers where it is installed."""
    if not name.startswith("_"):
        for module in ("trl", "trl.core", "trl.trainer.utils", "transformers"):
            try:
                return getattr(import_module(module), name)
            except (ImportError, AttributeError):
                continue
    raise AttributeError(f"tokencredit.trl has no {name}, and no installed TRL has it; import it from where it is")
