"""Models with weights of 4 or 8 bits: trained with an adapter on top, by the setting, from a folder and loaded."""

import json
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from helpers.configs import quiet
from helpers.files import read_metrics, without_times
from helpers.proofs import proofs
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.adapters import add_adapter
from tokencredit.text.models.model_loading import check_language_model, load_language_model, weights_digest
from tokencredit.text.models.peft_models import probe_logits
from tokencredit.text.models.precision import dense_weight, quantised_layers, round_frozen, weights_in
from tokencredit.text.models.run_models import load_start, merged
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

KINDS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


def lora():
    """A configuration of an adapter that begins with a change of its own."""
    return peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def folders(model_folders, tokenizer, tmp_path_factory):
    """Folders of a dense model, of quantised ones, and of a trained adapter on each."""
    folders = {}
    for kind in (None, *KINDS):
        options = {} if kind is None else {"quantization_config": KINDS[kind], "device_map": {"": "cpu"}}
        lm = AutoModelForCausalLM.from_pretrained(model_folders["llama"], **options)
        torch.manual_seed(3)
        for adapted in (False, True):
            model = peft.get_peft_model(lm, lora()) if adapted else lm
            folders[kind, adapted] = folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            lm.name_or_path = str(folder)
            tokenizer.save_pretrained(folder)
    return folders


def settings(folder, iterations=2, **changes):
    """A small run of a model by name, with a new adapter."""
    small = {
        "model.dtype": "float32",
        "model.lora.rank": 4,
        "prompts.text": ["A film", "The actors were"],
        "reward": [{"function": "length"}],
        "rollout.batch_size": 8,
        "rollout.max_new_tokens": 6,
        "rollout.per_prompt": 2,
        "ppo.minibatches": 2,
        "optim.lr": 0.01,
        "optim.warmup": 0,
    }
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(PPOConfig.from_dict(small | changes), run=quiet(folder, iterations, save_every=1))


