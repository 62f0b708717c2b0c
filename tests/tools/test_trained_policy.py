import io
import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.commands import refused
from helpers.configs import quiet
from helpers.models import with_chat_template
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load
from tokencredit.tools.scoring_options import SamplingOptions
from tokencredit.tools.trained_policy import Policy

pytestmark = pytest.mark.slow


SMALL = {"max_new_tokens": 4, "temperature": 0.8, "top_k": 15}
FLAGS = ["--max_new_tokens", "4", "--temperature", "0.8", "--top_k", "15"]
ASKED = [{"role": "user", "content": "Did you like it?"}]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The built-in model with a chat template."""
    return load(with_chat_template(tmp_path_factory.mktemp("chat")))


def printed(capsys, *options):
    """Lines of `tokencredit generate`."""
    capsys.readouterr()
    assert main(["generate", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_and_python_sample_the_same_from_a_run_and_from_a_model(tmp_path, capsys):
    """By the run's folder, with its start, and by the name of the model that it started from."""
    completions = load("builtin:reviews").generate("The film was", 2, **SMALL)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    own = [f"The film was{text}" for text in completions]
    assert printed(capsys, str(tmp_path), "--prompt", "The film was", "-n", "2", "--base", *FLAGS) == own
    assert printed(capsys, "builtin:reviews", "--prompt", "The film was", "--n", "2", *FLAGS) == own
    assert load(tmp_path, "base").generate("The film was", 2, **SMALL) == completions
    assert load("builtin:reviews").generate("The film was", 2, **SMALL | {"top_k": 1}) != completions


def test_a_temperature_of_0_takes_the_most_likely_tokens(capsys):
    greedy = load("builtin:reviews").generate("The film was", 2, temperature=0, max_new_tokens=6)
    assert greedy[0] == greedy[1]
    assert greedy == load("builtin:reviews").generate("The film was", 2, top_k=1, max_new_tokens=6)
    flags = ["--prompt", "The film was", "-n", "1", "--temperature", "0", "--max_new_tokens", "6"]
    assert printed(capsys, "builtin:reviews", *flags) == [f"The film was{greedy[0]}"]


def test_ids_are_those_of_the_completions(capsys):
    policy = load("builtin:reviews")
    assert repr(policy) == "<Policy builtin:reviews: GPT2LMHeadModel, 1.7 million parameters, no critic>"
    ids = policy.generate(["The film was", "I had"], ids=True, **SMALL)
    texts = policy.generate(["The film was", "I had"], **SMALL)
    assert policy.tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    shown = printed(capsys, "builtin:reviews", "--prompts.text", '["The film was", "I had"]', "--ids", *FLAGS)
    assert [json.loads(line) for line in shown] == ids
    shown = printed(capsys, "builtin:reviews", "--prompt", "I had", "--ids", "--min_new_tokens", "30")
    assert 30 <= len(json.loads(shown[0])) <= 64, "at most half of the context"


def test_each_prompt_of_a_data_set_is_completed_in_its_order(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{number} films"}}\n' for number in range(6)))
    shown = printed(capsys, "builtin:reviews", "--prompts.dataset", str(tmp_path / "rows.jsonl"), *FLAGS)
    assert [line[:7] for line in shown if line[1:7] == " films"] == [f"{number} films" for number in range(6)]


def test_prompts_come_from_standard_input_line_by_line(capsys, monkeypatch, chat_model):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The film was\n\nI had\n"))
    assert [line[:5] for line in printed(capsys, "builtin:reviews", "--prompt", "-", *FLAGS)] == ["The f", "I had"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert refused(capsys, "generate", "x", "--prompt", "-").endswith("has no line; give one prompt per line")


def test_messages_go_through_the_chat_template(chat_model, capsys):
    [text] = chat_model.generate(ASKED, **SMALL)
    assert text.startswith(chat_model.generate([ASKED], 1, **SMALL)[0])
    assert chat_model.prompts(ASKED, 1, 4).texts == ["user: Did you like it?\nassistant:"]
    with pytest.raises(ConfigError, match=r"the prompts of prompt are conversations, but the tokenizer has no chat"):
        load("builtin:reviews").generate(ASKED)


def test_a_run_that_has_not_ended_has_no_policy(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"has no policy/; a run writes policy/ at its end"):
        load(tmp_path)


@pytest.fixture(scope="module", params=[None, True], ids=["plain", "with a beginning-of-sequence token"])
def run(request, tmp_path_factory):
    """A small run, and its last sample."""
    folder = tmp_path_factory.mktemp("policies") / "run"
    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        prompts=PromptsConfig(add_bos=request.param),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=quiet(folder),
    )
    PPOTrainer(args=args).train()
    return folder, json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])


