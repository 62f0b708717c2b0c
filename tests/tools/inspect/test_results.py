from copy import deepcopy

import pytest
import torch

from helpers.models import random_lm
from tokencredit.errors import ConfigError
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.tools.inspect.parts import read_parts
from tokencredit.tools.inspect.question import Text
from tokencredit.tools.inspect.readings import ModelPair, changes, compare, effective_rank, unchanged


@pytest.fixture
def pair(models, tokenizer, ids):
    return ModelPair("it", *models, tokenizer, Text(ids, 4))


def test_all_readings_of_one_pair(pair, ids):
    torch.manual_seed(1)
    critic = Critic(build_value_head("linear", 32, "default"))
    result = compare(pair, others=[Text(ids + 7, 5), Text(ids + 9, 4)], critic=critic)
    assert list(result) == [
        "tokens",
        "prompt_length",
        "question",
        "answer",
        "lens",
        "attribution",
        "patching",
        "attention",
        "critic",
        "weights",
    ]
    question, attribution, patching = (result[name] for name in ("question", "attribution", "patching"))
    assert "".join(result["tokens"]) == pair.tokenizer.decode(ids)
    assert result["lens"]["layers"] == ["embedding", "1", "2"]
    assert result["lens"]["positions"] == list(range(3, 11))
    assert question["position"] in result["lens"]["positions"]
    assert question["change"] == pytest.approx(question["tuned"] - question["base"], abs=1e-4)
    assert attribution["total"] == pytest.approx(
        {"base": question["base"], "tuned": question["tuned"], "difference": question["change"]}
    )
    assert max(map(abs, attribution["error"].values())) < 1e-4
    assert len(patching["components"]) == 1 + 2 * (4 + 1 + 1) + 1
    ranked = sorted(patching["components"], key=lambda x: x["share"], reverse=True)
    top = [x["name"] for x in result["answer"]["top"]]
    assert top[0] == ranked[0]["name"]
    assert top == [x["name"] for x in ranked if x["name"] in top]
    assert len(top) == 5
    assert all(len(x["others"]) == 2 for x in result["answer"]["top"])
    assert [(x["layer"], x["head"]) for x in result["attention"]["heads"]] == [
        (a, b) for a in (1, 2) for b in range(1, 5)
    ]
    assert len(result["critic"]["final"]) == 12
    assert result["critic"]["final"] == result["critic"]["values"][-1]


def test_the_parts_in_the_file_add_up(pair):
    result = compare(pair)
    whole = [
        x
        for x in result["attribution"]["components"]
        if x["kind"] in ("embedding", "attention", "mlp") or x["name"] == "bias"
    ]
    for side in ("base", "tuned", "difference"):
        assert sum(x[side] for x in whole) == pytest.approx(result["attribution"]["total"][side], abs=1e-4)
    assert result["critic"] is None


def test_models_that_are_the_same(gpt2, tokenizer, ids):
    parts = gpt2[0]
    result = compare(ModelPair("it", parts, parts, tokenizer, Text(ids, 4)), others=[Text(ids + 7, 4)])
    assert result["answer"]["sentence"] == "No weight changed: the two models are the same."
    assert result["question"]["change"] == 0
    assert {x["share"] for x in result["patching"]["components"]} == {None}
    assert result["weights"]["tokens_up"] == []


def test_a_critic_of_an_inner_layer(gpt2, tokenizer, ids):
    torch.manual_seed(1)
    critic = Critic(build_value_head("linear", 32, "default"), tap=1)
    read = compare(ModelPair("it", *gpt2, tokenizer, Text(ids, 4)), critic=critic)["critic"]
    assert read["final"] == read["values"][1]
    assert read["note"].startswith("the value head was trained on layer 1, of the policy's trunk")


