"""inspect.json of real models is read back; damage to it is named by its key."""

import json
from copy import deepcopy

import pytest

from helpers.commands import imported
from helpers.models import SHAPE, random_lm
from tokencredit.errors import ConfigError
from tokencredit.report.inspect_file import read_inspect, write_inspection
from tokencredit.runs.folder import RunFolder


@pytest.fixture(scope="module")
def inspection(tokenizer):
    """The contents of inspect.json, of a random model and a changed copy."""
    import torch

    from tokencredit.text.models.critic import Critic, build_value_head
    from tokencredit.tools.inspect.parts import read_parts
    from tokencredit.tools.inspect.question import Text
    from tokencredit.tools.inspect.readings import Pair, compare

    base = random_lm("gpt2", tokenizer, **SHAPE).requires_grad_(False)
    tuned = deepcopy(base)
    tuned.transformer.h[0].mlp.c_proj.weight *= 1.5
    text, critic = Text(torch.arange(40, 50), 4), Critic(build_value_head("linear", 32))
    pair = Pair("it", read_parts("base", base), read_parts("it", tuned), tokenizer, text)
    model = {"layers": 2, "heads": 4, "width": 32, "family": "gpt2", "parameters": 1}
    texts = dict.fromkeys(("run", "base", "tuned", "prompt", "completion"), "text")
    return texts | {"seed": 1, "seconds": 1.5, "model": model} | compare(pair, others=[text], critic=critic)


@pytest.fixture
def folder(tmp_path, inspection):
    write_inspection(RunFolder(str(tmp_path)), inspection)
    return tmp_path


def test_it_is_read_back(folder, inspection):
    assert read_inspect(folder / "inspect.json") == {"version": 1, **inspection}


def test_no_file(tmp_path):
    assert read_inspect(tmp_path / "inspect.json") is None


def test_without_a_critic(folder, inspection):
    write_inspection(RunFolder(str(folder)), inspection | {"critic": None})
    assert read_inspect(folder / "inspect.json")["critic"] is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 2, "version is not 1"),
        (["run"], ..., "run is not a text"),
        (["prompt"], 1, "prompt is not a text"),
        (["seconds"], "1", "seconds is not a number"),
        (["model"], {"layers": 2}, "model is not an object with the counts"),
        (["model", "parameters"], -1, "model is not an object with the counts"),
        (["tokens"], ["a"], "tokens is not a list of two texts or more"),
        (["prompt_length"], 0, "prompt_length is not a count from 1 to 9"),
        (["prompt_length"], 10, "prompt_length is not a count from 1 to 9"),
        (["prompt_length"], 5, "lens is not an object"),
        (["question", "position"], 9, "question is not an object"),
        (["question", "base"], float("inf"), "question is not an object"),
        (["question", "up"], [1], "question is not an object"),
        (["answer", "top", 0, "share"], "much", "answer is not an object"),
        (["answer", "top", 0, "others"], None, "answer is not an object"),
        (["lens"], [], "lens is not an object"),
        (["lens", "layers"], ["embedding"], "lens is not an object"),
        (["lens", "kl", 1], [0.0], "lens is not an object"),
        (["lens", "tuned", "rank", 0, 0], 1.5, "lens is not an object"),
        (["lens", "base", "token", 0, 0], 5, "lens is not an object"),
        (["attribution", "components", 0, "tuned"], None, "attribution is not an object"),
        (["attribution", "components", 0, "layer"], "1", "attribution is not an object"),
        (["attribution", "error"], {}, "attribution is not an object"),
        (["patching", "components", 3, "patched"], None, "patching is not an object"),
        (["patching", "top_five"], ..., "patching is not an object"),
        (["attention", "from"], 9, "attention is not an object"),
        (["attention", "heads", 0, "base"], [0.5], "attention is not an object"),
        (["attention", "input_gradient", "tuned"], [], "attention is not an object"),
        (["critic", "values", 0], [1.0], "critic is not null, or an object"),
        (["critic", "layers"], None, "critic is not null, or an object"),
        (["critic", "score"], "high", "critic is not null, or an object"),
        (["critic"], ..., "critic is not null, or an object"),
        (["weights", "modules", 0, "relative_norm"], 1e200, "weights is not an object"),
        (["weights", "tokens_up", 0, "token"], None, "weights is not an object"),
    ],
)
def test_damage_is_named(folder, inspection, path, value, message):
    damaged = deepcopy(inspection) | {"version": 1}
    *parents, last = path
    place = damaged
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (folder / "inspect.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match=rf"inspect\.json: {message}.*run `tokencredit inspect` again$"):
        read_inspect(folder / "inspect.json")


def test_no_json(folder):
    (folder / "inspect.json").write_text("{")
    with pytest.raises(ConfigError, match=r"inspect\.json is not JSON"):
        read_inspect(folder / "inspect.json")


def test_reading_needs_no_torch():
    assert imported("import tokencredit.report.inspect_file", "torch", "transformers", "numpy") == []
