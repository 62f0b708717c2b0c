import json
import shutil
from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.activations import NewGELUActivation

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.text.data.hub import upload
from tokencredit.text.models.architecture import HASHED, fuse_gelu, weight_hash
from tokencredit.text.models.model_checks import check_policy
from tokencredit.text.models.model_loading import (
    check_language_model,
    end_ids,
    folder_digest,
    load_language_model,
    max_prompt_length,
    resolve,
)
from tokencredit.text.models.run_models import build_policy, save_policy


@pytest.fixture
def loaded(model_folders):
    return load_language_model(ModelConfig(name=str(model_folders["llama"])))


def test_a_saved_policy_is_an_ordinary_folder_with_its_critic_beside_it(loaded, tmp_path):
    lm, tokenizer = loaded
    model, _ = build_policy(lm, tokenizer, ModelConfig(), CriticConfig(head="linear"))
    torch.nn.init.normal_(model.critic.head[-1].weight)
    folder = tmp_path / "policy"
    save_policy(folder, model, tokenizer, tmp_path / "critic")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("This movie")["input_ids"] == tokenizer("This movie")["input_ids"]
    for name, parameter in lm.state_dict().items():
        assert torch.equal(plain.state_dict()[name], parameter), name
    args = ModelConfig(name=str(folder))
    again, notes = build_policy(*load_language_model(args), args, CriticConfig(head="linear"))
    assert torch.equal(again.critic.head[-1].weight, model.critic.head[-1].weight)
    assert notes == [f"the critic continues from the one saved in {tmp_path / 'critic'}"]


def test_every_token_that_ends_a_text_is_known(loaded):
    lm, tokenizer = loaded
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id, 5]
    assert end_ids(lm, tokenizer) == sorted({tokenizer.eos_token_id, 5})
    lm.generation_config.eos_token_id = ["x", 5]
    with pytest.raises(ConfigError, match=r"^eos_token_id is \['x', 5\] in generation_config\.json of .*a token id"):
        end_ids(lm, tokenizer)


def test_room_for_prompts(loaded):
    assert max_prompt_length(loaded[0], 24) == 40
    assert max_prompt_length(loaded[0], 24, 30) == 6
    assert max_prompt_length(loaded[0], 63) == 1
    context, budget = "the model's context has 64 tokens", r"ppo\.micro_batch_tokens is 30"
    for length, limits in ((30, budget), (64, f"{context} and {budget}")):
        with pytest.raises(ConfigError, match=rf"^max_new_tokens leaves .*: it is {length}, and {limits}; lower it"):
            max_prompt_length(loaded[0], length, 30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtin:news", "not a built-in world; choose one of builtin:reviews, builtin:grid, builtin:calculator"),
        ("./nowhere", "'./nowhere' is not a model folder: there is no such folder"),
    ],
)
def test_a_name_of_no_model_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name)
    with pytest.raises(ConfigError, match="'builtin:grid' is not a built-in classifier; choose one of builtin:rev"):
        resolve("builtin:grid", "sentiment")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"'nobody/nothing' is not a local folder, the hub cannot be reached.*give a folder"
    ):
        resolve("nobody/nothing", "policy")


