"""Memory by formula is that of real tensors, on small models."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.shapes import BATCH, SMALL, VARIANTS, build, inputs_of, train
from tokencredit.core import logprobs
from tokencredit.learn.optim import build_optimizer
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.runs import tensor_files
from tokencredit.text.models import actor_critic, kv_cache
from tokencredit.text.models.model_loading import fuse_gelu
from tokencredit.tools.plan import memory as formulas
from tokencredit.tools.plan.memory import Batch, Setup, memory
from tokencredit.tools.plan.shape import HALF, projection

CPU = Setup(device="cpu", dtype="float32", static_cache=False)


def test_constants_are_those_of_the_code():
    for name in ("FILES", "SMALLEST_FILE", "LARGEST_FILE"):
        assert getattr(formulas, name) == getattr(tensor_files, name)
    assert formulas.CHUNK_LOGITS == {"cpu": logprobs.CHUNK_LOGITS, "cuda": logprobs.CHUNK_LOGITS_ON_ACCELERATORS}
    assert formulas.MIN_CHUNK == logprobs.MIN_CHUNK
    assert formulas.SHORT == actor_critic.SHORT
    assert formulas.SPARE_TOKENS == kv_cache.SPARE_TOKENS


@pytest.mark.parametrize("setup", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_weights_gradients_and_moments_are_those_of_a_real_optimizer(shape, setup):
    model = build(shape, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == formulas.trained_parameters(shape, setup)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, BATCH)
    optimizer = build_optimizer([{"params": trained, "lr": 1e-3}])
    optimizer.step()
    kept = memory(shape, BATCH, setup)["kept"]
    critic = 0 if model.critic is None else sum(p.nbytes for p in model.critic.parameters())
    assert sum(p.nbytes for p in model.lm.parameters()) == kept["weights"]
    assert critic == kept["critic"]
    assert sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.dim()) == kept["moments"]
    assert sum(p.grad.nbytes for p in trained) == 4 * formulas.trained_parameters(shape, setup)


def autocast(setup):
    """The dtype of a setup's passes on a CPU."""
    return torch.autocast("cpu", torch.bfloat16, enabled=setup.half)


def cache_of(shape, setup):
    """The KV cache after a prompt and then one token after another, as a rollout fills it."""
    model, inputs = build(shape, replace(setup, critic="none")), inputs_of(BATCH)
    cache = kv_cache.sampling_cache(model.lm.config)
    ids = torch.cat([inputs["prompt_ids"], inputs["response_ids"]], 1)
    with torch.no_grad(), autocast(setup):
        start = 0
        for end in range(BATCH.prompt, BATCH.prompt + BATCH.new):
            mask = torch.ones(BATCH.rows, end, dtype=torch.bool)
            places = torch.arange(start, end).expand(BATCH.rows, -1)
            model.hidden(ids[:, start:end], mask, places, cache)
            start = end
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_cache_bytes_are_those_of_a_real_cache(shape, dtype):
    setup = replace(CPU, dtype=dtype)
    cache = cache_of(shape, setup)
    buffers = [buffer for layer in cache.layers for buffer in layer.buffers]
    assert sum(x.nbytes for x in buffers) == memory(shape, BATCH, setup)["rollout"]["KV cache"]
    assert formulas.cache_capacity(BATCH.prompt, BATCH.new) == buffers[0].shape[-2]


def test_the_support_of_a_token_is_kept_with_it():
    shape = next(iter(SMALL.values()))
    full, kept = (memory(shape, BATCH, replace(CPU, support=k))["kept"]["experience"] for k in (0, 20))
    assert kept - full == 4 * 20 * BATCH.responses


def test_capacity_of_a_growing_cache():
    assert formulas.cache_capacity(16, 48) == 80, "16 and 64 more"
    assert formulas.cache_capacity(16, 200) == 80 + 1 + 64 + 1 + 73
    assert formulas.cache_capacity(200, 10) == 300, "half as much again"


