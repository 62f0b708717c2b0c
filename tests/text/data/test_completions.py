"""Completions as token ids, after their prompts."""

import pytest
from transformers import AutoTokenizer

from tokencredit.errors import ConfigError
from tokencredit.text.data.completions import ended, rendered_after, tokenize_after
from tokencredit.text.models.model_loading import resolve

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "Good?"}]
PROMPT = "<|im_start|>user\nGood?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def chat():
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def test_a_prompts_tokens_stay_as_they_are(tokenizer):
    prompt, text = "This movie was real", "ly bad."
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenize_after(tokenizer, text, prompt, ids)
    assert tokenizer.decode(ids + after) == prompt + text
    assert ids + after != tokenizer(prompt + text, add_special_tokens=False)["input_ids"], "one text has other tokens"


def test_a_long_completion_brings_no_warning_of_the_tokenizer(chat):
    assert len(tokenize_after(chat, " bad" * 200, "It was", [1])) == 200 > chat.model_max_length
    assert not chat.deprecation_warnings


def test_an_answer_is_what_the_template_adds(chat):
    for completion in ("Bad.", [{"role": "assistant", "content": "Bad."}]):
        assert rendered_after(chat, QUESTION, PROMPT, completion, {}) == "Bad.<|im_end|>\n"
    begun = [*QUESTION, {"role": "assistant", "content": "Ba"}]
    assert rendered_after(chat, begun, PROMPT + "Ba", "d.", {}) == "d.<|im_end|>\n"


def test_a_template_that_changes_the_prompt_is_refused(chat):
    chat.chat_template = "{% if messages|length > 1 %}Answered: {% endif %}" + CHATML
    with pytest.raises(ConfigError, match=r"differently when an answer follows: '<\|im_start\|>user.* 'Answered: <"):
        rendered_after(chat, QUESTION, PROMPT, "Bad.", {})
    chat.chat_template = "{{ raise_exception('no answers') }}"
    with pytest.raises(ConfigError, match="rejects it: no answers"):
        rendered_after(chat, QUESTION, PROMPT, "Bad.", {})


def test_a_completion_ends_once(chat):
    end, eos = chat.convert_tokens_to_ids("<|im_end|>"), chat.eos_token_id
    text, line = chat("Bad.", add_special_tokens=False)["input_ids"], chat("\n", add_special_tokens=False)["input_ids"]
    assert ended(chat, text, [eos, end]) == [*text, eos]
    assert ended(chat, [*text, end], [eos, end]) == [*text, end]
    assert ended(chat, [*text, end, *line], [eos, end]) == [*text, end]
    assert ended(chat, [*text, end, *text], [eos, end]) == [*text, end, *text, eos]
