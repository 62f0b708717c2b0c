"""Sharded models: two processes, each with half of the weights, compute what whole models do."""

import json
import sys
from copy import copy
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.files import read_metrics
from helpers.models import SHAPE, random_lm
from helpers.rewards import vowels
from helpers.sharded_cases import CASES, run_settings
from helpers.warm import together
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ShardingConfig
from tokencredit.text.models.sharded_loading import Sharding, named

EXACT = ("ids", "logprobs", "values", "ref_logprobs", "advantages", "loss", "bootstrap", "alone", "gradient", "weights")
NEEDS_GLOO = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
slow = pytest.mark.slow
CONTINUOUS = {"rollout.engine": "continuous"}


@pytest.fixture(scope="module")
def models(model_folders, tokenizer, tmp_path_factory):
    """A folder of small models, an adapter and one whose trunk is inside a wrapper among them."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3"):
        (folder / name).symlink_to(model_folders[name])
    odd = {"vocab_size": len(tokenizer) + 1}  # rows that cannot be shared out evenly, as in GPT-2 itself
    random_lm("gpt2", tokenizer, **SHAPE | odd).save_pretrained(folder / "gpt2")
    random_lm("opt", tokenizer, **SHAPE, ffn_dim=48, word_embed_proj_dim=32).save_pretrained(folder / "opt")
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "llama"), config).save_pretrained(folder / "adapter")
    for name in ("gpt2", "opt", "adapter"):
        tokenizer.save_pretrained(folder / name)
    return folder


DAILY = ("shared", "separate", "lora", "from Python", "refusals", "gathered")
PROOFS = ("tapped", "truncated", "requests", "continued", "wrapped", "layers")


def compared(models, folder, cases):
    """Folder and results of both processes of `helpers.sharded_cases`."""
    done = together(2, "-m", "helpers.sharded_cases", models, folder, *cases, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"results-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    return compared(models, tmp_path_factory.mktemp("sharded"), DAILY)


@pytest.fixture(scope="module")
def proofs(models, tmp_path_factory):
    return compared(models, tmp_path_factory.mktemp("sharded"), PROOFS)


@slow
@NEEDS_GLOO
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.proof if case in PROOFS else ()) for case in (*CASES, "from Python")],
)
def test_rollouts_losses_and_gradients_equal_those_of_whole_models(request, case):
    for result in request.getfixturevalue("proofs" if case in PROOFS else "results")[1]:
        numbers = result[case]
        assert {name: x for name, x in numbers.items() if name in EXACT and not x < 1e-6} == {}
        assert numbers["gradients"] > 4
        if case == "from Python":
            continue
        assert numbers["sharded"], "the models are sharded"
        assert numbers["mapped"] == [], "a process keeps its part of a file in memory, and not the whole file"
        assert numbers["reference"], "the reference is sharded, or the policy itself"
        assert numbers["same origin"], "the fingerprint does not depend on sharding"
        assert numbers["stale"] == 0, "weights that were loaded again are those that are gathered"
        assert numbers["saved alike"], "policy/ does not depend on sharding"
        assert numbers["without tokens"] == 0, "all trained tensors have a gradient, of 0, without acted tokens"


@slow
@NEEDS_GLOO
def test_the_trunk_of_a_separate_critic_is_sharded_by_itself(results):
    assert results[1][0]["separate"]["sharded"] == ["FSDPLlamaForCausalLM", "FSDPLlamaModel"]


@pytest.mark.proof
@slow
@NEEDS_GLOO
def test_the_trunk_of_a_wrapped_critic_is_sharded_by_itself(proofs):
    case = proofs[1][0]
    assert case["wrapped"]["sharded"] == ["FSDPOPTForCausalLM", "FSDPOPTDecoder"]


@slow
@NEEDS_GLOO
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("merged critic", "with its adapter merged; with sharded weights give a full model as critic.name"),
        ("bias", "run.shard is full, and the policy's adapter has bias 'all'"),
        ("pissa", "run.shard is full, and the policy's adapter has an initialization from the weights"),
    ],
)
def test_adapters_that_read_whole_weights_are_refused(results, case, words):
    assert words in results[1][0]["refusals"][case]


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Folder of the same run in one process, which `run.shard: full` allows."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    args = PPOConfig.from_dict(run_settings(models) | {"run.shard": "full", "run.dir": str(folder)})
    trainer = PPOTrainer(None, vowels, args)
    assert "run.shard full: one process, which holds the models whole" in trainer.notes
    trainer.train()
    return folder


@slow
@NEEDS_GLOO
@pytest.mark.parametrize("sampling", ["gathered", pytest.param("layers", marks=pytest.mark.proof)])
def test_a_run_trains_as_in_one_process(request, alone, sampling):
    folder = request.getfixturevalue("proofs" if sampling in PROOFS else "results")[0] / sampling
    one, two = read_metrics(alone), read_metrics(folder)
    for expected, got in zip(one, two, strict=True):
        for name in ("reward", "kl", "length", "value_loss", "grad_norm", "eval/reward"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for file in ("policy/model.safetensors", "critic/model.safetensors", "best/model.safetensors"):
        weights, expected = load_file(folder / file), load_file(alone / file)
        for name, x in expected.items():
            torch.testing.assert_close(weights[name], x, atol=1e-4, rtol=1e-4, msg=file)


def test_audits_and_episodes_need_gathered_weights():
    layers = {"run.shard": "full", "sharding.sampling": "layers"}
    for own in ({"audit.every": 1}, {"env.factory": "builtin:grid"}):
        with pytest.raises(ConfigError, match=r"sharding\.sampling is layers"):
            PPOConfig.from_dict(layers | own)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.compile": True}, "model.compile is true, and run.shard is full"),
        ({"model.adapter": "merge"}, "model.adapter is merge, and run.shard is full"),
        ({"rollout.cache": "static"}, "rollout.cache is static, and run.shard is full"),
        ({"sharding.offload": "frozen", "kl.coef": 0}, "no model of this run is: kl.coef is 0, and no separate critic"),
        ({"sharding.offload": "frozen", "model.lora.rank": 2}, "with an adapter the policy is its own reference"),
        (CONTINUOUS | {"rollout.max_age": 1}, "rollout.max_age is 1, and run.shard is full; .* leave one of them out"),
        (CONTINUOUS | {"sharding.sampling": "layers"}, "set sharding.sampling: gathered"),
    ],
)
def test_what_cannot_be_sharded_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        PPOConfig.from_dict({"run.shard": "full"} | settings)


@pytest.mark.slow
def test_names_of_layers_are_those_of_modules(model_folders):
    model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    assert named(model, ["model.layers.*"]) == ["model.layers.*"]
    assert named(model.model, ["model.layers.*.mlp"]) == ["layers.*.mlp"], "a critic's trunk has no prefix"
    with pytest.raises(ConfigError, match=r"'transformer\.h\.\*', which names no module of LlamaForCausalLM"):
        named(model, ["transformer.h.*"])


def test_layers_that_share_weights_with_others_are_refused(model_folders):
    sharding = Sharding(ShardingConfig(layers=["transformer.wte", "transformer.h.*.mlp"]), Processes())
    with pytest.raises(ConfigError, match=r"so transformer\.wte cannot be gathered alone; name modules without it"):
        sharding.names(AutoModelForCausalLM.from_pretrained(model_folders["gpt2"]))
    untied = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    layers = ShardingConfig(layers=["model.embed_tokens", "model.layers.*.mlp", "lm_head"])
    assert replace(sharding, settings=layers).names(untied) == ["model.embed_tokens", "model.layers.*.mlp", "lm_head"]


@pytest.mark.parametrize("part", ["mlp", "mlp.up_proj.weight"])
def test_layers_of_a_model_that_share_weights_are_refused_unless_named_without_them(model_folders, part):
    """As in Zamba, whose layers share an attention."""
    model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    first, second = model.model.layers[:2]
    owner, _, name = part.rpartition(".")
    setattr(second.get_submodule(owner), name, attrgetter(part)(first))
    sharding = Sharding(ShardingConfig(), Processes())
    with pytest.raises(
        ConfigError, match=r"layers\.\*\.mlp\.\w+_proj .* so model\.layers\.\* cannot be gathered alone"
    ):
        sharding.names(model)
    rest = ShardingConfig(layers=["model.layers.*.self_attn"])
    assert replace(sharding, settings=rest).names(model) == ["model.layers.*.self_attn"]


def test_with_an_old_transformers_models_are_loaded_whole(monkeypatch, model_folders):
    pair = copy(Processes())
    pair.count = 2
    sharding = Sharding.of(PPOConfig.from_dict({"run.shard": "full"}), pair)
    folder, args = str(model_folders["llama"]), PPOConfig().model
    assert sharding.options(AutoModelForCausalLM, folder, args)["distributed_config"].fsdp_plan
    for old in (SimpleNamespace(), SimpleNamespace(DistributedConfig=lambda fsdp_size: None)):
        monkeypatch.setitem(sys.modules, "transformers", old)
        assert sharding.options(AutoModelForCausalLM, folder, args) == {}


def test_an_accelerator_that_is_not_used_is_refused(monkeypatch):
    args, pair = PPOConfig.from_dict({"run.shard": "full"}), copy(Processes())
    pair.count = 2
    assert Sharding.of(args, Processes()) is None, "one process holds everything"
    assert Sharding.of(PPOConfig(), pair) is None
    other = torch.device("cuda" if pair.device.type == "cpu" else "cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: other)
    with pytest.raises(ConfigError, match=r"where Transformers would shard; hide that too"):
        Sharding.of(args, pair)


def test_a_frozen_critic_may_be_offloaded_without_a_reference_model():
    settings = {"run.shard": "full", "sharding.offload": "frozen", "critic.kind": "separate"}
    args = PPOConfig.from_dict(settings | {"critic.detach": True, "kl.coef": 0})
    args.check_offload(adapted=True)
    with pytest.raises(ConfigError, match=r"no separate critic has critic\.detach; leave it out"):
        PPOConfig.from_dict(settings).check_offload(adapted=True)  # an adapter of a folder or from Python


def test_nothing_is_offloaded_on_a_cpu(tmp_path):
    args = PPOConfig.from_dict({"run.shard": "full", "sharding.offload": "frozen", "run.dir": str(tmp_path / "run")})
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"sharding\.offload is frozen, and this run is on a CPU already"):
        PPOTrainer(None, vowels, args)
