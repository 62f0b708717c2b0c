"""The check of chat templates: equal tokens, the first that differs, and the command."""

import copy

import pytest

from helpers.chat_templates import MODELS, chat_tokenizer, template_of
from helpers.commands import refused
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.text.turns.chat.template_check import check_template

ANEW = {
    "Qwen3": "<think>",
    **dict.fromkeys(["Llama 3", "Llama 3.1", "Gemma 2", "FunctionGemma", "Phi-3"], "leading white space"),
}
"""Templates that render earlier turns differently: Qwen3 drops thinking, the others drop white space."""


def check(tokenizer, **kwargs):
    """Lines of the check, and the number of wrong transcripts."""
    return check_template(tokenizer, PromptsConfig(chat_template_kwargs=kwargs))


def changed(name, *replacements):
    """A tokenizer whose template has other parts."""
    tokenizer, template = copy.deepcopy(chat_tokenizer(name)), template_of(name)
    for old, new in replacements:
        assert old in template
        template = template.replace(old, new)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_template_has_the_tokens_of_one_rendering(name):
    lines, wrong = check(chat_tokenizer(name))
    assert wrong == 0
    text = "\n".join(lines)
    assert text.count("spelt in an observation: they remain text") == 1 + MODELS[name].tools
    assert ("tools: no: " in text) is not MODELS[name].tools
    different = [line for line in lines if "rendered anew" in line]
    assert bool(different) is (name in ANEW)
    assert all(ANEW[name] in line or "thinking" in line or "Unicode" in line for line in different), different
    assert lines[-1].startswith("Later, this template renders") is bool(different)


def test_thinking_that_a_template_drops_is_shown_with_its_token():
    lines, _ = check(chat_tokenizer("Qwen3"))
    shown = next(line for line in lines if line.startswith("  answers"))
    assert "rendered anew after turn 1, which differs at token" in shown
    assert "'<think>', and 'I' in one rendering, after " in shown
    assert "  thinking: same" in lines, "within a tool loop it stays"


@pytest.mark.slow
def test_settings_of_the_template_apply():
    without, _ = check(chat_tokenizer("Qwen3"), enable_thinking=False)
    assert "  tool loop: same" not in check(chat_tokenizer("Qwen3"))[0]
    assert without[0] == "user messages: a turn ends with <|im_end|>"


def test_a_frame_that_depends_on_what_came_before_is_wrong():
    """The number of a message in its header: a frame that no short conversation shows."""
    numbered = ("{{ '<|im_start|>' + m.role + '\\n' }}", "{{ '<|im_start|>' + m.role + loop.index | string + '\\n' }}")
    lines, wrong = check(changed("ChatML", numbered))
    assert wrong == 5
    [shown] = [line for line in lines if line.startswith("  answers")]
    assert shown.startswith("  answers: observation 2 differs at token ")
    assert (
        "'3', and '5' in one rendering, after 'I" in shown.replace("after ' I", "after 'I") or "'3', and '5'" in shown
    )


def test_calls_that_are_not_read_back_are_wrong():
    """Text after several calls, which breaks the JSON of the last."""
    broken = ("{{- '}\\n</tool_call>' }}", "{{- '}' + ('' if loop.first else '!') + '\\n</tool_call>' }}")
    lines, wrong = check(changed("Qwen2.5", broken))
    assert wrong == 1
    [shown] = [line for line in lines if "not read back" in line]
    assert shown.startswith("  several calls per turn: the calls of turn 1 are not read back: the call is not")


def test_a_template_that_takes_nothing_is_refused():
    tokenizer = copy.deepcopy(chat_tokenizer("ChatML"))
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    with pytest.raises(ConfigError, match="cannot take the environment's answer as a user message"):
        check(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        check(tokenizer)


def save(tokenizer, folder):
    """A model's folder without weights."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return str(folder)


@pytest.mark.slow
def test_the_command_reads_a_folder_without_weights(tmp_path, capsys):
    folder = save(chat_tokenizer("Llama 3.1"), tmp_path)
    ends = chat_tokenizer("Llama 3.1").convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    assert main(["check-template", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tools: a turn ends with <|eot_id|>; tool calls are in the format of Llama 3.1" in lines
    assert "  tool loop: same" in lines
    assert main(["check-template", folder, "--chat_template_kwargs", '{"bos_token": "\\u001b[2J"}']) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_fails_for_a_difference_that_matters(tmp_path, capsys):
    numbered = ("{{ '<|im_start|>' + m.role + '\\n' }}", "{{ '<|im_start|>' + m.role + loop.index | string + '\\n' }}")
    assert main(["check-template", save(changed("ChatML", numbered), tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "observation 2 differs at token" in out
    assert err == "tokencredit: 5 of the transcripts above differ in an observation, or their calls are not read back\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "check-template needs MODEL"),
        (["."], "'.' is neither a run's folder nor a model's"),
        (["x", "--chat_template_kwargs", "[1]"], "--chat_template_kwargs is '[1]'; it must be a JSON object"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, "check-template", *arguments)