def test_weights_that_are_pickled_are_not_loaded(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, which can run code and is not read"):
        load_language_model(ModelConfig(name=str(tmp_path / "model")))


def test_a_folder_with_damaged_weights(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"cannot load a language model from .*model"):
        load_language_model(ModelConfig(name=str(tmp_path / "model")))


@pytest.mark.slow
def test_a_model_of_another_kind():
    with pytest.raises(ConfigError, match="cannot load a language model"):
        load_language_model(ModelConfig(name=resolve("builtin:reviews", "sentiment")))


def test_a_model_that_cannot_end_a_text(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = tmp_path / "model" / file
        settings = {k: v for k, v in json.loads(path.read_text()).items() if "eos" not in k}
        if "tokenizer_class" in settings:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # GPT2Tokenizer has one by default
        path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*set eos_token in its tokenizer_config\.json"):
        load_language_model(ModelConfig(name=str(tmp_path / "model")))


def test_a_tokenizer_of_another_model(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ tokens, but the embedding of .* only \d+; use"):
        load_language_model(ModelConfig(name=str(tmp_path / "model")))


def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_warned_of(model_folders, caplog):
    lm, tokenizer = load_language_model(args := ModelConfig(name=str(model_folders["gpt2"])))
    assert not caplog.records
    lm.resize_token_embeddings(len(tokenizer) * 9 // 8)
    check_language_model(args, lm, tokenizer)
    assert f"the tokenizer has {len(tokenizer)} tokens, and" in caplog.text


def test_a_generation_config_that_transformers_does_not_save(tmp_path, model_folders):
    """Llama 2's had a top_p and no do_sample; saving the trained policy would fail."""
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_p": 0.6}))
    lm, _ = load_language_model(ModelConfig(name=str(tmp_path / "model")))
    check_policy("named", lm)
    lm.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (saved["top_p"], saved["do_sample"]) == (0.6, True)
    lm.generation_config.max_new_tokens = -1
    with pytest.raises(ConfigError, match=r"^the generation config of .* could not be saved: .*max_new_tokens"):
        check_policy("named", lm)


@pytest.mark.parametrize("weight", ["transformer.h.0.mlp.c_fc.bias", "lm_head.weight"])
def test_weights_that_are_not_numbers_are_said_to_be_damaged(weight, model_folders):
    lm, _ = load_language_model(ModelConfig(name=str(model_folders["gpt2"])))
    lm.get_parameter(weight).data[-1] = torch.nan
    with pytest.raises(ConfigError, match=r"computes NaN or infinity, so its weights are damaged"):
        check_policy("named", lm)


def test_a_folder_without_a_tokenizer_is_named_as_that(architecture, tmp_path, model_folders):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(model_folders[architecture] / file, tmp_path)
    with pytest.raises(ConfigError, match=rf"tokenizer.*{tmp_path}|{tmp_path}.*has no tokenizer"):
        load_language_model(ModelConfig(name=str(tmp_path)))


@pytest.mark.slow
def test_a_separate_critic_from_another_folder_is_saved_beside_the_policy(model_folders, tmp_path):
    args = ModelConfig(name=str(model_folders["llama"]))
    lm, tokenizer = load_language_model(args)
    critic = CriticConfig(kind="separate", name=str(model_folders["gpt2"]), head="linear")
    model, _ = build_policy(lm, tokenizer, args, critic)
    assert type(model.critic.trunk).__name__ == "GPT2Model"
    save_policy(tmp_path / "policy", model, tokenizer, tmp_path / "critic")
    again, _ = build_policy(lm, tokenizer, args, CriticConfig(kind="separate", name=str(tmp_path / "critic")))
    for name, weights in model.critic.trunk.state_dict().items():
        assert torch.equal(again.critic.trunk.state_dict()[name], weights), name


LORA = LoraConfig(rank=4, alpha=8)


@pytest.mark.slow
def test_an_adapter_names_its_base_model_from_every_folder(model_folders, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    shutil.copytree(model_folders["llama"], tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    args = ModelConfig(name="./base", lora=LORA)  # PEFT's file would name it `base`, which could be a model of the hub
    model, _ = build_policy(*load_language_model(args), args, CriticConfig())
    save_policy(tmp_path / "adapter", model, load_language_model(args)[1])
    monkeypatch.chdir("/")
    again, _ = load_language_model(ModelConfig(name=str(tmp_path / "adapter")))
    assert again.num_parameters() > 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )


@pytest.mark.slow
def test_an_adapter_alone_is_trained_and_loads_with_plain_peft(model_folders, tmp_path):
    peft = pytest.importorskip("peft")
    args = ModelConfig(name=str(model_folders["llama"]), lora=LORA)
    lm, tokenizer = load_language_model(args)
    model, _ = build_policy(lm, tokenizer, args, CriticConfig())
    trained = [name for name, p in model.lm.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in model.lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.tensor([[5, 6, 7]])
    expected = model.lm(ids).logits
    save_policy(tmp_path, model, tokenizer)
    base = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    before = base(ids).logits
    plain = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(plain(ids).logits, expected)
    assert not torch.allclose(expected, before, atol=1e-2)
    torch.testing.assert_close(plain.merge_and_unload()(ids).logits, expected, atol=1e-3, rtol=1e-3)
    again, _ = load_language_model(ModelConfig(name=str(tmp_path)))
    torch.testing.assert_close(again(ids).logits, expected)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["no_such_layer"], r"model\.lora\.target_modules: Target modules .*no_such_layer.* not found"),
        (["lm_head"], r"model\.lora adapts the output projection"),
    ],
)
def test_an_adapter_that_fits_no_layer(model_folders, targets, message):
    pytest.importorskip("peft")
    args = ModelConfig(name=str(model_folders["llama"]), lora=LoraConfig(rank=4, target_modules=targets))
    with pytest.raises(ConfigError, match=message):
        build_policy(*load_language_model(args), args, CriticConfig())


def test_a_weights_hash_is_of_its_numbers_and_their_places():
    one = torch.randn(6, HASHED // 4).bfloat16().float()
    parts = one.flatten().split(HASHED)
    others = {
        "negated": -one,
        "two negated": torch.cat([-one[:, :2], one[:, 2:]], dim=1),
        "rows swapped": one[[1, 0, *range(2, 6)]],
        "columns swapped": torch.cat([one[:, 1:2], one[:, :1], one[:, 2:]], dim=1),
        "parts swapped": torch.cat(parts[::-1]),
        "a part alone": parts[0],
        "one ulp": torch.cat([one.view(torch.int32)[:-1].view(torch.float32), one[-1:].nextafter(one[-1:] + 1)]),
        **{f"{number} × {count}": torch.full((count,), float(number)) for number in (0, 1) for count in (0, 4, 5)},
    }
    hashes = {name: weight_hash(x) for name, x in others.items()} | {"itself": weight_hash(one)}
    assert hashes.pop("0 × 0") == hashes["1 × 0"]
    assert len(set(hashes.values())) == len(hashes)
    for dtype in (torch.bfloat16, torch.float64):
        assert weight_hash(one.to(dtype)) == hashes["itself"]
    assert weight_hash(one.T.contiguous().T) == hashes["itself"], "strides do not count"


@pytest.mark.parametrize("size", [2, 4, 9, 15])
def test_a_folders_digest_is_of_every_byte(size, tmp_path):
    file = tmp_path / "model.safetensors"
    digests = []
    for place in range(size):
        file.write_bytes(bytes(i == place for i in range(size)))
        digests.append(folder_digest(str(tmp_path)))
    assert len(set(digests)) == size


def test_fused_gelu_gives_what_the_model_gives():
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2)).eval()
    fused = deepcopy(plain)
    fuse_gelu(fused)
    assert not any(isinstance(module, NewGELUActivation) for module in fused.modules())
    ids = torch.arange(20).view(2, 10)
    for model in (plain, fused):
        model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(fused(ids).logits, plain(ids).logits, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_a_classifier_is_not_a_policy(model_folders, tmp_path):
    config = AutoConfig.from_pretrained(model_folders["llama"], num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folders["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a causal language model: its weights lack lm_head\.weight$"):
        load_language_model(ModelConfig(name=str(tmp_path)))


def test_an_upload_that_fails_says_where_the_policy_is(tmp_path, monkeypatch):
    """Without a network; the exception is the HTTP library's."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError(-2, "Name not known")))
    with pytest.raises(RunStopped, match=r"^could not upload .* to the hub as 'me/policy': .*; try hf upload me/p"):
        upload(tmp_path, "me/policy")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"vocab_size": 300},
            r"lm_head\.weight has the shape \[2048, 32\], and config\.json asks for \[300, 32\]",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantised \(gptq\), and an adapter can only be trained on those of bitsandbytes",
        ),
        ({"hidden_act": "nope"}, r"cannot load a language model from .*: KeyError: 'nope'$"),
    ],
)
def test_a_folder_that_transformers_cannot_load_is_answered_in_one_line(changes, told, model_folders, tmp_path, capfd):
    folder = tmp_path / "model"
    shutil.copytree(model_folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=told) as caught:
        load_language_model(ModelConfig(name=str(folder)))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_code_of_a_model_may_fail_in_any_way(model_folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise LookupError('no such part')\n")
    with pytest.raises(ConfigError, match=r"^cannot load a language model from .*: LookupError: no such part$"):
        load_language_model(ModelConfig(name=str(folder), trust_remote_code=True))


def test_no_progress_bar_of_a_library_is_written_into_a_log(model_folders, tmp_path, capfd):
    lm, tokenizer = load_language_model(ModelConfig(name=str(model_folders["llama"])))
    policy, _ = build_policy(lm, tokenizer, ModelConfig(), CriticConfig())
    save_policy(tmp_path, policy, tokenizer)
    assert capfd.readouterr().err == ""
