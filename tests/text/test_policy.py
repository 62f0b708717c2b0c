import pytest
from transformers import AutoTokenizer

from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.loading import resolve
from tokencredit.text.policy import Policy

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write(run, config, prompt, chat=False, samples=2, which="base"):
    """Prompts with their completions."""
    policy = Policy(run, config, which)
    prompts = policy.prompts(prompt, samples, 4, chat)
    completions = policy.complete(prompts, 4, temperature=1.0)
    return [text + completion for text, completion in zip(prompts.texts, completions, strict=True)]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The built-in model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).symlink_to(f"{resolve('builtin:reviews', 'policy')}/{file}")
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


def test_a_message_without_a_chat_template(tmp_path):
    with pytest.raises(ConfigError, match=r"the prompts of --prompt are conversations, but the tokenizer has no chat"):
        write(tmp_path, PPOConfig(), prompt="Did you like it?", chat=True)


def test_a_run_that_has_not_ended_has_no_policy(tmp_path):
    with pytest.raises(ConfigError, match=r"has no policy/; a run writes policy/ at its end"):
        write(tmp_path, PPOConfig(), "The film was", which="policy")
