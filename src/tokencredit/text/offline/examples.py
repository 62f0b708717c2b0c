"""Rows of a data set as token ids, in the columns that TRL's trainers read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError, naming
from tokencredit.provenance.parts import column_names
from tokencredit.settings.offline import LengthSettings, RowsSettings
from tokencredit.text.data.completions import answered, ended, rendered_after, tokenize_after, unfinished
from tokencredit.text.data.datasets import CHUNK, Rows, rows_of
from tokencredit.text.data.detokenizer import shared_start
from tokencredit.text.data.prompts import Prompt, Prompts, is_conversation, permutation
from tokencredit.text.data.rollout import unpadded
from tokencredit.text.models.model_loading import end_ids, max_prompt_length
from tokencredit.text.rewards.reward_models import RewardModel
from tokencredit.text.rewards.texts import content, for_template, prefilled

Example = dict[str, Any]
"""Token ids of a row by TRL's names of columns, such as `prompt_ids` and `chosen_ids`."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT under other names."""
IGNORED = -100
"""Label of a token without a loss, as everywhere in Transformers."""


@dataclass(frozen=True)
class Row:
    """A row with its prompt as the policy reads it."""

    name: str
    """Name in messages."""
    prompt: Prompt
    text: str
    """The prompt after the chat template."""
    ids: list[int]
    """The prompt's token ids."""
    columns: dict[str, Any]
    """The other columns."""

    def completion(self, column: str) -> Prompt:
        """The completion in a column: a text, or the assistant's messages; `ConfigError` for anything else."""
        if column not in self.columns:
            raise ConfigError(
                f"{self.name} has no column {column!r}; beside the prompt it has {', '.join(self.columns) or 'none'}"
            )
        value: Any = self.columns[column]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}, column {column!r}, is not text in Unicode: {error}") from error
        if isinstance(value, str):
            return value
        if not isinstance(self.prompt, str) and is_conversation(value):
            try:
                return [for_template(message) for message in value]
            except ValueError as error:
                raise ConfigError(f"{self.name}, column {column!r}: {error}") from error
        expected = "a text" + ("" if isinstance(self.prompt, str) else " or a list of the assistant's messages")
        raise ConfigError(f"{self.name}, column {column!r}, is {value!r:.60}; it must be {expected}")

    def described(self) -> dict[str, Any]:
        """What counts in the description of the data set."""
        return {"prompt": self.prompt, **self.columns}

    def repeats_prompt(self, column: str) -> bool:
        """True if prompt and completion are texts, and the completion begins with the prompt."""
        value = self.columns.get(column)
        return isinstance(self.prompt, str) and isinstance(value, str) and value.startswith(self.prompt or "\0")

    def truncated(self, column: str) -> bool:
        """The value of `…_truncated`: the completion was cut off, so that it has no end."""
        value = self.columns.get(f"{column}_truncated")
        text = str(value).lower()  # the values of CSV are texts
        if text not in ("true", "false", "", "none"):
            raise ConfigError(f"{self.name}, column '{column}_truncated', is {value!r:.60}; it must be true or false")
        return text == "true"


def read_rows(
    config: RowsSettings,
    tokenizer: PreTrainedTokenizerBase,
    completion: str,
    source: Any,
    rows: Rows | None = None,
    group: str = "data",
) -> Iterator[Row]:
    """Read the rows of the data set of the settings `source`, of this group, or of `rows` from Python.

    `completion` is the column of completions. Without it, the last message of each conversation is its completion.
    """
    argument = "train_dataset" if group == "data" else "eval_dataset"
    if (found := rows_of(source, rows, argument, group)) is None:
        raise ConfigError(
            f"{group}.dataset is missing; give a .jsonl, .json, .csv or .parquet file, a folder or a hub id"
        )
    name = found[1]
    data = with_answers(with_prompts(found[0], config, completion, name), config.column, completion, name)
    whole = not isinstance(config, LengthSettings)  # a reward model reads prompt and completion as one text
    prompts = Prompts(data, tokenizer, config.prompts(), name=name, keys="data", empty=whole)
    for start in range(0, len(prompts.kept), CHUNK):
        batch = prompts.batch(start, min(CHUNK, len(prompts.kept) - start))
        read = zip(batch.prompts, batch.texts, unpadded(batch.ids, batch.mask), strict=True)
        for index, (prompt, text, ids) in enumerate(read):
            columns = {column: values[index] for column, values in batch.columns.items()}
            yield Row(f"row {start + index + 1} of {name}", prompt, text, ids, columns)


