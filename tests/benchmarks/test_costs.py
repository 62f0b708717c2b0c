"""The counts of benchmarks/costs.py are those of real models, and the pages hold its tables."""

import re
import sys
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM

from tokencredit.core.logprobs import CHUNK_LOGITS
from tokencredit.learn.optim import build_optimizer
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.settings.model import LoraConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.yaml import flat
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import add_adapter, lora_config
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.building import enable_checkpointing
from tokencredit.text.models.critic import Critic, build_value_head

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import cost_tables  # noqa: E402
import costs  # noqa: E402

SMALL = {
    "gpt2": costs.Shape("small", "gpt2", 97, 64, 3, 4, 4, 16, 160, 128),
    "qwen3": costs.Shape("small", "qwen3", 97, 64, 3, 4, 2, 24, 112, 128),
}
BATCH = costs.Batch(rows=2, prompt=40, new=60)
RANK = 4
VARIANTS = {
    "shared": costs.Setup(),
    "separate": costs.Setup("separate"),
    "none": costs.Setup("none"),
    "adapter": costs.Setup(lora_rank=RANK),
}
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def build(shape: costs.Shape, setup: costs.Setup) -> ActorCritic:
    """A model with random weights; beside an adapter, its matrices are in bfloat16."""
    torch.manual_seed(0)
    lm, trunk = AutoModelForCausalLM.from_config(shape.config()), None
    if setup.critic == "separate":
        trunk = trunk_of(AutoModelForCausalLM.from_config(shape.config()))
    if setup.lora_rank:
        add_adapter(lm, lora_config(LoraConfig(rank=setup.lora_rank)), "model.lora")
        for name, p in lm.named_parameters():
            if not p.requires_grad and p.dim() == 2 and not re.search("wte|wpe|embed", name):
                p.data = p.data.bfloat16()
    if setup.gradient_checkpointing:
        for part in (lm, *([] if trunk is None else [trunk])):
            enable_checkpointing(part)
    critic = None if setup.critic == "none" else Critic(build_value_head("mlp", shape.width), trunk)
    return ActorCritic(lm, critic)


def inputs_of(batch: costs.Batch) -> dict[str, torch.Tensor]:
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


def train(model: ActorCritic, batch: costs.Batch) -> None:
    """A forward and a backward pass, as an update takes them."""

    class Loss:
        additive = True

        def __call__(self, now, at):
            return now.logprobs.sum()

    now = model(inputs_of(batch), temperature=1.0, policy_loss=Loss())
    (now.policy_loss + (0 if now.values is None else now.values.sum())).backward()


