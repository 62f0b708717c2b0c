"""Prompts: rows to token ids, in an order that a run can be asked for again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.text.data.datasets import column_names, column_values, from_python, read_dataset
from tokencredit.text.rewards.texts import answer, prefilled

if TYPE_CHECKING:
    from tokencredit.text.data.datasets import Rows

Prompt = str | list[dict[str, Any]]
"""A text, or a conversation: messages with a role and a content."""


@dataclass(frozen=True)
class PromptBatch:
    """Some prompts, as people, reward functions and the model see them; one entry, or row, a completion."""

    prompts: list[Prompt]
    """As they stand in the data, whole even where the model reads only their end."""
    texts: list[str]
    """What the model reads: a conversation through its chat template, and only the end of what was too long."""
    ids: Tensor
    """`[batch, prompt]`, padded on the left."""
    mask: Tensor
    """`[batch, prompt]`, true at the prompts' own tokens."""
    columns: dict[str, list[Any]]
    """The data set's other columns."""

    def to(self, device: torch.device) -> PromptBatch:
        """The same with its tensors on a device."""
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))

    def select(self, rows: Sequence[int]) -> PromptBatch:
        """These rows, in this order; one may stand several times."""
        at = torch.tensor(rows, device=self.ids.device)
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        prompts, texts = [self.prompts[i] for i in rows], [self.texts[i] for i in rows]
        return PromptBatch(prompts, texts, self.ids[at], self.mask[at], columns)

    def continued(self, completions: Sequence[str]) -> list[str]:
        """Each prompt, as the model reads it, with its completion."""
        return [text + completion for text, completion in zip(self.texts, completions, strict=True)]

    def questions(self) -> list[Prompt]:
        """Prompts as reward terms see them: a conversation ends before the answer that its completion goes on with."""
        return [prompt[:-1] if prefilled(prompt) else prompt for prompt in self.prompts]

    def answers(self, completions: Sequence[str]) -> list[Prompt]:
        """Completions in the format of their prompts: texts, or a message of the assistant's, its prefill included."""
        return [
            completion if isinstance(prompt, str) else [answer(prompt, text, completion)]
            for prompt, text, completion in zip(self.prompts, self.texts, completions, strict=True)
        ]


