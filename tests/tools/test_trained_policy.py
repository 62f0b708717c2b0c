import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.configs import quiet
from helpers.models import with_chat_template
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.load_run import load
from tokencredit.tools.trained_policy import Policy

pytestmark = pytest.mark.slow


def write(run, config, prompt, chat=False, samples=2, which="base"):
    """Prompts with their completions."""
    policy = Policy(run, config, which)
    prompts = policy.prompts(prompt, samples, 4, chat)
    completions = policy.complete(prompts, 4, temperature=1.0)
    return [text + completion for text, completion in zip(prompts.texts, completions, strict=True)]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The built-in model with a chat template."""
    folder = with_chat_template(tmp_path_factory.mktemp("chat"))
    return PPOConfig(model=ModelConfig(name=str(folder)))


def test_a_prompt_is_continued_as_it_stands(tmp_path, capsys):
    written = write(tmp_path, PPOConfig(), prompt="The film was")
    assert len(written) == 2
    assert all(text.startswith("The film was") for text in written)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    options = ["--prompt", "The film was", "-n", "2", "--base", "--max_new_tokens", "4", "--temperature", "1.0"]
    assert main(["generate", str(tmp_path), *options]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in written)


def test_a_message_goes_through_the_chat_template(tmp_path, chat_model):
    [written] = write(tmp_path, chat_model, prompt="Did you like it?", chat=True, samples=1)
    assert written.startswith("user: Did you like it?\nassistant:")


def test_a_message_without_a_chat_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the prompts of --prompt are conversations, but the tokenizer has no chat"):
        write(tmp_path, PPOConfig(), prompt="Did you like it?", chat=True)


def test_a_run_that_has_not_ended_has_no_policy(tmp_path):
    with pytest.raises(ConfigError, match=r"has no policy/; a run writes policy/ at its end"):
        write(tmp_path, PPOConfig(), "The film was", which="policy")


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
    policy = Policy(tmp_path, PPOConfig(model=ModelConfig(name=str(tmp_path), dtype="float32")), "base")
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
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
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


def test_a_conversation_and_several_texts_are_prompts(tmp_path, chat_model):
    policy = Policy(tmp_path, chat_model, "base")
    asked = [{"role": "user", "content": "Did you like it?"}]
    (written,) = policy.prompts(asked, 1, 4).texts
    assert written.startswith("user: Did you like it?\nassistant:")
    assert policy.prompts(["A film", "A book"], 2, 4).texts == ["A film", "A film", "A book", "A book"]
    assert len(policy.generate(["A film", "A book"], 2, max_new_tokens=2)) == 4
    assert len(policy.generate(asked, 3, max_new_tokens=2)) == 3
    for wrong in ([], [asked, "a"], [3], 3):
        with pytest.raises(ConfigError, match="it must be a text, a list of texts, or a list of messages"):
            policy.generate(wrong)
