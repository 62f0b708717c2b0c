"""Measured sizes are those of real tensors, for every family and kind of run."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from helpers.proofs import proofs
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.errors import ConfigError
from tokencredit.learn.state import trainable
from tokencredit.text.models.precision import BITS
from tokencredit.tools.plan.memory import LiveMemory, measure, update_parts
from tokencredit.tools.plan.passes import SkeletonPasses
from tokencredit.tools.plan.plan import make_plan
from tokencredit.tools.plan.work import plan_work

SMALL = {"rollout.batch_size": 8, "rollout.max_new_tokens": 12, "model.dtype": "float32", "run.iterations": 3}
SMALL |= {"reward": [{"function": "length"}], "rollout.stop_at_eos": False}
SIZES = {"vocab_size": 997, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDER = {"intermediate_size": 112, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES = {
    "gpt2": {},
    "llama": WIDER,
    "qwen3": WIDER,
    "gemma2": {**WIDER, "sliding_window": 8},
    "mistral": {**WIDER, "sliding_window": 8},
    "gpt_neox": {"intermediate_size": 128},
    "mixtral": {**WIDER, "num_local_experts": 4, "num_experts_per_tok": 2},
}
pytestmark = pytest.mark.slow

CASES = [*product(FAMILIES, ("float32", "bfloat16"))]
DAILY = ("gemma2", "bfloat16")


def work_of(settings=None, **options):
    return plan_work(PPOConfig.from_dict(SMALL | (settings or {})), **options)


def family(kind, folder, settings=None, **options):
    AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind]).save_pretrained(folder)
    batch = {"rollout.batch_size": 8, "rollout.max_new_tokens": 20, "ppo.minibatches": 1}
    return work_of({"model.name": str(folder), **batch, **(settings or {})}, prompt_tokens=12, **options)


def live_update(work):
    """The peak of an update of a real model, by the same count of live storages, without fake tensors."""
    torch.manual_seed(0)
    passes = SkeletonPasses(work, torch.device("cpu"))
    with LiveMemory(work, [*passes.policy.parameters(), *passes.policy.buffers()]) as live:
        return sum(update_parts(live, passes, elsewhere=0).values())


@pytest.mark.parametrize(("kind", "dtype"), [DAILY, *proofs(*(case for case in CASES if case != DAILY))])
def test_an_update_on_fake_tensors_takes_the_memory_of_a_real_one(kind, dtype, tmp_path):
    work = family(kind, tmp_path, {"model.dtype": dtype})
    measured = measure(work)
    assert measured.parts["kept"]["weights"] == 4 * measured.parameters
    assert sum(measured.parts["update"].values()) == pytest.approx(live_update(work), rel=0.05)
    assert measured.parts["rollout"]["KV cache"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"critic.kind": "separate", "critic.layers": 1},
        {"model.lora.rank": 4},
        *proofs({}, {"critic.kind": "none", "advantage.estimator": "uniform"}, {"optim.name": "muon"}),
        *proofs({"model.dtype": "bfloat16"}),  # slow where bfloat16 is emulated
    ],
    ids=["separate", "LoRA", "shared", "none", "muon", "bfloat16"],
)
def test_the_tensors_of_a_run_have_the_planned_sizes(settings, tmp_path):
    config = PPOConfig.from_dict(SMALL | settings | {"run.dir": str(tmp_path / "run"), "run.trackers": []})
    plan = make_plan(config, time=False)
    kept = plan.sizes.parts["kept"]
    trainer = PPOTrainer(args=config)
    trainer.iteration(1)
    critic, reference = trainer.policy.critic, trainer.reference
    state = trainer.learner.optimizer.state.values()
    assert sum(p.nbytes for p in trainer.policy.lm.parameters()) == kept["weights"]
    assert (0 if critic is None else sum(p.nbytes for p in critic.parameters())) == kept["critic"]
    assert sum(x.nbytes for values in state for x in values.values() if x.dim()) == kept["moments"]
    own = 0 if reference is trainer.policy else sum(p.nbytes for p in reference.parameters())
    assert own == kept["reference"]
    assert sum(p.numel() for p in trainable(trainer.policy)) == plan.sizes.trained


def test_a_folder_that_comes_quantised_is_planned_as_one_that_the_setting_quantises(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    saved = {"quant_method": "bitsandbytes"} | four
    AutoConfig.for_model("llama", **SIZES, **WIDER, quantization_config=saved).save_pretrained(tmp_path / "saved")
    given = {
        "rollout.batch_size": 2,
        "rollout.max_new_tokens": 4,
        "ppo.minibatches": 1,
        "model.name": str(tmp_path / "saved"),
    }
    by_setting = family(
        "llama", tmp_path, given | {"model.quantization": "nf4", "model.lora.rank": 4, "model.name": str(tmp_path)}
    )
    by_folder = work_of(given | {"model.lora.rank": 4}, prompt_tokens=12)
    assert measure(by_folder).parts["kept"] == measure(by_setting).parts["kept"]
    codes, state = functional.quantize_4bit(torch.randn(512, 512), quant_type="nf4", compress_statistics=True)
    scales = state.absmax.nbytes + state.state2.absmax.nbytes
    assert codes.nbytes + scales == 512 * 512 * BITS["nf4"] / 8
    for more, message in (
        ({}, "are quantised, and only an adapter can be trained on them"),
        ({"model.lora.rank": 4, "model.quantization": "int8"}, "are quantised already; leave it out"),
        ({"model.lora.rank": 4, "model.compile": True}, r"model\.compile is true"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure(work_of(given | more, prompt_tokens=12))


@pytest.mark.parametrize(("new", "per_prompt", "capacity"), [(20, 1, 76), (20, 4, 77), (2, 4, 77), (1, 4, 77)])
def test_a_growing_cache_has_the_capacity_of_a_real_one(new, per_prompt, capacity, tmp_path):
    work = family("llama", tmp_path, {"rollout.max_new_tokens": new, "rollout.per_prompt": per_prompt})
    # 12 tokens and 64 more hold all 32, and 13 if prompts are repeated; 2 layers of keys and values, 2 heads of 16.
    assert measure(work).parts["rollout"]["KV cache"] == 8 * capacity * 2 * 2 * 2 * 16 * 4


def test_micro_batches_and_checkpointing_lower_the_update(tmp_path):
    plain, micro, both = (
        sum(measure(family("llama", tmp_path, settings, device="cuda")).parts["update"].values())
        for settings in (
            {"rollout.max_new_tokens": 100},
            {"rollout.max_new_tokens": 100, "ppo.micro_batch_tokens": 230},
            {"rollout.max_new_tokens": 100, "ppo.micro_batch_tokens": 230, "model.gradient_checkpointing": True},
        )
    )
    assert plain > 2 * micro > 2 * both


def test_processes_share_the_rows_and_the_sharded_tensors():
    settings = {"critic.kind": "separate"}
    alone = measure(work_of(settings))
    copied = measure(work_of(settings, processes=2))
    split = measure(work_of(settings | {"run.shard": "full"}, processes=2))
    kept = alone.parts["kept"]
    assert copied.parts["kept"]["DDP buckets"] == 4 * alone.trained
    assert copied.parts["kept"]["weights"] == kept["weights"]
    assert split.parts["kept"]["weights"] == kept["weights"] / 2
    assert kept["critic"] / 2 < split.parts["kept"]["critic"] < kept["critic"], "the value head is whole"
    assert split.parts["rollout"]["gathered weights"] == kept["weights"], "the policy is whole while sampling"
    layers = measure(work_of(settings | {"run.shard": "full", "sharding.sampling": "layers"}, processes=2))
    assert layers.parts["rollout"]["gathered weights"] <= kept["weights"]


@pytest.mark.proof
def test_a_gpu_computes_larger_chunks_of_logits(tmp_path):
    work = family("gpt2", tmp_path, {"model.dtype": "bfloat16"})
    on_gpu = measure(replace(work, device="cuda"))
    assert "save" not in on_gpu.parts
    assert on_gpu.parts["rollout"]["KV cache"] != measure(work).parts["rollout"]["KV cache"]
