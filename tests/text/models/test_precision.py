import json
from copy import deepcopy

import pytest
import torch

from helpers.configs import quiet
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.minibatches import length_batches
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import KLConfig, RunConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.models import precision
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.precision import Precision, choose_precision, round_frozen
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rollout_passes import rollout_logprobs

CPU = torch.device("cpu")
SIZE = 32  # completions; bfloat16 is slow where it is emulated


def capabilities(monkeypatch, **flags):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_configured_dtype_is_taken_and_one_that_is_only_emulated_is_said(dtype, monkeypatch):
    capabilities(monkeypatch)
    processes = Processes()
    chosen = choose_precision(dtype, processes, None)
    assert chosen == Precision(dtype, processes.device)
    assert chosen.choices == {}
    slower = "model.dtype bfloat16 is slower here than float32, since this CPU has no bfloat16 instructions; auto takes"
    assert chosen.notes == ([] if dtype == "float32" else [f"{slower} float32"])
    capabilities(monkeypatch, amx_bf16=True)
    assert chosen.notes == []


@pytest.mark.parametrize(
    ("flags", "expected", "reason"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16", "has bfloat16 instructions (avx512_bf16)"),
        ({"bf16": True}, "bfloat16", "has bfloat16 instructions (bf16)"),
        ({"avx512_f": True}, "float32", "has no bfloat16 instructions"),
    ],
)
def test_auto_is_bfloat16_on_cpus_with_instructions_for_it(flags, expected, reason, monkeypatch):
    capabilities(monkeypatch, **flags)
    chosen = choose_precision("auto", Processes(), None)
    assert chosen.choices == {"model.dtype": expected}
    assert chosen.notes == [f"model.dtype auto: {expected}, since this CPU {reason}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_keeps_the_dtype_that_auto_chose(dtype, tmp_path, monkeypatch):
    capabilities(monkeypatch, amx_bf16=dtype == "float32")
    (tmp_path / "choices.json").write_text(json.dumps({"model.dtype": dtype}))
    chosen = choose_precision("auto", Processes(), tmp_path)
    assert chosen.dtype == dtype
    assert chosen.choices == {"model.dtype": dtype}
    assert chosen.notes == [f"model.dtype auto: {dtype}, as when this run began"]
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    assert choose_precision(other, Processes(), tmp_path).dtype == other


@pytest.mark.parametrize("text", ['{"model.dtype": "float16"}', '{"model.dtype": ["float32"]}', "[]", "{"])
def test_a_choice_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "choices.json").write_text(text)
    with pytest.raises(ConfigError, match=r"choices\.json"):
        choose_precision("auto", Processes(), tmp_path)


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_bfloat16_on_gpus_that_do_not_emulate_it(native, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    half, reason = precision.choose_for_device(torch.device("cuda"))
    assert half == native
    assert reason == f"since this GPU {'computes in' if native else 'only emulates'} bfloat16"


def built_in(dtype, folder):
    """A trainer of the built-in world, whose completions end where they end."""
    args = PPOConfig(
        model=ModelConfig(dtype=dtype),
        kl=KLConfig(coef=0.0),  # needs no pass of a reference model
        rollout=RolloutConfig(batch_size=SIZE, max_new_tokens=40),
        run=quiet(folder),
    )
    return PPOTrainer(args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions))


def apart_in_parts(trainer, rollout):
    """The largest difference of log-probs in passes over parts of a batch."""
    assert rollout.mask.sum(1).unique().numel() > 10
    apart = torch.zeros_like(rollout.logprobs)
    with trainer.pipeline.precision.no_grad():
        for rows in length_batches(rollout.lengths(), 200):
            part = Rollout(**{name: x if x is None else x[rows] for name, x in vars(rollout).items()})
            apart[rows] = (rollout_logprobs(trainer.policy, part, 1.0, None) - rollout.logprobs[rows]).abs()
    return apart.max()


def test_passes_that_cut_a_batch_apart_agree(tmp_path):
    trainer = built_in("float32", tmp_path)
    assert apart_in_parts(trainer, trainer.collect().rollout) < 1e-4


def test_what_is_recorded_is_what_was_drawn_from(tmp_path):
    """Sampling's own log-probabilities, from a KV cache, beside those that bfloat16 records in their place."""
    trainer = built_in("bfloat16", tmp_path)
    engine, settings = trainer.pipeline.engine, trainer.args.rollout
    prompts = trainer.prompts.batch(0, SIZE)
    uniforms = torch.rand(SIZE, settings.max_new_tokens, generator=torch.Generator().manual_seed(0))
    recorded = engine.generate(prompts, settings, uniforms)
    assert apart_in_parts(trainer, recorded) < 0.02, "with logits in bfloat16 it was 0.05 nats"
    with trainer.pipeline.precision.no_grad():
        drawn = sample(trainer.policy, prompts, uniforms, settings, trainer.tokenizer, engine.end_ids)
    assert torch.equal(drawn.response_ids, recorded.response_ids)
    assert torch.equal(drawn.logprobs, recorded.behavior_logprobs)
    apart = (drawn.logprobs - recorded.logprobs)[drawn.mask]
    assert apart.abs().mean() < 8e-4, "1.2e-3 with both rounded to bfloat16, 4.3e-3 with one of them"
    assert apart.abs().max() < 0.04


