"""Adapters that a model has from the start, new ones, their references, and what is refused."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import load_language_model, load_tokenizer
from tokencredit.text.models.peft_models import UNSUPPORTED
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import build_models, build_policy, build_trunk, load_start, save_policy

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

CPU = Precision("float32", torch.device("cpu"))
IDS = torch.arange(5, 17).view(2, 6)
TARGETS = ["q_proj", "v_proj"]
KINDS = {
    "LoRA": peft.LoraConfig(r=4, target_modules=TARGETS),
    "rsLoRA": peft.LoraConfig(r=4, target_modules=TARGETS, use_rslora=True),
    "DoRA": peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "PiSSA": peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa"),
    "PiSSA by a random method": peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="pissa_niter_1"),
    "OLoRA": peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="olora"),
    "with a random start": peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False),
    "with biases": peft.LoraConfig(r=4, target_modules=["c_attn"], bias="all"),
    "with its layers' biases": peft.LoraConfig(r=4, target_modules=["c_attn"], bias="lora_only"),
    "with norms": peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["norm"]),
    "with a head": peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "with embeddings": peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["embed_tokens"]),
    "with tokens": peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[5, 6]),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(r=4, target_modules=TARGETS),
    "LoKr": peft.LoKrConfig(r=4, target_modules=TARGETS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS),
    "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS),
    "HRA": peft.HRAConfig(r=4, target_modules=TARGETS),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "VB-LoRA": peft.VBLoRAConfig(r=4, num_vectors=60, vector_length=8, target_modules=["q_proj", "o_proj"]),
    "FourierFT": peft.FourierFTConfig(n_frequency=50, target_modules=TARGETS),
    "RandLoRA": peft.RandLoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "layer norms": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[5, 6, 7]),
}
"""A configuration of each kind of adapter that PPO trains."""


def logits(lm):
    with torch.no_grad():
        return lm(IDS).logits


def step(policy, size=0.05):
    """Change everything that is trained."""
    trained = [p for p in policy.lm.parameters() if p.requires_grad]
    hidden = policy.hidden(IDS, torch.ones_like(IDS, dtype=torch.bool), torch.arange(6).expand(2, 6))
    loss = -torch.log_softmax(policy.logits(hidden), -1)[..., 7].mean()
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        if gradient is not None:
            parameter.data -= size * gradient.sign()


def reference_logits(models):
    """The reference's logits, by the way that scoring takes."""
    if models.reference is not models.policy:
        return logits(models.reference.lm)
    with models.policy.adapter.reference():
        return logits(models.reference.lm)


def models_of(name, peft_config=None, model=None, **changes):
    torch.manual_seed(1)
    args = PPOConfig(model=ModelConfig(name=str(name), **changes))
    lm, tokenizer = load_start(args.model, model, None if model is None else load_tokenizer(args.model))
    return build_models(args, lm, tokenizer, CPU, peft_config)


def base_of(kind):
    return "gpt2" if "biases" in kind else "llama"