def test_attention_that_is_not_returned(gpt2, tokenizer, ids):
    parts = gpt2[1]
    parts.layers[0].attention.register_forward_hook(lambda _module, _args, output: (output[0], None), prepend=True)
    assert compare(ModelPair("it", *gpt2, tokenizer, Text(ids, 4)))["attention"]["heads"] == []


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"hidden_size": 16}, {"num_attention_heads": 2}])
def test_other_shapes_are_refused(gpt2, tokenizer, ids, change):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    other = read_parts("other", random_lm("gpt2", tokenizer, **shape | change))
    with pytest.raises(ConfigError, match="has other shapes than 'it'"):
        ModelPair("it", other, gpt2[1], tokenizer, Text(ids, 4))


def test_a_model_is_left_as_it_was(gpt2, tokenizer, ids):
    before = [deepcopy(parts.lm.state_dict()) for parts in gpt2]
    compare(ModelPair("it", *gpt2, tokenizer, Text(ids, 4)))
    for parts, state in zip(gpt2, before, strict=True):
        assert all(torch.equal(x, state[name]) for name, x in parts.lm.state_dict().items())
        assert all(p.grad is None for p in parts.lm.parameters())


def test_a_token_without_a_text_is_shown_by_its_number(gpt2, tokenizer, ids):
    pair = ModelPair("it", *gpt2, tokenizer, Text(ids, 4))
    assert pair.words([len(tokenizer) + 5, int(ids[0])]) == [f"<{len(tokenizer) + 5}>", tokenizer.decode([int(ids[0])])]


def test_effective_rank_by_hand():
    assert effective_rank(torch.eye(3)) == pytest.approx(3)
    assert effective_rank(torch.ones(2, 5)) == pytest.approx(1, abs=1e-4)
    # Singular values 3 and 1: exp(−3/4 log 3/4 − 1/4 log 1/4) = 4 / 3^(3/4).
    assert effective_rank(torch.tensor([[3.0, 0, 0], [0, 1, 0]])) == pytest.approx(4 / 3**0.75)
    assert effective_rank(torch.zeros(2, 3)) is None


def test_changes_by_hand(load):
    lm = load("gpt2")
    other = deepcopy(lm)
    weight = other.transformer.h[1].mlp.c_fc.weight
    weight.data *= 1.5
    models = read_parts("base", lm), read_parts("tuned", other)
    rows = {row["name"]: row for row in changes(*models)}
    assert list(rows)[:3] == ["wte", "wpe", "layer 1 attn.c_attn"]
    assert len(rows) == 2 + 2 * 4
    changed = rows.pop("layer 2 mlp.c_fc")
    assert changed["relative_norm"] == pytest.approx(0.5)
    assert changed["effective_rank"] == pytest.approx(effective_rank(weight.detach()), rel=1e-4)
    assert changed["parameters"] == 32 * 128
    assert {(row["relative_norm"], row["effective_rank"]) for row in rows.values()} == {(0.0, None)}
    assert not unchanged(*models)
    assert unchanged(models[0], models[0])


def test_tied_matrices_count_once(models):
    names = [row["name"] for row in changes(*models)]
    assert len(names) == len(set(names))
    tied = models[0].lm.config.tie_word_embeddings
    assert any(name in ("lm_head", "embed_out") for name in names) is not tied


def test_a_matrix_that_was_zero(load):
    base, other = load("gpt2"), load("gpt2")
    for lm in (base, other):
        lm.transformer.wpe.weight.data.zero_()
        lm.transformer.h[0].mlp.c_fc.weight.data.zero_()
    other.transformer.wpe.weight.data[3] = 1
    rows = {row["name"]: row for row in changes(read_parts("base", base), read_parts("tuned", other))}
    assert rows["wpe"]["relative_norm"] == 1
    assert rows["wpe"]["effective_rank"] == pytest.approx(1)
    assert (rows["layer 1 mlp.c_fc"]["relative_norm"], rows["layer 1 mlp.c_fc"]["effective_rank"]) == (0, None)
