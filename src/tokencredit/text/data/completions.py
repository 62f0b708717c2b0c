"""Token ids of prompts, and of given completions as if the policy had sampled them after their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.text.data.detokenizer import Detokenizer, shared_start
from tokencredit.text.rewards.texts import Messages, answer, content, messages, prefilled

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors that a chat template may raise for a conversation."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Token ids of prompts; with `special`, the tokenizer's own tokens at their start, once, and none at their end."""
    encoded = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = list(encoded["input_ids"])
    if not special:
        return ids
    # The tokenizer's own tokens stand around those of a text, which must be one that it can encode.
    sample = max(texts, key=len)
    plain, whole = (tokenizer(sample, add_special_tokens=own, verbose=False)["input_ids"] for own in (False, True))
    first = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), None)
    if first is None or not plain:
        return ids
    added, last = whole[:first], len(whole) - first - len(plain)
    prompts = [row[: len(row) - last] for row in ids]
    return [row[first:] if added and row[first : 2 * first] == added else row for row in prompts]


def tokenize_after(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str, prompt_ids: Sequence[int]) -> list[int]:
    """Token ids of a text after a prompt, without special tokens.

    SentencePiece tokenizers prepend a space. If that changes the text, it is tokenized after its prompt or after a line
    break, which does not merge with other tokens, and that prefix is removed.
    """

    def tokenized(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return ids

    detokenizer = Detokenizer(tokenizer, list(prompt_ids))
    for lead in ("", prompt, "\n"):
        first, both = tokenized(lead), tokenized(lead + text)
        ids = both[len(first) :]
        if both[: len(first)] == first and detokenizer.text(ids) == text:
            return ids
    return tokenized(text)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, conversation: Messages, kwargs: dict[str, Any], **options: Any
) -> str:
    """A conversation by the tokenizer's chat template, with its `kwargs`; `ConfigError` if it rejects it."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options, **kwargs))
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"the tokenizer's chat template rejects it: {error}") from error


def rendered_after(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, text: str, completion: str | Messages, kwargs: dict[str, Any]
) -> str:
    """The text that a chat template adds for the assistant's messages after a conversation.

    `text` is the conversation as rendered for the policy, with its generation prompt. `ConfigError` if the template
    rejects it, or renders its beginning differently with an answer: the model would learn from a prompt it never sees.
    """
    whole = render_chat(tokenizer, answered(prompt, text, completion), kwargs)
    if not whole.startswith(text):
        at = shared_start(text, whole)
        raise ConfigError(
            f"the chat template renders the prompt differently when an answer follows: {text[at : at + 20]!r} in the "
            f"prompt, {whole[at : at + 20]!r} before the answer"
        )
    return whole[len(text) :]


def answered(prompt: Messages, text: str, completion: str | Messages) -> Messages:
    """A conversation with the assistant's messages after it; a text continues a prefill, and a message includes it."""
    if not prefilled(prompt):
        return [*prompt, *messages(completion, "assistant")]
    if isinstance(completion, str):
        return [*prompt[:-1], answer(prompt, text, completion)]
    prefill = content(prompt[-1]).rstrip()
    if not content(completion[0]).startswith(prefill):
        raise ConfigError(f"its message does not begin with the prompt's prefilled one, {prefill!r:.60}")
    return [*prompt[:-1], *completion]


def unfinished(rendered: str, completion: str | Messages) -> str:
    """A rendered completion without what the chat template adds after its last message's content."""
    last = completion if isinstance(completion, str) else content(completion[-1])
    for said in (last, last.strip()):
        if said and said in rendered:
            return rendered[: rendered.rindex(said) + len(said)]
    raise ConfigError("the chat template changes the completion, so where it was cut off is not known")


def ended(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: Sequence[int]) -> list[int]:
    """A completion's ids with an end-of-sequence token, the first of `ends`, unless it has one of them already.

    Blanks after the end, such as a chat template's line break, are cut off: a policy stops before them.
    """
    last = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in ends), 0)
    if last and not str(tokenizer.decode(ids[last:])).strip():
        return ids[:last]
    return [*ids, ends[0]]
