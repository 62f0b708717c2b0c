"""The FLOPs of benchmarks/costs.py are those that PyTorch counts, and the pages hold its tables."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM

from helpers.proofs import proofs
from tokencredit.settings.model import LoraConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import add_adapter, lora_config
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.kv_cache import sampling_cache

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import cost_tables  # noqa: E402
import costs  # noqa: E402
from costs import Batch, Setup, Shape  # noqa: E402

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


SMALL = {
    "gpt2": Shape("small", "gpt2", 97, 64, 3, 4, 4, 16, 160, 128),
    "llama": Shape("small", "llama", 97, 64, 3, 4, 2, 24, 112, 128),
}
BATCH = Batch(rows=2, prompt=40, new=60)
VARIANTS = {
    "shared": Setup(),
    "separate": Setup("separate"),
    "none": Setup("none"),
    "adapter": Setup("shared", 4),
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


def counted(model: ActorCritic, run) -> float:
    """FLOPs by PyTorch's counter, which lacks the fused attention of CPUs."""

    def forward(query, key, value, *args, **kwargs):
        return sdpa_flop_count(query, key, value)

    def backward(gradient, query, key, value, *args, **kwargs):
        return sdpa_backward_flop_count(gradient, query, key, value)

    flash = {FLASH: forward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    with FlopCounterMode(display=False, custom_mapping=flash) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("critic", ["shared", *proofs("separate", "none")])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_flops_are_those_that_pytorch_counts(shape, critic, kernel):
    model, setup = build(shape, Setup(critic)), Setup(critic)
    expected = costs.iteration_flops(shape, replace(BATCH, epochs=1), setup)
    # Fused attention computes its scores again in the backward pass: half a forward pass of it, per trunk.
    again = 0.5 * costs.attention_flops(shape, BATCH.rows * BATCH.length**2) * (2 if critic == "separate" else 1)
    with sdpa_kernel(kernel):
        update = counted(model, lambda: train(model, BATCH))
        with torch.no_grad():
            scoring = counted(model, lambda: model(inputs_of(BATCH), temperature=1.0))
    assert update == expected["update"] + (again if kernel == SDPBackend.FLASH_ATTENTION else 0)
    assert scoring == expected["re-evaluation"]


@pytest.mark.parametrize("shape", [SMALL["llama"], *proofs(SMALL["gpt2"])], ids=lambda shape: shape.family)
def test_flops_with_an_adapter(shape):
    # The lowest layer needs no gradient of its input, which the formula leaves out.
    shape, setup = replace(shape, layers=8), VARIANTS["adapter"]
    model = build(shape, setup).float()
    expected = costs.iteration_flops(shape, replace(BATCH, epochs=1), setup)["update"]
    with sdpa_kernel(SDPBackend.MATH):
        assert counted(model, lambda: train(model, BATCH)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("shape", [SMALL["llama"], *proofs(SMALL["gpt2"])], ids=lambda shape: shape.family)
def test_sampling_flops_are_those_of_a_pass_per_token(shape):
    model = build(shape, Setup())
    inputs, batch = inputs_of(BATCH), replace(BATCH, new=5)
    ids = torch.cat([inputs["prompt_ids"], inputs["response_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["mask"]], 1)

    @torch.no_grad()
    def sample():
        cache, start = sampling_cache(model.lm.config), 0
        for end in range(batch.prompt, batch.prompt + batch.new):
            places = torch.arange(start, end).expand(batch.rows, -1)
            hidden = model.hidden(ids[:, start:end], mask[:, :end], places, cache)[:, -1]
            model.lm.get_output_embeddings()(hidden)
            model.critic(hidden)
            start = end

    with sdpa_kernel(SDPBackend.MATH):
        assert counted(model, sample) == costs.iteration_flops(shape, batch, Setup())["rollout"]


def test_the_page_of_results_holds_the_tables():
    text = cost_tables.RESULTS.read_text(encoding="utf-8")
    assert cost_tables.fill(text, cost_tables.results_tables()) == text


@pytest.mark.parametrize("shape", [*costs.SHAPES, *SMALL.values()], ids=lambda shape: f"{shape.name}-{shape.family}")
def test_parameters_are_those_of_the_real_model(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(costs.config_of(shape))
    assert costs.parameters(shape) == model.num_parameters()
    within = ("h.",) if shape.family == "gpt2" else ("layers.",)
    named = [(name, p) for name, p in trunk_of(model).named_parameters() if name.startswith(within)]
    assert costs.trunk_matrices(shape) == sum(p.numel() for _, p in named if p.dim() == 2)
    assert costs.projection(shape) == model.get_output_embeddings().weight.numel()
    assert costs.trunk_parameters(shape) == sum(p.numel() for p in trunk_of(model).parameters())


@pytest.mark.parametrize("setup", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_trained_parameters_are_those_of_the_real_model(shape, setup):
    model = build(shape, setup)
    assert costs.trained_parameters(shape, setup) == sum(p.numel() for p in model.parameters() if p.requires_grad)