def with_prompts(rows: Rows, config: RowsSettings, completion: str, name: str) -> Rows:
    """The rows with a column of prompts, from the forms of public data sets; `ConfigError` says how others are read.

    The prompt of a pair may be the common beginning of both completions, and conversations may stand under `messages`
    or `conversations`, in ShareGPT's form too.
    """
    columns = column_names(rows) if len(rows) else []
    rejected, missing = getattr(config, "rejected", None), config.column not in columns
    if not columns or config.template is not None or (missing and config.column != type(config).column):
        return rows  # a column that is named and not there is answered as such
    if rejected is not None and {completion, rejected} <= set(columns):
        first: Any = rows[0].get(completion)
        if not (missing or (is_conversation(first) and first[0]["role"] != "assistant")):
            return rows
        apart: list[Any] = []
        for number, row in enumerate(rows, start=1):
            if (pair := without_prompt(row.get(completion), row.get(rejected))) is None:
                raise ConfigError(
                    f"row {number} of {name} has no prompt: its {completion} and {rejected} must be two texts, or two "
                    "conversations, that begin alike, or name the column of prompts, --data.column"
                )
            if (prompt := whole_prompt(row.get(config.column), pair[0])) is None:
                raise ConfigError(
                    f"row {number} of {name}: its {completion} and {rejected} begin with other messages than its "
                    f"{config.column}; make them begin with it, or leave only the assistant's messages in them"
                )
            apart.append({**row, config.column: prompt, completion: pair[1], rejected: pair[2]})
        return apart
    if missing and (column := next((x for x in ("messages", "conversations") if x in columns), None)):
        return [{**row, config.column: as_messages(row.get(column))} for row in rows]
    if missing and {"instruction", "output"} <= set(columns):
        follows = "{% if input is defined and input %} {{ input }}{% endif %}" * ("input" in columns)
        question = "{{ instruction }}" + follows + ":"
        raise ConfigError(
            f"{name} has no column {config.column!r} but instruction and output: set --data.template '{question}' "
            "--data.completion output"
        )
    if missing and "text" in columns and rejected is None:
        raise ConfigError(
            f"{name} has no column {config.column!r} but whole texts: to learn them, set --data.template '' "
            "--data.completion text --data.add_bos true"
        )
    return rows


def without_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any] | None:
    """The common beginning of two texts, cut before a word, or of two conversations, and the rests; None if none."""
    texts = isinstance(chosen, str) and isinstance(rejected, str)
    if not (texts or (is_conversation(chosen) and is_conversation(rejected))):
        return None
    at = shared_start(chosen, rejected) if texts else shared_start(chosen[:-1], rejected[:-1])
    while texts and at and not chosen[at - 1].isspace():
        at -= 1
    at -= chosen[at - 1 : at] == " "  # a completion begins with its blank
    return (chosen[:at], chosen[at:], rejected[at:]) if at > 0 else None


def whole_prompt(prompt: Any, beginning: Any) -> Any:
    """The prompt of a pair if it ends with the beginning of its conversations, the beginning if that holds the prompt.

    None if they differ. A prompt may be the text of a message; anything else than that and a conversation is not read.
    """
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    if not prompt or isinstance(beginning, str) or not (isinstance(prompt, str) or is_conversation(prompt)):
        return beginning
    own, begun = ([content(message).strip() for message in x] for x in (messages, beginning))
    if all(text in begun for text in own):
        return beginning
    return prompt if own[-len(begun) :] == begun else None


def as_messages(conversation: Any) -> Any:
    """A conversation of ShareGPT, with `from` and `value`, as messages; others unchanged."""
    messages: list[Any] = conversation if isinstance(conversation, list) else [None]
    if not all(isinstance(x, dict) and {"from", "value"} <= x.keys() for x in messages):
        return conversation
    return [{"role": ROLES.get(x["from"], x["from"]), "content": x["value"]} for x in messages]


def with_answers(rows: Rows, column: str, completion: str, name: str) -> Rows:
    """The rows; without a column of completions, the last message of each conversation becomes its completion.

    Raises:
        ConfigError: of the rows `name`, some end with such a message and some do not.
    """
    if len(rows) == 0 or completion in column_names(rows):
        return rows
    conversations: list[Any] = [row.get(column) for row in rows]
    answered = [is_conversation(x) and len(x) > 1 and x[-1]["role"] == "assistant" for x in conversations]
    if not answered[0]:
        return rows
    if not all(answered):
        raise ConfigError(
            f"row {answered.index(False) + 1} of {name}, column {column!r}, does not end with the assistant's message "
            "after others, as row 1 does; give each conversation an answer, or all of them in a column "
            f"{completion!r}"
        )
    return [{**row, column: x[:-1], completion: x[-1:]} for row, x in zip(rows, conversations, strict=True)]


