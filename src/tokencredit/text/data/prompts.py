"""Prompts: rows to token ids, in a reproducible order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError, naming
from tokencredit.provenance.parts import column_names
from tokencredit.settings.data import CONVERSATION, PromptsConfig
from tokencredit.text.data.completions import TEMPLATE_ERRORS, prompt_ids, render_chat
from tokencredit.text.data.datasets import Rows, column_values, rows_of
from tokencredit.text.data.rollout import padded
from tokencredit.text.rewards.texts import Messages, answer, content, for_template, prefilled

Prompt = str | Messages
"""A plain text, or a conversation: messages with a role and a content."""
Ids = tuple[int, ...]
"""A prompt as token ids, whose text is their decoding."""


@dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts, as rows of the data set, as model inputs and as token ids; one row per completion."""

    prompts: list[Prompt]
    """Prompts as in the data set, never truncated."""
    texts: list[str]
    """Model inputs as text: after the chat template and after truncation."""
    ids: Tensor
    """`[batch, prompt]`, left-padded."""
    mask: Tensor
    """`[batch, prompt]`, true at prompt tokens, false at padding."""
    columns: dict[str, list[Any]]
    """The data set's other columns."""

    @classmethod
    def padded(
        cls,
        prompts: list[Prompt],
        texts: list[str],
        ids: Sequence[list[int]],
        columns: dict[str, list[Any]],
        pad_id: int = 0,
    ) -> PromptBatch:
        """A batch of token ids of different lengths."""
        mask = padded([[True] * len(row) for row in ids], torch.bool, side="left")
        return cls(prompts, texts, padded(ids, torch.long, pad_id, "left"), mask, columns)

    def to(self, device: torch.device) -> PromptBatch:
        """The batch with its tensors on a device."""
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))

    def select(self, rows: Sequence[int]) -> PromptBatch:
        """A batch of these rows, in this order; a row may occur several times."""
        at = torch.tensor(rows, device=self.ids.device)
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        prompts, texts = [self.prompts[i] for i in rows], [self.texts[i] for i in rows]
        return PromptBatch(prompts, texts, self.ids[at], self.mask[at], columns)

    def contents(self) -> list[str]:
        """A text per row, the same for rows of one prompt with the same columns."""
        return list(map(repr, zip(self.prompts, *self.columns.values(), strict=True)))

    def continued(self, completions: Sequence[str]) -> list[str]:
        """Each prompt's text followed by its completion."""
        return [text + completion for text, completion in zip(self.texts, completions, strict=True)]

    def questions(self) -> list[Prompt]:
        """Prompts as reward terms receive them: conversations without a prefilled assistant message."""
        return [prompt[:-1] if prefilled(prompt) else prompt for prompt in self.prompts]

    def answers(self, completions: Sequence[str]) -> list[Prompt]:
        """Completions in the format of their prompts: texts, or an assistant message that includes its prefill."""
        return [
            completion if isinstance(prompt, str) else [answer(prompt, text, completion)]
            for prompt, text, completion in zip(self.prompts, self.texts, completions, strict=True)
        ]