def passed(lm, loss=False):
    """Log-probs of a model's own pass in bfloat16, and its parameters' gradients if wanted."""
    model = ActorCritic(lm)
    ids = torch.randint(2000, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 6, dtype=torch.bool)
    inputs = {"prompt_ids": ids[:, :6], "prompt_mask": mask, "response_ids": ids[:, 6:], "mask": mask}
    with Precision("bfloat16", CPU).autocast():
        if not loss:
            with torch.no_grad():
                return model.logprobs(inputs, 1.0)[0]
        model(inputs, temperature=1.0, policy_loss=SumOfLogprobs()).policy_loss.backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}


def test_on_a_gpu_in_float32_updates_take_the_attention_that_adds_in_order():
    def kernels():
        backends = torch.backends.cuda
        return backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()

    before, gpu = kernels(), torch.device("cuda")
    assert before == (True, True, True)
    for dtype, device, inside in (
        ("float32", gpu, (False, False, True)),
        ("bfloat16", gpu, before),
        ("float32", CPU, before),
    ):
        with Precision(dtype, device).updates():
            assert kernels() == inside
        assert kernels() == before


class SumOfLogprobs:
    additive = True

    def __call__(self, now, at):
        return now.logprobs.sum()


def test_frozen_products_in_bfloat16_change_no_bit_under_autocast(architecture, model_folders):
    lm = load_language_model(ModelConfig(name=str(model_folders[architecture])))[0].requires_grad_(False)
    before, bytes_before = passed(lm), size(lm)
    round_frozen(lm)
    assert torch.equal(passed(lm), before)
    assert size(lm) < bytes_before
    assert lm.get_output_embeddings().weight.dtype == torch.float32


def size(lm):
    return sum(p.numel() * p.element_size() for p in lm.parameters())


def lora_run(folder, name, **arguments):
    args = PPOConfig(
        model=ModelConfig(name=str(name), dtype="bfloat16", lora=LoraConfig(rank=4)),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        run=RunConfig(dir=str(folder), iterations=1, trackers=[]),
    )
    return PPOTrainer(args=args, reward_funcs=lambda prompts, completions: [0.0] * len(prompts), **arguments)


def test_under_an_adapter_rounded_weights_change_no_gradient(model_folders, tmp_path):
    lm = lora_run(tmp_path, model_folders["llama"]).policy.lm
    assert {p.dtype for p in lm.parameters()} == {torch.float32}, "weights are rounded on a GPU"
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    whole = deepcopy(lm)
    round_frozen(lm)
    layer = lm.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert layer.lora_A["default"].weight.dtype == torch.float32
    gradients = passed(lm, loss=True)
    assert gradients.keys() == {name for name, _ in lm.named_parameters() if "lora" in name}
    for name, gradient in passed(whole, loss=True).items():
        assert torch.equal(gradients[name], gradient)


def test_a_projection_that_peft_wraps_is_not_rounded(model_folders):
    peft = pytest.importorskip("peft")
    lm = load_language_model(ModelConfig(name=str(model_folders["llama"])))[0]
    adapted = peft.get_peft_model(lm, peft.LoraConfig(r=4, modules_to_save=["lm_head"])).requires_grad_(False)
    round_frozen(adapted.base_model.model)
    head = adapted.base_model.model.get_output_embeddings()
    assert {p.dtype for p in head.parameters()} == {torch.float32}


def test_a_model_that_was_loaded_in_python_keeps_its_weights(model_folders, tmp_path):
    lm, tokenizer = load_language_model(ModelConfig(name=str(model_folders["llama"])))
    trainer = lora_run(tmp_path, model_folders["llama"], model=lm, processing_class=tokenizer)
    assert {p.dtype for p in trainer.policy.lm.parameters()} == {torch.float32}


def test_the_reference_model_is_rounded_and_the_policy_is_not(model_folders, tmp_path):
    args = PPOConfig(
        model=ModelConfig(name=str(model_folders["qwen3"]), dtype="bfloat16"),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        run=RunConfig(dir=str(tmp_path), iterations=1, trackers=[]),
    )
    trainer = PPOTrainer(args=args, reward_funcs=lambda prompts, completions: [0.0] * len(prompts))
    assert trainer.reference.lm.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.policy.parameters()} == {torch.float32}
    scored = trainer.collect()
    kl = (scored.rollout.logprobs - scored.reference.logprobs)[scored.rollout.mask]
    assert (kl == 0).all(), "both read the same texts with the same rounded weights"