class Prompts:
    """An endless sequence of prompts; which stands where depends on nothing but the data and the seed."""

    def __init__(
        self,
        rows: Rows | Sequence[str] | str,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptsConfig | None = None,
        *,
        name: str | None = None,
        group: str = "prompts",
        room: int | None = None,
        seed: int | None = None,
    ):
        """Look through all rows once; what tokenizing a batch could still bring to light is found now.

        Args:
            rows: a list of dicts, a `datasets.Dataset`, or texts, or one.
            tokenizer: the policy's.
            config: the column, the longest prompt, and how prompts become tokens; its sources of rows are not read.
            name: of the data, in messages; None for the texts of the configuration.
            group: the configuration's group that asks for them, in messages.
            room: limit in tokens beside `config.max_length`; None for no other limit.
            seed: of the order, which is new in each pass through the data; None keeps the data's own.

        Raises:
            ConfigError: no rows or no such column; a prompt that is no text and no conversation, has no token, or is
                too long; both kinds in one column; no chat template, or no beginning-of-sequence token to add.
        """
        config = config or PromptsConfig()
        if config.add_bos and tokenizer.bos_token_id is None:
            raise ConfigError(f"{group}.add_bos is true, but the tokenizer has no beginning-of-sequence token")
        if room is not None and room < 1:
            raise ConfigError(
                "max_new_tokens leaves no room for a prompt in the model's context or in ppo.micro_batch_tokens"
            )
        self.column, self.add_bos, self.overlong = config.column, config.add_bos, config.overlong
        self.chat_template_kwargs = config.chat_template_kwargs
        self.max_length = min((limit for limit in (config.max_length, room) if limit is not None), default=None)
        self.rows = as_rows(rows, self.column)
        self.tokenizer, self.group, self.seed = tokenizer, group, seed
        self.texts = f"{group}.text"
        self.name = name or self.texts
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.other_columns, self.conversational = self._columns()
        self.kept = self._survey()
        """The rows that take part; the others were too long."""

    def batch(self, first: int, size: int, repeat: int = 1) -> PromptBatch:
        """Rows `first` to `first + size − 1` of the endless sequence in which each prompt stands `repeat` times."""
        chosen = [self._row_at((first + i) // repeat) for i in range(size)]
        rows = {index: self.rows[index] for index in dict.fromkeys(chosen)}
        read = {index: self._read(index, row) for index, row in rows.items()}
        width = max(len(ids) for _, _, ids in read.values())
        prompts, texts, ids = zip(*(read[index] for index in chosen), strict=True)
        return PromptBatch(
            prompts=list(prompts),
            texts=list(texts),
            ids=torch.tensor([[self.pad_id] * (width - len(row)) + row for row in ids]),
            mask=torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in ids]),
            columns={name: [rows[index].get(name) for index in chosen] for name in self.other_columns},
        )

    def left_out(self) -> str | None:
        """A line on the prompts that were too long to take part, if there are any."""
        dropped = len(self.rows) - len(self.kept)
        if not dropped:
            return None
        total = len(self.rows)
        return (
            f"{dropped} of the {total} prompts of {self.name} have more than {self.max_length} tokens and are left out"
        )

    def _columns(self) -> tuple[list[str], bool]:
        """The columns beside the prompts', and whether the prompts are conversations."""
        if len(self.rows) == 0:
            raise ConfigError(f"{self.name} has no rows; give at least one prompt")
        columns = column_names(self.rows)
        if self.column not in columns:
            raise ConfigError(
                f"{self.group}.column is {self.column!r}; the columns of {self.name} are {', '.join(columns)}"
            )
        conversational = isinstance(self.rows[0].get(self.column), list)
        if conversational and self.tokenizer.chat_template is None:
            raise ConfigError(
                f"the prompts of {self.name} are conversations, but the tokenizer has no chat template; "
                "set chat_template in its tokenizer_config.json, or write the prompts as texts"
            )
        return [column for column in columns if column != self.column], conversational

    def _row_at(self, position: int) -> int:
        """The row at a position of the endless sequence without repetition."""
        epoch, place = divmod(position, len(self.kept))
        return int(self.kept[place if self.seed is None else permutation(len(self.kept), self.seed, epoch)[place]])

    def _read(self, index: int, row: dict[str, Any]) -> tuple[Prompt, str, list[int]]:
        """A row's prompt, the text that the model reads, and its ids."""
        prompt = self._check(index, row.get(self.column))
        text = self._render(index, prompt)
        ids = self._encode([text])[0]
        if not self._fits(index, text, ids):
            raise self._too_long(index, ids)
        if self.max_length is None or len(ids) <= self.max_length:
            return prompt, text, ids
        lead = ids[:1] if ids[0] == self.tokenizer.bos_token_id and self.max_length > 1 else []
        end = ids[len(ids) - self.max_length + len(lead) :]
        return prompt, str(self.tokenizer.decode(end)), lead + end

    def _survey(self) -> np.ndarray:
        """Check every row, and tokenize those whose text does not already show that they fit.

        A token stands for at least one byte, so a text of no more bytes than the room fits. A tokenizer that breaks
        that rule costs nothing but an early answer: `_read` counts again, exactly.
        """
        special = len(self._encode([""])[0])
        room = float("inf") if self.max_length is None or self.overlong == "truncate" else self.max_length - special
        kept, start = [], 0
        for values in column_values(self.rows, self.column):
            texts = {index: self._render(index, self._check(index, value)) for index, value in enumerate(values, start)}
            doubtful = [index for index, text in texts.items() if not text.strip() or len(text.encode()) > room]
            ids = dict(zip(doubtful, self._encode([texts[index] for index in doubtful]), strict=True))
            kept += [index for index in texts if index not in ids or self._fits(index, texts[index], ids[index])]
            start += len(values)
        if not kept:
            raise ConfigError(
                f"all {start} prompts of {self.name} have more than the {self.max_length} tokens that fit"
            )
        return np.array(kept)

    def _fits(self, index: int, text: str, ids: list[int]) -> bool:
        if not ids:
            raise ConfigError(
                f"{self._place(index)} is {text!r}, which has no token; write a text or set {self.group}.add_bos"
            )
        if self.overlong == "truncate" or self.max_length is None or len(ids) <= self.max_length:
            return True
        if self.overlong == "error":
            raise self._too_long(index, ids)
        return False

    def _too_long(self, index: int, ids: list[int]) -> ConfigError:
        return ConfigError(
            f"{self._place(index)} has {len(ids)} tokens, but {self.group}.max_length, or what max_new_tokens leaves "
            f"of the model's context or of ppo.micro_batch_tokens, has room for {self.max_length}; shorten it, or set "
            f"{self.group}.overlong to drop or truncate"
        )

    def _check(self, index: int, prompt: Any) -> Prompt:
        """The prompt, if it is of the same kind as the first one."""
        if self.conversational and is_conversation(prompt):
            # A table gives each message the keys of all messages, and a template would see them as set.
            return [{key: value for key, value in message.items() if value is not None} for message in prompt]
        if isinstance(prompt, str) and not self.conversational:
            return prompt
        shown = repr(prompt) if len(repr(prompt)) <= 60 else repr(prompt)[:59] + "…"
        wanted = "a conversation, a list of messages with a role and a content" if self.conversational else "a text"
        raise ConfigError(
            f"{self._place(index)} is {shown}; it must be {wanted}" + (", as the first row is" if index else "")
        )

    def _render(self, index: int, prompt: Prompt) -> str:
        """The text that a prompt is to the model: a conversation through the chat template, ready for an answer."""
        if isinstance(prompt, str):
            return self._encodable(index, prompt)
        unfinished = prefilled(prompt)
        try:
            rendered = self.tokenizer.apply_chat_template(
                prompt,
                tokenize=False,
                add_generation_prompt=not unfinished,
                continue_final_message=unfinished,
                **self.chat_template_kwargs,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._place(index)}: the tokenizer's chat template refuses it: {error}") from error
        return self._encodable(index, str(rendered))

    def _encodable(self, index: int, text: str) -> str:
        """The text, unless it holds what JSON can write but no tokenizer can read."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ConfigError(f"{self._place(index)} holds {half!r}, which is half a character") from error
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids; a chat template has written its special tokens already."""
        if not texts:
            return []
        special = self.add_bos is None and not self.conversational
        encoded = self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        bos = self.tokenizer.bos_token_id
        return [[bos, *ids] if self.add_bos and ids[:1] != [bos] else ids for ids in encoded["input_ids"]]

    def _place(self, index: int) -> str:
        return f"{self.name}[{index}]" if self.name == self.texts else f"row {index + 1} of {self.name}"


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    room: int | None,
    dataset: Rows | None = None,
    group: str = "prompts",
    dataset_name: str = "train_dataset",
) -> Prompts:
    """The prompts that a configuration asks for.

    Args:
        config: the settings.
        tokenizer: the policy's.
        seed: of the order.
        room: the most tokens that leave room for a completion; None for no limit.
        dataset: rows given from Python, which take the place of the configuration's texts or data set.
        group: where `config` stands in the whole configuration, in messages.
        dataset_name: the argument that `dataset` came by, in messages.

    Raises:
        ConfigError: as `Prompts` and `read_dataset` do.
    """
    if dataset is not None:
        rows, name = from_python(dataset, dataset_name), dataset_name
    elif config.dataset is not None:
        rows = read_dataset(config.dataset, split=config.split, config_name=config.config_name)
        name = repr(config.dataset)
    else:
        rows, name = config.texts(), None
    shuffle = name is not None if config.shuffle is None else config.shuffle
    return Prompts(rows, tokenizer, config, name=name, group=group, room=room, seed=seed if shuffle else None)


def as_rows(rows: Rows | Sequence[str] | str, column: str) -> Rows:
    """Rows as they are; texts as rows with one column."""
    texts = [rows] if isinstance(rows, str) else rows
    if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
        return [{column: text} for text in texts]
    return texts


def is_conversation(prompt: Any) -> bool:
    """Whether it is a list of messages, each with a role."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt)


@lru_cache(maxsize=4)  # a batch may lie in two passes
def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one pass through the data."""
    return np.random.default_rng([seed, epoch]).permutation(size)