class Prompts:
    """An endless sequence of prompts, determined by the data and the seed."""

    def __init__(
        self,
        rows: Rows | Sequence[str] | str,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptsConfig | None = None,
        *,
        name: str | None = None,
        group: str = "prompts",
        keys: str = "prompts",
        limit: int | None = None,
        seed: int | None = None,
        empty: bool = False,
    ):
        """Validate all rows, so that no error is left for a later batch.

        Args:
            rows: a list of dicts, a `datasets.Dataset`, a list of texts, or one text.
            tokenizer: the policy's.
            config: the column, the length limit and the tokenization; its sources of rows are not read.
            name: name of the data in messages; None for the texts of the configuration.
            group: configuration group of texts and dataset, in messages.
            keys: group of the keys of all other settings, in messages; empty for prompts of a call, which has none.
            limit: another limit in tokens beside `config.max_length`.
            seed: seed of the order; None keeps the data's order.
            empty: allow prompts without a token.
        """
        config = config or PromptsConfig()
        check_prompt_settings(tokenizer, config, keys or "prompts")
        self.role = config.role
        self.column, self.add_bos, self.overlong = config.column, config.add_bos, config.overlong
        self.chat_template_kwargs = config.chat_template_kwargs
        self.max_length = min((most for most in (config.max_length, limit) if most is not None), default=None)
        self.tokenizer, self.seed, self.keys, self.empty = tokenizer, seed, keys, empty
        self.texts = f"{group}.text"
        self.name = name or self.texts
        texts = [rows] if isinstance(rows, str) else rows
        if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
            texts = [{self.column: text} for text in texts]
        self.rows: Rows = texts
        if config.template is not None and name is not None:  # texts have no other columns
            self.rows = self._filled(config.template)
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.other_columns, self.conversational = self._columns()
        self.kept = self._survey()
        """Indices of the rows in use; the others were too long."""

    def batch(self, first: int, size: int, repeat: int = 1) -> PromptBatch:
        """Rows `first` to `first + size − 1` of the endless sequence with each prompt repeated `repeat` times."""
        places = [shuffled((first + i) // repeat, len(self.kept), self.seed) for i in range(size)]
        chosen = [int(self.kept[place]) for place in places]
        rows = {index: self.rows[index] for index in dict.fromkeys(chosen)}
        read = {index: self._read(index, row) for index, row in rows.items()}
        prompts, texts, ids = zip(*(read[index] for index in chosen), strict=True)
        columns = {name: [rows[index].get(name) for index in chosen] for name in self.other_columns}
        return PromptBatch.padded(list(prompts), list(texts), ids, columns, self.pad_id)

    def dropped(self) -> str | None:
        """A line about prompts that were dropped as too long; None if there are none."""
        dropped = len(self.rows) - len(self.kept)
        what = f"{dropped} of the {len(self.rows)} prompts of {self.name}"
        return f"{what} have more than {self.max_length} tokens and are dropped" if dropped else None

    def lost_message(self) -> str:
        """The text of the last message of the first prompt if its chat template leaves it out, as one for blocks does.

        Empty for other prompts.
        """
        prompt = self._check(0, self.rows[0].get(self.column))
        text = "" if isinstance(prompt, str | tuple) else content(prompt[-1]).strip()
        return "" if text in self._render(0, prompt) else text

    def _filled(self, template: str) -> list[dict[str, Any]]:
        """The rows with prompts that a Jinja template makes of their columns, in the column of prompts."""
        try:
            environment = ImmutableSandboxedEnvironment(
                undefined=StrictUndefined, finalize=not_null, keep_trailing_newline=True
            )
            fill = environment.from_string(template)
        except TemplateError as error:
            raise ConfigError(f"{self.keys}.template is not a Jinja template: {error}") from error
        filled = []
        for index, row in enumerate(self.rows):
            try:
                filled.append({**row, self.column: fill.render(row)})
            except TEMPLATE_ERRORS as error:
                raise ConfigError(
                    f"{self.keys}.template fails on {self._label(index)}: {error}; its columns are {', '.join(row)}"
                ) from error
        return filled

    def _columns(self) -> tuple[list[str], bool]:
        """The other columns; True if the prompts are conversations."""
        if len(self.rows) == 0:
            raise ConfigError(f"{self.name} has no rows; give at least one prompt")
        columns = column_names(self.rows)
        if self.column not in columns:
            raise ConfigError(
                f"{self.keys}.column is {self.column!r}; the columns of {self.name} are {', '.join(columns)}"
            )
        first = self.rows[0].get(self.column)
        conversational = self.role is not None or (isinstance(first, list) and as_ids(first) is None)
        if self.role and isinstance(first, list):
            raise ConfigError(f"{self.keys}.role is {self.role}, and {self.name} holds no texts; leave it out")
        if is_conversation(first) and self.tokenizer.chat_template is None:
            by = f" (of rows by {self.keys}.template)" * bool(self.keys)
            raise ConfigError(
                f"the prompts of {self.name} are conversations, but the tokenizer has no chat template; "
                f"set chat_template in its tokenizer_config.json, or give plain texts{by}"
            )
        return [column for column in columns if column != self.column], conversational

    def _read(self, index: int, row: dict[str, Any]) -> tuple[Prompt, str, list[int]]:
        """A row's prompt, its text for the model, and its token ids, truncated if necessary."""
        given = self._check(index, row.get(self.column))
        text = self._render(index, given)
        prompt, ids = (text, list(given)) if isinstance(given, tuple) else (given, self._encode([text])[0])
        if not self._fits(index, text, ids):
            raise self._too_long(index, ids)
        if self.max_length is None or len(ids) <= self.max_length:
            return prompt, text, ids
        lead = ids[:1] if ids[0] == self.tokenizer.bos_token_id and self.max_length > 1 else []
        end = ids[len(ids) - self.max_length + len(lead) :]
        return prompt, str(self.tokenizer.decode(end)), lead + end

    def _survey(self) -> np.ndarray:
        """Check every row, tokenizing only texts that may be too long; returns the indices of rows in use.

        A token is at least one byte, so a text with fewer bytes than the token limit fits. `_read` checks the exact
        length later, in case a tokenizer breaks that rule.
        """
        special = len(self._encode([""])[0])
        limit = float("inf") if self.max_length is None or self.overlong == "truncate" else self.max_length - special
        kept, start = [], 0
        for values in column_values(self.rows, self.column):
            checked = {index: self._check(index, value) for index, value in enumerate(values, start)}
            texts = {index: self._render(index, value) for index, value in checked.items()}
            ids = {index: list(value) for index, value in checked.items() if isinstance(value, tuple)}
            unclear = [index for index, text in texts.items() if not text.strip() or self._most_tokens(text) > limit]
            unclear = [index for index in unclear if index not in ids]
            ids |= zip(unclear, self._encode([texts[index] for index in unclear]), strict=True)
            kept += [index for index in texts if index not in ids or self._fits(index, texts[index], ids[index])]
            start += len(values)
        if not kept:
            raise ConfigError(
                f"all {start} prompts of {self.name} have more than the {self.max_length} tokens that fit; shorten "
                f"them, or set {self.keys}.overlong: truncate"
            )
        return np.array(kept)

    @cached_property
    def _known_ids(self) -> set[int]:
        return set(self.tokenizer.get_vocab().values())

    def _fits(self, index: int, text: str, ids: list[int]) -> bool:
        if not ids and not self.empty:
            setting = f" or set {self.keys}.add_bos" if self.keys else ""
            raise ConfigError(f"{self._label(index)} is {text!r}, which has no token; write a text{setting}")
        if self.overlong == "truncate" or self.max_length is None or len(ids) <= self.max_length:
            return True
        if self.overlong == "error":
            raise self._too_long(index, ids)
        return False

    def _too_long(self, index: int, ids: list[int]) -> ConfigError:
        limits = "the model's context less max_new_tokens; shorten it"
        if self.keys:
            limits = (
                f"{self.keys}.max_length or by the model's context or ppo.micro_batch_tokens less max_new_tokens; "
                f"shorten it, or set {self.keys}.overlong to drop or truncate"
            )
        return ConfigError(f"{self._label(index)} has {len(ids)} tokens; at most {self.max_length} fit, by {limits}")

    def _check(self, index: int, prompt: Any) -> Prompt | Ids:
        """Check that a prompt has the format of the first one, and return it; by `role` as a conversation."""
        if self.role and isinstance(prompt, str):
            prompt = [{"role": self.role, "content": prompt}]
        if (ids := as_ids(prompt)) is not None and not self.conversational:
            if wrong := sorted(set(ids) - self._known_ids):
                raise ConfigError(
                    f"{self._label(index)} has the token id {wrong[0]}, which is none of the {len(self._known_ids)} of "
                    "the model's tokenizer; take that one to make the ids"
                )
            return ids
        if self.conversational and is_conversation(prompt):
            try:
                return [for_template(message) for message in prompt]
            except ValueError as error:
                raise ConfigError(f"{self._label(index)}: {error}") from error
        if isinstance(prompt, str) and not self.conversational:
            if not index and CONVERSATION.match(prompt):
                raise ConfigError(
                    f"{self._label(index)} is a conversation written out as a text, {prompt!r:.60}; make it a list of "
                    "messages (in JSON or Parquet, for CSV has only texts)"
                )
            return prompt
        conversation = "a conversation, a list of messages with a role and a content"
        expected = f"{conversation if self.conversational else 'a text'}, as the first row is"
        expected = expected if index else f"a text or {conversation}"
        raise ConfigError(f"{self._label(index)} is {prompt!r:.60}; it must be {expected}")

    def _render(self, index: int, prompt: Prompt | Ids) -> str:
        """A prompt as text; a conversation by its chat template, with a generation prompt unless it is prefilled."""
        if isinstance(prompt, tuple):
            return str(self.tokenizer.decode(list(prompt)))
        if isinstance(prompt, str):
            return self._encodable(index, prompt)
        begun = prefilled(prompt)
        options = {"add_generation_prompt": not begun, "continue_final_message": begun}
        with naming(self._label(index)):
            return self._encodable(index, render_chat(self.tokenizer, prompt, self.chat_template_kwargs, **options))

    def _encodable(self, index: int, text: str) -> str:
        """Check that a text has no lone surrogates, which JSON allows and tokenizers do not, and return it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            surrogate = text[error.start]
            raise ConfigError(
                f"{self._label(index)} holds {surrogate!r}, a lone surrogate (half a character); remove it"
            ) from error
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids; special tokens are added unless a chat template or `add_bos` decides about them."""
        if not texts:
            return []
        encoded = prompt_ids(self.tokenizer, texts, special=self.add_bos is None and not self.conversational)
        bos = self.tokenizer.bos_token_id
        return [[bos, *ids] if self.add_bos and ids[:1] != [bos] else ids for ids in encoded]

    def _most_tokens(self, text: str) -> float:
        """Tokens that a text has at most: one per byte of what the tokenizer makes of it, and one for a first blank."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return math.inf
        normalized = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        return len(normalized.encode()) + 1

    def _label(self, index: int) -> str:
        """The name of a row in messages."""
        return f"{self.name}[{index}]" if self.name == self.texts else f"row {index + 1} of {self.name}"


def as_ids(prompt: Any) -> Ids | None:
    """Token ids: those of a list of integers, an array or a tensor; None for other prompts."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    return tuple(listed) if isinstance(listed, list) and listed and all(type(x) is int for x in listed) else None


def check_prompt_settings(tokenizer: PreTrainedTokenizerBase, config: PromptsConfig, keys: str = "prompts") -> None:
    """Raise `ConfigError` for a setting that needs a token or a chat template which the tokenizer lacks."""
    if config.add_bos and tokenizer.bos_token_id is None:
        raise ConfigError(f"{keys}.add_bos is true, but the tokenizer has no beginning-of-sequence token")
    for name, value in (("role", config.role), ("chat_template_kwargs", config.chat_template_kwargs)):
        if value and tokenizer.chat_template is None:
            raise ConfigError(f"{keys}.{name} is {value}, but the tokenizer has no chat template; leave it out")


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    limit: int | None,
    dataset: Rows | None = None,
    group: str = "prompts",
    dataset_name: str = "train_dataset",
) -> Prompts:
    """Load the configured prompts, or those of `dataset`, passed from Python as the argument `dataset_name`.

    `limit` is the longest prompt, in tokens, that leaves room for a completion; others are as in `Prompts`.
    """
    rows, name = rows_of(config, dataset, dataset_name, group) or (config.texts(), None)
    shuffle = name is not None if config.shuffle is None else config.shuffle
    return Prompts(rows, tokenizer, config, name=name, group=group, limit=limit, seed=seed if shuffle else None)


def not_null(value: Any) -> Any:
    """A value that a template writes; `ValueError` for null, which Jinja would write as None."""
    if value is None:
        raise ValueError("it writes a column that is null")
    return value


def is_conversation(prompt: Any) -> bool:
    """True for a list of messages, each with a role."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt)


def shuffled(place: int, size: int, seed: int | None) -> int:
    """Index at a place of an endless sequence, in an order that each epoch draws anew; without a seed in the data's."""
    epoch, offset = divmod(place, size)
    return offset if seed is None else int(permutation(size, seed, epoch)[offset])


@lru_cache(maxsize=4)  # a batch may span two epochs
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)