@pytest.fixture(scope="module")
def run(model_folders, tmp_path_factory):
    """A finished run of a 4-bit model with a new adapter, and another for its critic."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    PPOTrainer(args=settings(folder, 3, **both(model_folders))).train()
    return folder


def both(folders):
    """Settings of a 4-bit base with an adapter for the policy and one for the critic."""
    names = {"model.name": str(folders["llama"]), "model.quantization": "nf4"}
    return names | {"critic.kind": "separate", "critic.lora.rank": 2, "critic.lr": 0.01}


def start(kind, source, adapted, folders):
    """Name, loaded model and quantization of each way in."""
    if source == "setting":
        return str(folders[None, adapted]), None, kind
    if source == "folder":
        return str(folders[kind, adapted]), None, None
    options = {"quantization_config": KINDS[kind], "device_map": {"": "cpu"}, "dtype": torch.bfloat16}
    lm = AutoModelForCausalLM.from_pretrained(folders[None, False], **options)
    return "", peft.PeftModel.from_pretrained(lm, folders[None, True], is_trainable=True) if adapted else lm, None


WAYS = list(product(KINDS, ("setting", "loaded", "folder"), (False, True), ("shared", "separate", "none")))
DAILY = [("nf4", "loaded", True, "separate"), ("int8", "setting", False, "shared"), ("int8", "folder", True, "none")]


@pytest.mark.parametrize("dtype", ["float32", *proofs("bfloat16")])
@pytest.mark.parametrize(
    ("kind", "source", "adapted", "critic"), [*DAILY, *proofs(*(way for way in WAYS if way not in DAILY))]
)
@pytest.mark.slow
def test_each_way_in_trains_from_the_probabilities_it_samples_with(
    kind, source, adapted, critic, dtype, folders, tokenizer, tmp_path
):
    name, model, quantization = start(kind, source, adapted, folders)
    changes = {"model.name": name, "model.quantization": quantization, "model.dtype": dtype, "critic.kind": critic}
    changes |= {"advantage.estimator": "uniform"} if critic == "none" else {}
    args = settings(tmp_path / "run", **changes | {"model.lora.rank": 0 if adapted else 4})
    trainer = PPOTrainer(model, args=args, processing_class=None if model is None else tokenizer)
    layers = quantised_layers(trainer.policy.lm)
    before = {name: layer.weight.data.clone() for name, layer in layers.items()}
    trainer.train()
    rows = read_metrics(tmp_path / "run")
    assert all(row["first_ratio_error"] < 1e-4 for row in rows)
    assert abs(rows[0]["kl"]) < 1e-4
    assert rows[1]["kl"] > 1e-3
    assert len(before) == 14
    assert all(torch.equal(layer.weight.data, before[name]) for name, layer in layers.items())
    assert trainer.reference is trainer.policy
    assert json.loads((tmp_path / "run" / "policy" / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_a_gradient_is_that_of_the_dequantised_model(folders):
    for kind in KINDS:
        lm, _ = load_language_model(ModelConfig(name=str(folders[kind, False])))
        dense, _ = load_language_model(ModelConfig(name=str(folders[None, False])))
        for name, layer in quantised_layers(lm).items():
            dense.get_submodule(name).weight.data = dense_weight(layer)
        weights = {name: [0.0] for name in ("embed_tokens",)}
        for model in (lm, dense):
            parameter = model.get_input_embeddings().weight.requires_grad_()
            (gradient,) = torch.autograd.grad(probe_logits(model).square().sum(), [parameter])
            weights["embed_tokens"].append(gradient)
        torch.testing.assert_close(*weights["embed_tokens"][1:], atol=1e-4, rtol=1e-4)
        assert weights_in(lm.parameters()) == weights_in(dense.parameters())
        assert weights_digest(lm) == weights_digest(dense), "the digest is of the numbers, not of their codes"


def test_in_bfloat16_embedding_and_projection_are_rounded_and_no_log_prob_changes_much(folders):
    lm, _ = load_language_model(ModelConfig(name=str(folders["nf4", False])))
    add_adapter(lm, lora(), "peft_config")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = probe_logits(lm).float().log_softmax(-1)
        codes = {name: layer.weight.data.clone() for name, layer in quantised_layers(lm).items()}
        round_frozen(lm)
        after = probe_logits(lm).float().log_softmax(-1)
    assert {x.weight.dtype for x in (lm.get_input_embeddings(), lm.get_output_embeddings())} == {torch.bfloat16}
    assert all(torch.equal(layer.weight.data, codes[name]) for name, layer in quantised_layers(lm).items())
    assert (after - before).abs().mean() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_into_dequantised_weights(kind, folders, tmp_path):
    args = ModelConfig(name=str(folders[kind, True]), adapter="merge")
    lm, _ = load_start(args)
    before = probe_logits(lm).detach()
    lm = merged(args, lm)
    assert not quantised_layers(lm)
    torch.testing.assert_close(probe_logits(lm), before, atol=1e-4, rtol=1e-4)
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    torch.testing.assert_close(probe_logits(again), before, atol=1e-4, rtol=1e-4)


def test_merging_says_that_it_dequantises_and_trains_everything(folders, tmp_path):
    model = {"model.name": str(folders["nf4", True]), "model.adapter": "merge", "model.lora.rank": 0}
    trainer = PPOTrainer(args=settings(tmp_path / "run", 1, **model))
    assert trainer.notes[0].startswith("model.adapter merge: the weights of")
    assert "dequantised to float32" in trainer.notes[0]
    assert all(p.requires_grad for p in trainer.policy.lm.parameters())


def test_the_policy_is_an_adapter_of_the_dense_model(run, model_folders):
    config = json.loads((run / "policy" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folders["llama"])
    lm = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    assert peft.PeftModel.from_pretrained(lm, run / "policy")


def test_a_finished_run_is_loaded_quantised_and_evaluated(run, capsys):
    policy = load(run)
    assert len(quantised_layers(policy.model.lm)) == 14
    assert len(policy.generate("A film", n=2, max_new_tokens=4)) == 2
    assert len(policy.values(" was", "A film")) == len(policy.logprobs(" was", "A film"))
    assert main(["evaluate", str(run), "--samples", "4"]) == 0
    assert "reward" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(run, model_folders, tmp_path):
    trainer = PPOTrainer(args=settings(tmp_path / "run", 3, **both(model_folders)))
    iteration = trainer.iteration

    def until(number):
        if number == 3:
            raise KeyboardInterrupt
        return iteration(number)

    trainer.iteration = until
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert without_times(read_metrics(tmp_path / "run")) == without_times(read_metrics(run))


@pytest.mark.parametrize("way", [{"rollout.cache": "static"}, *proofs({"rollout.engine": "continuous"})])
def test_other_ways_to_sample(way, model_folders, tmp_path):
    model = {"model.name": str(model_folders["llama"]), "model.quantization": "int8"}
    PPOTrainer(args=settings(tmp_path / "run", **model, **way)).train()
    assert all(row["first_ratio_error"] < 1e-4 for row in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.lora.rank": 0}, r"are quantised, and only an adapter can be trained on them; set model\.lora\.rank"),
        ({"model.compile": True}, r"model\.compile is true, and the weights of .* set model\.compile: false"),
        ({"rollout.engine": "vllm"}, r"rollout\.engine is vllm, .*: local, or train"),
    ],
)
def test_settings_that_need_dense_weights_are_refused(changes, message, model_folders, tmp_path):
    model = {"model.name": str(model_folders["llama"]), "model.quantization": "nf4"}
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=settings(tmp_path / "run", **model | changes))


def test_a_whole_critic_beside_a_quantised_policy_is_noted(model_folders, tmp_path):
    model = {"model.name": str(model_folders["llama"]), "model.quantization": "nf4", "critic.kind": "separate"}
    trainer = PPOTrainer(args=settings(tmp_path / "run", **model))
    assert any("a whole, dequantised copy of the policy in float32" in note for note in trainer.notes)


def test_quantising_twice_or_a_loaded_model_is_refused(folders):
    with pytest.raises(ConfigError, match=r"model\.quantization is int8, and the weights of .* are quantised already"):
        load_start(ModelConfig(name=str(folders["nf4", False]), quantization="int8"))
    lm = AutoModelForCausalLM.from_pretrained(folders[None, False])
    with pytest.raises(ConfigError, match=r"model\.quantization is nf4, and model is a loaded one; give its name"):
        load_start(ModelConfig(name="", quantization="nf4"), lm)
    with pytest.raises(ConfigError, match=r"has no effect without model\.adapter: continue"):
        PPOConfig(model=ModelConfig(quantization="nf4", adapter="merge"))


def test_an_adapter_that_starts_from_the_weights_is_refused_in_one_line(folders):
    lm, _ = load_language_model(ModelConfig(name=str(folders["nf4", False])))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(ConfigError, match=r"^peft_config: Please initialize PiSSA under float32"):
        add_adapter(lm, config, "peft_config")


@pytest.mark.parametrize("saved", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}])
def test_weights_of_other_libraries_are_refused_in_one_line(saved, model_folders, tmp_path):
    """By name or loaded, before their package or the weights are looked for."""
    folder = tmp_path / "quantised"
    shutil.copytree(model_folders["gpt2"], folder)
    lm, tokenizer = load_language_model(ModelConfig(name=str(folder)))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": saved}
    (folder / "config.json").write_text(json.dumps(config))
    lm.config.quantization_config = saved
    for read in (load_language_model, lambda args: check_language_model(args, lm, tokenizer)):
        with pytest.raises(ConfigError, match=f"^the weights of '{folder}' are quantised .* those of bitsandbytes"):
            read(ModelConfig(name=str(folder)))
