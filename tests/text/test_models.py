import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokencredit.runs.errors import ConfigError
from tokencredit.text.models import (
    ActorCritic,
    build_value_head,
    end_ids,
    load_language_model,
    load_value_head,
    resolve,
    room_for_prompts,
    save_policy,
)


@pytest.fixture(params=["gpt2", "llama"])
def loaded(request, model_folders):
    return load_language_model(str(model_folders[request.param]))


def padded_batch():
    """Two prompts of different lengths, two responses of different lengths."""
    prompt_ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    prompt_mask = torch.tensor([[False, False, True, True], [True] * 4])
    response_ids = torch.tensor([[11, 12, 13], [14, 15, 0]])
    mask = torch.tensor([[True] * 3, [True, True, False]])
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "response_ids": response_ids, "mask": mask}


def test_log_probabilities_are_those_of_the_plain_model_without_padding(loaded):
    lm, _ = loaded
    batch = padded_batch()
    logprobs, values, entropy, _ = ActorCritic(lm)(**batch, temperature=0.7, entropy=True)
    for row in range(2):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row]]
        response = batch["response_ids"][row][batch["mask"][row]]
        logits = lm(torch.cat([prompt, response]).unsqueeze(0)).logits[0] / 0.7
        expected = torch.distributions.Categorical(logits=logits[len(prompt) - 1 : -1])
        torch.testing.assert_close(logprobs[row, : len(response)], expected.log_prob(response), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entropy[row, : len(response)], expected.entropy(), atol=1e-4, rtol=1e-4)
    assert logprobs[1, 2] == 0
    assert (values == 0).all(), "an untrained critic says 0"


def test_what_stands_in_the_padding_changes_nothing(loaded):
    model = ActorCritic(loaded[0], "mlp")
    torch.nn.init.normal_(model.value_head[-1].weight)
    batch = padded_batch()
    before = model(**batch, temperature=1.0)
    batch["prompt_ids"][0, :2] = 99
    batch["response_ids"][1, 2] = 98
    after = model(**batch, temperature=1.0)
    torch.testing.assert_close(before[0], after[0])
    torch.testing.assert_close(before[1][batch["mask"]], after[1][batch["mask"]])


def test_gradients_reach_the_trunk_from_both_heads(loaded):
    model = ActorCritic(loaded[0])
    torch.nn.init.normal_(model.value_head.weight)
    logprobs, values, *_ = model(**padded_batch(), temperature=1.0)
    trunk = model.lm.get_input_embeddings().weight
    for output in (logprobs, values):
        assert torch.autograd.grad(output.sum(), trunk, retain_graph=True)[0].abs().sum() > 0


def test_a_value_head_of_two_layers_is_four_times_as_wide():
    head = build_value_head("mlp", 8)
    assert [tuple(p.shape) for p in head.parameters()] == [(32, 8), (32,), (1, 32), (1,)]
    assert (head(torch.randn(3, 8)) == 0).all()


def test_a_saved_policy_is_an_ordinary_folder_with_its_value_head(loaded, tmp_path):
    lm, tokenizer = loaded
    model = ActorCritic(lm)
    torch.nn.init.normal_(model.value_head.weight)
    save_policy(tmp_path, model, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("This movie")["input_ids"] == tokenizer("This movie")["input_ids"]
    for name, parameter in lm.state_dict().items():
        assert torch.equal(plain.state_dict()[name], parameter), name
    again = ActorCritic(load_language_model(str(tmp_path))[0])
    load_value_head(tmp_path, again)
    assert torch.equal(again.value_head.weight, model.value_head.weight)


def test_every_token_that_ends_a_text_is_known(loaded):
    lm, tokenizer = loaded
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id, 5]
    assert end_ids(lm, tokenizer) == sorted({tokenizer.eos_token_id, 5})


def test_room_for_prompts(loaded):
    assert room_for_prompts(loaded[0], 24) == 40


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtin:news", "not a built-in world; there is one, builtin:reviews"),
        ("./nowhere", "'./nowhere' is not a model folder: it has no config.json"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name, "policy")


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config\.json"):
        load_language_model(str(tmp_path))


def test_a_folder_with_damaged_weights(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match=r"cannot load a language model from .*model"):
        load_language_model(str(tmp_path / "model"))


def test_a_model_of_another_kind():
    with pytest.raises(ConfigError, match="cannot load a language model"):
        load_language_model(resolve("builtin:reviews", "sentiment"))


def test_a_model_that_cannot_end_a_text(tmp_path, model_folders):
    shutil.copytree(model_folders["gpt2"], tmp_path / "model")
    for file in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path = tmp_path / "model" / file
        settings = {k: v for k, v in json.loads(path.read_text()).items() if "eos" not in k}
        if "tokenizer_class" in settings:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # GPT2Tokenizer has one by default
        path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*set eos_token in its tokenizer_config\.json"):
        load_language_model(str(tmp_path / "model"))


def test_a_model_that_shapes_its_logits_in_an_unknown_way(tmp_path, tokenizer):
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logit_scale=5.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        bos_token_id=0,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="shapes its logits in a way that is not supported: CohereForCausalLM"):
        load_language_model(str(tmp_path))