@pytest.fixture(scope="module")
def lora_folder(model_folders, tmp_path_factory):
    """The folder of a trained LoRA, as PEFT leaves it, with a tokenizer."""
    folder = tmp_path_factory.mktemp("lora")
    models = models_of(model_folders["llama"], peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    step(models.policy)
    save_policy(folder, models.policy, models.tokenizer)
    return folder


@pytest.fixture(scope="module")
def adapted(lora_folder):
    """The logits of the model with that adapter, by PEFT alone."""
    return logits(plain(lora_folder))


def plain(folder, base=None, **options):
    """A PEFT model by PEFT's own loading."""
    config = peft.PeftConfig.from_pretrained(folder)
    lm = AutoModelForCausalLM.from_pretrained(base or config.base_model_name_or_path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(lm, folder, **options).eval()


def saved(folder, base):
    """What a policy's folder holds: an adapter, or the whole model."""
    if (folder / "adapter_config.json").is_file():
        return plain(folder, base)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_reference_of_an_adapter_that_goes_on_has_no_dropout(model_folders, tmp_path):
    first = models_of(model_folders["llama"], lora=LoraConfig(rank=4, dropout=0.5))
    step(first.policy)
    save_policy(tmp_path / "run", first.policy, first.tokenizer)
    models = models_of(tmp_path / "run")
    torch.testing.assert_close(reference_logits(models), logits(models.policy.lm))
    assert not any(module.training for module in models.policy.lm.modules())


# One of each way that Tokencredit tells apart; how PEFT reshapes a layer makes no difference to it.
IN_SUITE = ("LoRA", "PiSSA", "with a random start", "with biases", "with a head", "with tokens", "IA3", "VB-LoRA")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_SUITE else pytest.mark.proof) for kind in KINDS]
)
def test_each_kind_trains_and_its_reference_stays(kind, model_folders, tmp_path):
    """A new adapter first, then the same going on from its folder; what is saved is what was trained."""
    base = model_folders[base_of(kind)]
    first = models_of(base, KINDS[kind])
    start = logits(first.policy.lm)
    if kind in ("with a random start", "VB-LoRA", "FourierFT"):  # the policy does not begin as the model
        start = logits(AutoModelForCausalLM.from_pretrained(base))
    for models, folder in ((first, tmp_path / "first"), (None, tmp_path / "second")):
        if models is None:
            models = models_of(tmp_path / "first")
            torch.testing.assert_close(logits(models.policy.lm), start, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(reference_logits(models), start, atol=1e-4, rtol=1e-4)
        flags = {name: p.requires_grad for name, p in models.policy.lm.named_parameters()}
        for _ in range(2):
            step(models.policy)
        after = logits(models.policy.lm)
        assert (after - start).abs().max() > 1e-2
        torch.testing.assert_close(reference_logits(models), start, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits(models.policy.lm), after)
        assert {name: p.requires_grad for name, p in models.policy.lm.named_parameters()} == flags
        save_policy(folder, models.policy, models.tokenizer)
        torch.testing.assert_close(logits(saved(folder, base)), after, atol=1e-4, rtol=1e-4)
        start = after


def test_only_an_adapter_of_its_own_weights_shares_the_model_with_its_reference(model_folders, lora_folder):
    """A second model in memory is what a bias, a head, or another kind costs, and LoRA does not."""
    shared = {kind: models_of(model_folders[base_of(kind)], KINDS[kind]) for kind in ("LoRA", "PiSSA", "with biases")}
    shared["with a head"] = models_of(model_folders["llama"], KINDS["with a head"])
    shared["went on"] = models_of(lora_folder)
    alone = {kind: models.reference is models.policy for kind, models in shared.items()}
    assert alone == {"LoRA": True, "PiSSA": True, "with biases": False, "with a head": False, "went on": True}


REFUSED = {
    "prompt tuning": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
    "prefix tuning": (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
    "p-tuning": (peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "P_TUNING"),
    "AdaLoRA": (peft.AdaLoraConfig(total_step=10, target_modules=TARGETS), "ADALORA"),
    "adaption prompt": (peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2), "ADAPTION_PROMPT"),
    "Poly": (peft.PolyConfig(target_modules=TARGETS), "POLY"),
    "aLoRA": (
        peft.LoraConfig(target_modules=TARGETS, alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
        "LORA with alora_invocation_tokens",
    ),
}


@pytest.mark.parametrize("kind", ["prompt tuning", "aLoRA", *proofs(*([*REFUSED][1:-1]))])
def test_kinds_that_would_not_be_trained_are_refused(kind, model_folders, tmp_path):
    config, name = REFUSED[kind]
    with pytest.raises(ConfigError, match=rf"an adapter of type {name} cannot be trained here: .*; use LoRA"):
        models_of(model_folders["llama"], config)
    config.base_model_name_or_path = str(model_folders["llama"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"an adapter of type {name} cannot be trained here"):
        load_language_model(ModelConfig(name=str(tmp_path)))


def test_refused_kinds_exist():
    assert set(UNSUPPORTED) - {"SHADOW"} <= {kind.value for kind in peft.PeftType}, "SHADOW is newer than some versions"


@pytest.mark.parametrize("way", ["folder", "another name", *proofs("PeftModel", "frozen PeftModel", "Transformers")])
def test_every_way_in_goes_on_with_the_adapter_that_is_there(way, lora_folder, adapted, tmp_path):
    if way == "folder":
        models = models_of(lora_folder)
    elif way == "Transformers":
        models = models_of(lora_folder, model=AutoModelForCausalLM.from_pretrained(lora_folder))
    else:
        name = {"adapter_name": "sft"} if way == "another name" else {}
        given = plain(lora_folder, is_trainable=way == "PeftModel", **name)
        models = models_of(lora_folder, model=given)
        assert models.policy.lm is given.get_base_model(), "it is trained in place"
    trained = [name for name, p in models.policy.lm.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all("lora_" in name and "reference" not in name for name in trained)
    torch.testing.assert_close(logits(models.policy.lm), adapted)
    step(models.policy)
    torch.testing.assert_close(reference_logits(models), adapted)
    save_policy(tmp_path, models.policy, models.tokenizer)
    assert {file.name for file in tmp_path.iterdir() if file.is_dir()} == set()
    torch.testing.assert_close(logits(plain(tmp_path)), logits(models.policy.lm))


@pytest.mark.parametrize("way", ["PeftModel", *proofs("folder", "Transformers")])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_merged_adapter_is_part_of_the_weights(way, rank, lora_folder, adapted, tmp_path):
    given = {
        "folder": lambda: None,
        "PeftModel": lambda: plain(lora_folder),
        "Transformers": lambda: AutoModelForCausalLM.from_pretrained(lora_folder),
    }[way]()
    models = models_of(lora_folder, model=given, adapter="merge", lora=LoraConfig(rank=rank))
    torch.testing.assert_close(logits(models.policy.lm), adapted, atol=1e-4, rtol=1e-4)
    trained = {name: p for name, p in models.policy.lm.named_parameters() if p.requires_grad}
    assert (len(trained) == len(dict(models.policy.lm.named_parameters()))) == (rank == 0)
    step(models.policy)
    torch.testing.assert_close(reference_logits(models), adapted, atol=1e-4, rtol=1e-4)
    save_policy(tmp_path, models.policy, models.tokenizer)
    after, trained = logits(models.policy.lm), {name: p.clone() for name, p in trained.items()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not getattr(again, "peft_config", None), "a whole model: the merged weights are in no other folder"
    torch.testing.assert_close(logits(again), after, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(p, trained[name]) for name, p in models.policy.lm.named_parameters() if name in trained)


def test_an_adapter_on_the_output_projection_can_only_be_merged(model_folders, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    model = peft.get_peft_model(lm, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapts the output projection, .*; set model\.adapter: merge"):
        models_of(tmp_path)
    torch.testing.assert_close(logits(models_of(tmp_path, adapter="merge").policy.lm), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoraConfig(rank=2)}, r"has an adapter already, and model\.lora\.rank is 2; leave that out .* merge"),
        ({"peft_config": KINDS["LoRA"]}, r"has an adapter already, and peft_config is set; leave that out .* merge"),
    ],
)
def test_a_new_adapter_beside_the_one_that_is_there_is_refused(changes, message, lora_folder):
    with pytest.raises(ConfigError, match=message):
        models_of(lora_folder, **changes)
    with pytest.raises(ConfigError, match=message):
        models_of(lora_folder, model=plain(lora_folder), **changes)


def test_settings_of_adapters_that_cannot_be_met(model_folders, lora_folder):
    with pytest.raises(ConfigError, match=r"model\.adapter is merge, and .* has no adapter; leave it out"):
        models_of(model_folders["llama"], adapter="merge")
    with pytest.raises(ConfigError, match="model is a Linear; give a name, a folder, a PreTrainedModel or a PeftModel"):
        models_of(model_folders["llama"], model=torch.nn.Linear(2, 2))


def test_states_of_a_peft_model_that_would_not_be_trained(lora_folder):
    merged = plain(lora_folder)
    merged.merge_adapter()
    with pytest.raises(ConfigError, match="is switched off or merged"):
        models_of(lora_folder, model=merged)
    off = plain(lora_folder)
    off.base_model.disable_adapter_layers()
    with pytest.raises(ConfigError, match="is switched off or merged"):
        models_of(lora_folder, model=off)
    two = plain(lora_folder)
    two.load_adapter(lora_folder, "other")
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match="exactly one active adapter, not default, other"):
        models_of(lora_folder, model=two)


def test_weights_that_the_adapters_folder_would_not_hold(lora_folder):
    model = plain(lora_folder, is_trainable=True)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is trainable but not part of the adapter"):
        models_of(lora_folder, model=model)


def test_a_model_without_a_trained_parameter_is_refused(model_folders):
    frozen = AutoModelForCausalLM.from_pretrained(model_folders["llama"]).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no parameter of the model .* requires a gradient, .*; call requires_grad_"):
        models_of(model_folders["llama"], model=frozen)
    assert models_of(model_folders["llama"], KINDS["LoRA"], model=frozen).policy.adapter is not None


def test_a_separate_critic_starts_from_the_policy_with_its_adapter(lora_folder, adapted):
    args = ModelConfig(name=str(lora_folder))
    lm, tokenizer = load_language_model(args)
    trunk = build_trunk(CriticConfig(kind="separate"), args, lm, tokenizer)
    assert not any("lora" in name for name, _ in trunk.named_parameters())
    assert all(p.requires_grad for p in trunk.parameters())
    with torch.no_grad():
        expected = lm.get_decoder()(IDS).last_hidden_state
        torch.testing.assert_close(trunk(IDS).last_hidden_state, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(lm), adapted)


def test_an_adapters_folder_without_a_tokenizer_takes_the_base_models(lora_folder, tmp_path):
    shutil.copytree(lora_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "bare")))
    assert tokenizer.get_vocab() == load_tokenizer(ModelConfig(name=str(lora_folder))).get_vocab()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": None}, "names no base model; set base_model_name_or_path in adapter_config.json"),
        ({"base_model_name_or_path": "./gone"}, "'./gone' is not a model folder"),
        ({"peft_type": "NEW"}, "cannot read adapter_config.json of"),
        ({"r": 2}, "cannot load a language model from .*: Error.* size mismatch"),
        ({"target_modules": ["q_proj"]}, "do not match; on one side only: .*v_proj"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "do not match; on one side only: .*k_proj"),
    ],
)
def test_folders_of_adapters_that_are_not_whole(changes, message, lora_folder, tmp_path):
    shutil.copytree(lora_folder, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        load_language_model(ModelConfig(name=str(tmp_path / "adapter")))


def test_an_adapter_in_a_models_own_folder(lora_folder, model_folders, adapted, tmp_path):
    shutil.copytree(model_folders["llama"], tmp_path / "both")
    for file in lora_folder.glob("adapter*"):
        shutil.copy(file, tmp_path / "both")
    models = models_of(tmp_path / "both")
    torch.testing.assert_close(logits(models.policy.lm), adapted)
    assert models.policy.adapter is not None


def test_a_reference_adapter_is_no_part_of_the_policy(lora_folder, tmp_path):
    """Its log-probs come from the same model, and its weights are neither saved nor trained."""
    models = models_of(lora_folder)
    assert models.reference is models.policy
    assert any("reference" in name for name, _ in models.policy.lm.named_parameters())
    save_policy(tmp_path, models.policy, models.tokenizer)
    own = set(ActorCritic(load_language_model(ModelConfig(name=str(tmp_path)))[0]).state_dict())
    assert not any("reference" in name for name in own)
    policy, _ = build_policy(*load_language_model(ModelConfig(name=str(tmp_path))), ModelConfig(), CriticConfig())
    assert policy.adapter is not None