class Encoder:
    """Token ids of prompts and completions, within the limits of a sequence."""

    def __init__(
        self,
        config: LengthSettings,
        lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        loss_on: str = "completion",
    ):
        """Find the longest sequence; `loss_on` names the tokens with a loss in SFT: `completion` or `all`."""
        self.config, self.tokenizer, self.loss_on = config, tokenizer, loss_on
        ends = end_ids(lm, tokenizer)
        self.ends = sorted(ends, key=lambda end: end != tokenizer.eos_token_id)  # the tokenizer's own is appended
        limits = [config.max_length, max_prompt_length(lm, 0)]
        self.limit = min((x for x in limits if x is not None), default=None)

    def with_completion(self, row: Row, column: str) -> Example | None:
        """An example of supervised fine-tuning, `input_ids` and `labels`; None if it is dropped as too long."""
        fitted = self.fitted(row, self.completion(row, column))
        if fitted is None:
            return None
        prompt, completion = fitted
        masked = prompt if self.loss_on == "all" else [IGNORED] * len(prompt)
        return {"input_ids": prompt + completion, "labels": masked + completion}

    def with_pair(self, row: Row, chosen: str, rejected: str) -> Example | None:
        """An example of DPO, `prompt_ids`, `chosen_ids` and `rejected_ids`; None if it is dropped as too long."""
        fitted = self.fitted(row, self.completion(row, chosen), self.completion(row, rejected))
        return None if fitted is None else dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), fitted, strict=True))

    def completion(self, row: Row, column: str) -> list[int]:
        """Token ids of a row's completion with its end, which a true `…_truncated` column leaves out."""
        completion, truncated = row.completion(column), row.truncated(column)
        if isinstance(row.prompt, str):
            answer = str(completion)
        else:
            with naming(row.name):
                kwargs = self.config.chat_template_kwargs
                answer = rendered_after(self.tokenizer, row.prompt, row.text, completion, kwargs)
                answer = unfinished(answer, completion) if truncated else answer
        ids = tokenize_after(self.tokenizer, answer, row.text, row.ids)
        return ids if truncated else ended(self.tokenizer, ids, self.ends)

    def fitted(self, row: Row, *completions: list[int]) -> list[list[int]] | None:
        """Token ids of the prompt and its completions, within the limit; None if the row is dropped."""
        if not all(completions):
            raise ConfigError(f"{row.name} has an empty completion")
        longest = max(map(len, completions))
        if self.limit is None or len(row.ids) + longest <= self.limit:
            return [row.ids, *completions]
        if self.config.overlong == "error":
            raise ConfigError(
                f"{row.name} has {len(row.ids) + longest} tokens; at most {self.limit} fit, by data.max_length or the "
                "model's context; shorten it, or set data.overlong to drop or truncate"
            )
        if self.config.overlong == "drop":
            return None
        bos = row.ids[:1] if row.ids[0] == self.tokenizer.bos_token_id and self.limit > 2 else []
        room = max(self.limit - longest, len(bos) + 1)
        prompt = bos + row.ids[max(len(row.ids) - room, 0) + len(bos) :]
        return [prompt, *(completion[: self.limit - len(prompt)] for completion in completions)]


def scored_pair(model: RewardModel, row: Row, chosen: str, rejected: str) -> Example:
    """An example of a reward model: `chosen_ids` and `rejected_ids`, prompt included, as it reads texts to score."""

    def encode(column: str) -> list[int]:
        completion = row.completion(column)
        if isinstance(row.prompt, str) or not prefilled(row.prompt):
            return model.encode(row.prompt, completion)
        question = row.prompt[:-1]
        with naming(row.name):
            return model.encode(question, answered(row.prompt, row.text, completion)[len(question) :])

    return {"chosen_ids": encode(chosen), "rejected_ids": encode(rejected)}


def examples_of(rows: Iterator[Row], encode: Callable[[Row], Example | None]) -> tuple[list[Example], int]:
    """The examples of all rows, and the number of rows that were dropped as too long."""
    encoded = [encode(row) for row in rows]
    examples = [example for example in encoded if example is not None]
    if not examples:
        raise ConfigError(f"all {len(encoded)} rows are longer than data.max_length or the model's context")
    return examples, len(encoded) - len(examples)


def split(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and those that are held out, which a seed draws."""
    if count >= len(examples):
        raise ConfigError(f"data.held_out leaves none of {len(examples)} rows to train on")
    held = {int(index) for index in permutation(len(examples), seed, 0)[:count]}
    return [x for i, x in enumerate(examples) if i not in held], [x for i, x in enumerate(examples) if i in held]