def saved_bytes(model, batch, setup):
    """Memory that the forward pass of an update keeps for the backward pass, weights and their copies left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, saved = {}, []

    def pack(x):
        saved.append(x)  # so that no two have the same address
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, training(training_modules(model)), autocast(setup):
        model(inputs_of(batch, setup.padded), temperature=1.0)
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.slow
@pytest.mark.parametrize("new", [20, 60], ids=["short", "long"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["separate", "adapter"])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_activation_bytes_are_those_that_a_pass_keeps(shape, variant, dtype, padded, new):
    setup = replace(VARIANTS[variant], device="cpu", dtype=dtype, padded=padded)
    batch = replace(BATCH, new=new, minibatches=1)
    model = build(shape, setup)
    fuse_gelu(model)
    expected = forward_activations(shape, batch, setup)
    if setup.half:  # copies of the trunk's matrices are kept too; that of the projection is not
        expected += formulas.update_bytes(shape, batch, setup)["autocast copies"] - HALF * projection(shape)
    assert saved_bytes(model, batch, setup) == pytest.approx(expected, rel=0.03 if variant == "adapter" else 3e-3)


def forward_activations(shape, batch, setup):
    """Activations of policy and critic by formula, when the forward passes are done."""
    return formulas.update_moments(shape, batch, setup)[1]["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["separate", "adapter"])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_checkpointing_keeps_the_input_of_each_layer(shape, variant):
    setup = replace(VARIANTS[variant], device="cpu", dtype="float32", gradient_checkpointing=True)
    shape, batch = replace(shape, layers=6), replace(BATCH, minibatches=1)
    # The layer that is computed again comes in the backward pass.
    trunks = 2 if setup.critic == "separate" else 1
    again = trunks * batch.rows * batch.length * formulas.layer_activation_bytes(shape, batch.length, setup)
    expected = forward_activations(shape, batch, setup) - again
    assert saved_bytes(build(shape, setup), batch, setup) == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_math_attention_of_float32_on_a_gpu(shape):
    setup, batch = Setup(dtype="float32", device="cuda", padded=False), replace(BATCH, minibatches=1)
    model = build(shape, setup)
    with sdpa_kernel(SDPBackend.MATH):
        saved = saved_bytes(model, batch, setup)
    assert saved == pytest.approx(forward_activations(shape, batch, setup), rel=3e-3)


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
@pytest.mark.parametrize("several", [False, True], ids=["one micro-batch", "two"])
@pytest.mark.parametrize("variant", ["shared", "separate", "adapter"])
@pytest.mark.parametrize("shape", [SMALL["gpt2"], SMALL["qwen3"]], ids=["gpt2", "qwen3"])
def test_an_update_takes_as_much_memory_as_the_formula(shape, variant, several):
    budget = 8 * BATCH.length if several else None
    setup = replace(VARIANTS[variant], device="cpu", dtype="float32", micro_batch_tokens=budget)
    shape, batch = replace(shape, vocabulary=8000, layers=6), replace(BATCH, rows=16 if several else 8, minibatches=1)
    model, micro = build(shape, setup), replace(batch, rows=8)
    fuse_gelu(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with training(training_modules(model)):
        if several:
            train(model, micro)
        gradients = [p.grad for p in trained if p.grad is not None]
        with LiveMemory([*model.parameters(), *gradients]) as live:
            train(model, micro)
    measured = live.peak + sum(gradient.nbytes for gradient in gradients)
    assert sum(formulas.update_bytes(shape, batch, setup).values()) == pytest.approx(measured, rel=0.1)


def test_micro_batches_and_minibatches_bound_the_rows_of_a_pass():
    batch = Batch(rows=16, prompt=10, new=11, minibatches=2)
    assert formulas.micro_rows(8, batch, CPU) == 8
    assert formulas.micro_rows(8, batch, replace(CPU, micro_batch_tokens=65)) == 3, "rows of 20 tokens"


def test_processes_share_the_rows_and_the_sharded_tensors():
    shape, setup = SMALL["gpt2"], replace(CPU, critic="separate")
    alone = memory(shape, BATCH, setup)["kept"]
    copied = memory(shape, BATCH, replace(setup, processes=2))["kept"]
    assert copied["DDP buckets"] == alone["moments"] / 2
    assert copied["weights"] == alone["weights"]
    split = memory(shape, BATCH, replace(setup, processes=2, shard="full"))
    head = 4 * formulas.head_count(shape, setup)
    assert split["kept"]["weights"] == alone["weights"] / 2
    assert split["kept"]["critic"] == (alone["critic"] - head) / 2 + head
    assert split["kept"]["moments"] == (alone["moments"] - 2 * head) / 2 + 2 * head
    assert split["rollout"]["gathered weights"] == alone["weights"], "the policy is whole while sampling"
    layers = memory(shape, BATCH, replace(setup, processes=2, shard="full", gathered=False))
    assert layers["rollout"]["gathered weights"] == formulas.gathered_bytes(shape) < alone["weights"]


def test_frozen_parts_of_a_critic_have_no_moments():
    shape, setup = SMALL["qwen3"], replace(CPU, critic="separate")
    whole, trained = formulas.critic_parameters(shape, setup)
    assert whole == trained
    attention = shape.layers * (2 * 64 * 96 + 2 * 64 * 48)
    assert formulas.critic_parameters(shape, replace(setup, critic_trains="all but attention"))[1] == whole - attention
    assert formulas.critic_parameters(shape, replace(setup, critic_trains="head"))[1] == 0


def test_freed_memory_of_small_tensors_stays_with_a_cpu_process():
    shape = replace(SMALL["gpt2"], vocabulary=50_257, width=256, mlp=1024)
    batch = Batch(rows=32, prompt=16, new=48, minibatches=2)
    update = memory(shape, batch, CPU)["update"]
    # At the end of the backward pass a second gradient as large as the vocabulary is there, while activations that
    # have been freed stay resident.
    assert update["freed, not returned"] == 4 * projection(shape)
    assert "freed, not returned" not in memory(shape, batch, replace(CPU, device="cuda"))["update"]
    assert "freed, not returned" not in memory(replace(shape, vocabulary=1000), batch, CPU)["update"]