@pytest.mark.slow
@pytest.mark.parametrize("shape", costs.SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_real_model(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    assert costs.parameters(shape) == model.num_parameters()
    linear = [p.numel() for name, p in trunk_of(model).named_parameters() if p.dim() == 2 and "layers." in name]
    blocks = [p.numel() for name, p in trunk_of(model).named_parameters() if p.dim() == 2 and "h." in name]
    assert costs.trunk_matrices(shape) == sum(blocks if shape.family == "gpt2" else linear)
    assert costs.projection(shape) == model.get_output_embeddings().weight.numel()
    assert costs.trunk_parameters(shape) == sum(p.numel() for p in trunk_of(model).parameters())
    assert costs.head_parameters(shape) == sum(p.numel() for p in build_value_head("mlp", shape.width).parameters())


@pytest.mark.parametrize("setup", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_weights_gradients_and_moments_are_those_of_a_real_optimizer(shape, setup):
    model = build(shape, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == costs.trained_parameters(shape, setup)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, BATCH)
    optimizer = build_optimizer([{"params": trained, "lr": 1e-3}])
    optimizer.step()
    kept = costs.memory(shape, BATCH, setup)["kept"]
    assert sum(p.nbytes for p in model.parameters()) == kept["weights"]
    assert sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.dim()) == kept["moments"]
    touched = kept["weights"] + kept["moments"] - (costs.frozen_bytes(shape) if setup.lora_rank else 0)
    gradients = sum(p.grad.nbytes for p in trained)
    assert 2 * touched + gradients == costs.optimizer_bytes(costs.trained_parameters(shape, setup), clipping=False)


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


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("critic", ["shared", "separate", "none"])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_flops_are_those_that_pytorch_counts(shape, critic, kernel):
    model, setup = build(shape, costs.Setup(critic)), costs.Setup(critic)
    expected = costs.iteration_flops(shape, replace(BATCH, epochs=1), setup)
    # Fused attention computes its scores again in the backward pass: half a forward pass of it, per trunk.
    again = 0.5 * costs.attention_flops(shape, BATCH.rows * BATCH.length**2) * (2 if critic == "separate" else 1)
    with sdpa_kernel(kernel):
        update = counted(model, lambda: train(model, BATCH))
        with torch.no_grad():
            scoring = counted(model, lambda: model(inputs_of(BATCH), temperature=1.0))
    assert update == expected["update"] + (again if kernel == SDPBackend.FLASH_ATTENTION else 0)
    assert scoring == expected["re-evaluation"]


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_flops_with_an_adapter(shape):
    # The lowest layer needs no gradient of its input, which the formula leaves out.
    shape, setup = replace(shape, layers=8), VARIANTS["adapter"]
    model = build(shape, setup).float()
    expected = costs.iteration_flops(shape, replace(BATCH, epochs=1), setup)["update"]
    with sdpa_kernel(SDPBackend.MATH):
        assert counted(model, lambda: train(model, BATCH)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_sampling_flops_are_those_of_a_pass_per_token(shape):
    model = build(shape, costs.Setup())
    inputs, batch = inputs_of(BATCH), replace(BATCH, new=5)
    ids = torch.cat([inputs["prompt_ids"], inputs["response_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["mask"]], 1)

    @torch.no_grad()
    def sample():
        cache, start = model_cache(model), 0
        for end in range(batch.prompt, batch.prompt + batch.new):
            places = torch.arange(start, end).expand(batch.rows, -1)
            hidden = model.hidden(ids[:, start:end], mask[:, :end], places, cache)[:, -1]
            model.lm.get_output_embeddings()(hidden)
            model.critic(hidden)
            start = end

    with sdpa_kernel(SDPBackend.MATH):
        assert counted(model, sample) == costs.iteration_flops(shape, batch, costs.Setup())["rollout"]


def model_cache(model: ActorCritic):
    from tokencredit.text.engines.dynamic_kv_cache import sampling_cache

    return sampling_cache(model.lm.config)


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_cache_bytes_are_those_of_a_real_cache(shape):
    model, inputs = build(shape, costs.Setup("none")), inputs_of(BATCH)
    cache = model_cache(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        places = torch.arange(BATCH.prompt).expand(BATCH.rows, -1)
        model.hidden(inputs["prompt_ids"], inputs["prompt_mask"], places, cache)
    # A copy of the model in bfloat16 keeps bfloat16; under autocast, Qwen3's norms leave its keys in float32.
    numbers = sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values))
    assert costs.HALF * numbers == costs.cache_bytes(shape) * BATCH.rows * BATCH.prompt


def saved_bytes(model: ActorCritic) -> int:
    """Memory that the forward pass of an update keeps for the backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, saved = {}, []

    def pack(x):
        saved.append(x)  # so that no two have the same address
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, training(training_modules(model)), torch.autocast("cpu", torch.bfloat16):
        model(inputs_of(BATCH), temperature=1.0)
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_activation_bytes_are_those_that_a_pass_keeps(shape, variant, checkpointing):
    setup = replace(VARIANTS[variant], gradient_checkpointing=checkpointing)
    shape = replace(shape, layers=6)
    parts = costs.memory(shape, replace(BATCH, minibatches=1), setup)["update"]
    expected = parts["activations"]
    if checkpointing:  # the layer that is computed again comes in the backward pass
        trunks = 2 if setup.critic == "separate" else 1
        expected -= trunks * BATCH.rows * BATCH.length * costs.layer_activation_bytes(shape, BATCH.length)
    else:  # copies of the trunk's matrices are kept too; that of the projection is not
        expected += parts["autocast copies"] - costs.HALF * costs.projection(shape)
    exact = not checkpointing and variant != "adapter"
    assert saved_bytes(build(shape, setup)) == pytest.approx(expected, rel=1e-3 if exact else 0.1)


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that operations in this context make, while they live; those given do not count."""

    def __init__(self, given):
        super().__init__()
        self.sizes = {x.untyped_storage()._cdata: 0 for x in given}
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return result

    def free(self, place):
        self.now -= self.sizes.pop(place)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_the_update_takes_no_more_memory_than_the_formula(shape, variant, checkpointing, monkeypatch):
    monkeypatch.setattr(costs, "CHUNK_LOGITS_ON_ACCELERATORS", CHUNK_LOGITS)
    setup = replace(VARIANTS[variant], gradient_checkpointing=checkpointing)
    shape, batch = replace(shape, vocabulary=8000, layers=6), replace(BATCH, rows=8, minibatches=1)
    model = build(shape, setup)
    with training(training_modules(model)), torch.autocast("cpu", torch.bfloat16):
        train(model, batch)  # the gradients of an earlier micro-batch
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        with LiveMemory([*model.parameters(), *gradients]) as memory:
            train(model, batch)
    measured = memory.peak + sum(gradient.nbytes for gradient in gradients)
    expected = sum(costs.memory(shape, batch, setup)["update"].values())
    # Logits are gone before a separate critic reads, and before a checkpointed layer is computed again.
    together = not checkpointing and variant != "separate"
    assert measured <= expected <= measured * (1.1 if together else 1.6)


def test_bounds_scale_with_the_device():
    fast, slow = costs.H200, costs.H200._replace(bandwidth=costs.H200.bandwidth / 2, flops=costs.H200.flops / 2)
    batch = costs.Batch()
    assert costs.rollout_seconds(costs.GPT2, batch, slow) == 2 * costs.rollout_seconds(costs.GPT2, batch, fast)
    assert costs.update_rate(costs.GPT2, batch, costs.Setup(), 0.5) == pytest.approx(
        costs.update_rate(costs.GPT2, batch, costs.Setup(), 1.0, slow)
    )


def test_settings_fit_into_their_card_and_more_memory_allows_no_less():
    for shape in costs.SHAPES:
        setups = [cost_tables.choose(shape, card, "shared", costs.Batch()) for card in cost_tables.CARDS]
        peaks = [0.0 if x is None else costs.peak(costs.memory(shape, costs.Batch(), x)) for x in setups]
        limits = [cost_tables.USABLE * card * 1e9 for card in cost_tables.CARDS]
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        ranks = [99 if x is None else x.lora_rank for x in setups]
        assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize("page", ["RESULTS", "DOCS"])
def test_pages_hold_the_tables(page):
    path = getattr(cost_tables, page)
    tables = cost_tables.results_tables() if page == "RESULTS" else cost_tables.docs_tables()
    text = path.read_text(encoding="utf-8")
    assert cost_tables.fill(text, tables) == text


def test_the_page_names_settings_that_exist():
    keys = re.findall(r"`((?:model|ppo|critic|rollout|kl)\.[a-z_.]+)", cost_tables.DOCS.read_text(encoding="utf-8"))
    assert len(keys) >= 8
    assert set(keys) <= set(flat(asdict(PPOConfig())))


def test_the_worked_example_has_the_numbers_of_the_formula():
    page, shape, batch = cost_tables.DOCS.read_text(encoding="utf-8"), costs.QWEN3_06B, cost_tables.BATCH
    counts = [
        costs.parameters(shape),
        costs.trunk_matrices(shape),
        costs.projection(shape),
        costs.head_parameters(shape),
    ]
    counts += [costs.trained_parameters(shape, costs.Setup()), batch.rows * batch.length // batch.minibatches]
    counts += [shape.layers * costs.layer_activation_bytes(shape, batch.length)]
    assert [count for count in counts if f"{count:,}" not in page] == []
