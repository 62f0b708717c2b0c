"""Small models of the families whose memory and FLOPs are known by formula, and a training step on them."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tokencredit.settings.model import LoraConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import add_adapter, lora_config
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.critic import Critic, build_value_head

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import costs
from costs import Batch, Setup, Shape

SMALL = {
    "gpt2": Shape("small", "gpt2", 97, 64, 3, 4, 4, 16, 160, 128),
    "llama": Shape("small", "llama", 97, 64, 3, 4, 2, 24, 112, 128),
    "qwen3": Shape("small", "qwen3", 97, 64, 3, 4, 2, 24, 112, 128),
}
BATCH = Batch(rows=2, prompt=40, new=60)
RANK = 4
VARIANTS = {
    "shared": Setup(),
    "separate": Setup("separate"),
    "none": Setup("none"),
    "adapter": Setup("shared", RANK),
}


def build(shape: Shape, setup: Setup) -> ActorCritic:
    """A model with random weights."""
    torch.manual_seed(0)
    lm, trunk = AutoModelForCausalLM.from_config(costs.config_of(shape)), None
    if setup.critic == "separate":
        trunk = trunk_of(AutoModelForCausalLM.from_config(costs.config_of(shape)))
    if setup.lora_rank:
        add_adapter(lm, lora_config(LoraConfig(rank=setup.lora_rank)), "model.lora")
    critic = None if setup.critic == "none" else Critic(build_value_head("mlp", shape.width), trunk)
    return ActorCritic(lm, critic)


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Rows with a little padding, so that the attention has a mask."""
    torch.manual_seed(0)
    mask = torch.ones(batch.rows, batch.prompt, dtype=torch.bool)
    mask[0, :3] = False
    ids = [torch.randint(0, 90, (batch.rows, length)) for length in (batch.prompt, batch.new)]
    return {
        "prompt_ids": ids[0],
        "prompt_mask": mask,
        "response_ids": ids[1],
        "mask": torch.ones(batch.rows, batch.new, dtype=torch.bool),
    }


def train(model: ActorCritic, batch: Batch) -> None:
    """A forward and a backward pass, as an update takes them."""

    class Loss:
        additive = True

        def __call__(self, now, at):
            return now.logprobs.sum()

    now = model(inputs_of(batch), temperature=1.0, policy_loss=Loss())
    (now.policy_loss + (0 if now.values is None else now.values.sum())).backward()