def test_logprobs_and_values_are_those_of_the_runs_own_states(run):
    folder, sample = run
    policy = load(folder)
    text = sample["completion"]
    assert policy.tokens(text, sample["prompt"]) == sample["tokens"]
    assert policy.logprobs(text, sample["prompt"]) == pytest.approx(sample["new_logprobs"], abs=2e-5)
    assert len(policy.values(text, sample["prompt"])) == len(sample["tokens"])


@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "wordpiece", "bytes"])
@pytest.mark.parametrize(("prompt", "text"), [("The sky is", " blue."), ("I was sing", "ing"), ("", "The sky")])
def test_a_text_is_tokenized_as_it_stands_after_its_prompt(kind, prompt, text, tokenizers, tmp_path):
    """With the space that it begins with, and without one where it has none."""
    tokenizer = tokenizers[kind]
    if (kind, text) == ("wordpiece", "ing"):
        pytest.skip("WordPiece cannot begin within a word")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = Policy(read_source(str(tmp_path)), options=SamplingOptions(dtype="float32"))
    tokens = policy.tokens(text, prompt)
    whole = tokenizer(prompt + text)["input_ids"]
    rated = len(whole) - (len(tokenizer(prompt)["input_ids"]) if prompt else 1)
    assert len(policy.logprobs(text, prompt)) == len(tokens) == rated
    assert text.endswith("".join(tokens)) if not prompt else "".join(tokens) == text


def test_loading_draws_nothing_from_the_global_generators(run):
    before = torch.get_rng_state()
    load(run[0]).generate("The film", n=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"n": 2.5}, "n is 2.5; it must be a whole number"),
        ({"seed": "x"}, "seed is 'x'; it must be a whole number"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"topk": 3}, r"unknown key topk; did you mean top_k\?"),
    ],
)
def test_numbers_out_of_their_range_are_refused(options, message, run):
    with pytest.raises(ConfigError, match=message):
        load(run[0]).generate("The film", **options)


def test_a_text_longer_than_the_context_is_refused(run):
    with pytest.raises(ConfigError, match=r"have \d+ tokens; the model's context has \d+"):
        load(run[0]).logprobs("really " * 500, "The film was")
    with pytest.raises(ConfigError, match="'' has no token to score"):
        load(run[0]).values("", "The film was")
    with pytest.raises(
        ConfigError, match=r"tokens; at most \d+ fit, by the model's context less max_new_tokens; shorten it$"
    ):
        load(run[0]).generate("really " * 500)
    with pytest.raises(ConfigError, match="text is null; it needs a value"):
        load(run[0]).logprobs(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "name is 5; it must be a text"),
        (("builtin:reviews", "critic"), "which is 'critic'; it must be one of policy, best, base"),
        (("builtin:reviews", "best"), "which is 'best', and only a run has that; 'builtin:reviews' is a model"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(*arguments)


def test_several_texts_and_several_conversations_are_prompts(chat_model):
    assert chat_model.prompts(["A film", "A book"], 2, 4).texts == ["A film", "A film", "A book", "A book"]
    assert len(chat_model.generate(["A film", "A book"], 2, max_new_tokens=2)) == 4
    assert len(chat_model.generate([ASKED, ASKED], 3, max_new_tokens=2)) == 6
    for wrong in ([], [3], 3):
        with pytest.raises(ConfigError, match="it must be a text, a list of messages, or a list of either"):
            chat_model.generate(wrong)
    with pytest.raises(ConfigError, match=r"row 2 of prompt is 'a'; it must be a conversation"):
        chat_model.generate([ASKED, "a"])
