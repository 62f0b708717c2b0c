"""The same messages to several models, side by side: `tokencredit chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.runs.untrusted import accept_any_bytes, visible, visible_lines
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import ModelSource, with_engine
from tokencredit.text.data.prompts import Prompt, PromptBatch, Prompts
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.models.run_models import load_source
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.ppo_setup import build_pipeline

LONGEST = 128
"""Longest reply of a model without a run of its own, in tokens, unless its context is shorter than two of them."""


@dataclass
class Speaker:
    """A model in a chat. With a chat template it sees the whole conversation; without one it continues each message."""

    name: str
    pipeline: Pipeline
    sampling: SamplingConfig
    prompts: PromptsConfig
    """Tokenization of the conversation."""
    generator: torch.Generator
    """Random numbers of the replies."""
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def converses(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.pipeline.tokenizer.chat_template is not None

    def read(self, message: str) -> PromptBatch:
        """The message as a prompt, after as many of the earlier turns as fit.

        Raises:
            ConfigError: the message alone does not fit, has no token, or the chat template rejects it.
        """
        limit = max_prompt_length(self.pipeline.policy.lm, self.sampling.max_new_tokens)
        turns = [*self.history, user(message)]
        while True:
            prompt: Prompt = turns if self.converses else message
            batch = Prompts([{"prompt": prompt}], self.pipeline.tokenizer, self.prompts, name="the message").batch(0, 1)
            length = batch.ids.shape[1]
            if limit is None or length <= limit:
                return batch
            if not self.converses or len(turns) == 1:
                raise ConfigError(
                    f"the message has {length} tokens, and {max(limit, 0)} fit into the context of {self.name!r} "
                    f"beside --max_new_tokens {self.sampling.max_new_tokens}; shorten one of them"
                )
            turns = turns[2:]

    def reply(self, message: str, batch: PromptBatch) -> str:
        """Sample the reply to a message that `read` has tokenized."""
        uniforms = torch.rand(1, self.sampling.max_new_tokens, generator=self.generator)
        text = self.pipeline.sample(batch, self.sampling, uniforms).completions[0]
        if self.converses:
            self.history += [user(message), {"role": "assistant", "content": text}]
        return text


def user(message: str) -> dict[str, Any]:
    """A user's message of a conversation."""
    return {"role": "user", "content": message}


def load_speaker(
    source: ModelSource, which: str, max_new_tokens: int | None, temperature: float | None, seed: int
) -> Speaker:
    """Load a model for a chat.

    Args:
        source: a run, or a model by name.
        which: of a run, `policy`, or `base` for the model it started from.
        max_new_tokens: longest reply, in tokens; None for the run's, or `LONGEST`.
        temperature: sampling temperature; None for the run's, or 1.
        seed: seed of the replies; models with the same seed have the same random numbers.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    processes, own = Processes(), source.config.rollout
    models = load_source(source, which, processes)
    if max_new_tokens is None and not source.scored:
        context = max_prompt_length(models.policy.lm, 0)
        max_new_tokens = LONGEST if context is None else min(LONGEST, max(context // 2, 1))
    longest = max_new_tokens or own.max_new_tokens
    sampling = replace(
        own,
        max_new_tokens=longest,
        min_new_tokens=min(own.min_new_tokens, longest),
        temperature=temperature or own.temperature,
    )
    return Speaker(
        source.name + (" (base)" if which == "base" else ""),
        build_pipeline(with_engine(source.config), models, [], processes),
        sampling,
        PromptsConfig(
            add_bos=source.config.prompts.add_bos, chat_template_kwargs=source.config.prompts.chat_template_kwargs
        ),
        torch.Generator().manual_seed(seed),
    )


def chat(
    speakers: Sequence[Speaker], messages: Iterator[str], console: Console, complain: Callable[[str], None]
) -> None:
    """Answer messages until they end, or `/quit`; `/new` begins a new conversation.

    Args:
        speakers: the models.
        messages: of the user.
        console: shows the replies.
        complain: shows why a message has no reply.
    """
    for line in messages:
        message = line.rstrip("\r\n")
        if message.strip() == "/quit":
            return
        if message.strip() == "/new":
            for speaker in speakers:
                speaker.history.clear()
        elif message.strip():
            try:
                show(speakers, answer(speakers, message), console)
            except ConfigError as error:
                complain(str(error))


def answer(speakers: Sequence[Speaker], message: str) -> list[str]:
    """Each model's reply to a message; none is sampled unless all models can read it."""
    batches = [speaker.read(message) for speaker in speakers]
    return [speaker.reply(message, batch) for speaker, batch in zip(speakers, batches, strict=True)]


def show(speakers: Sequence[Speaker], replies: Sequence[str], console: Console) -> None:
    """Print replies side by side on a terminal, and one per line elsewhere."""
    if not console.is_terminal:
        for speaker, reply in zip(speakers, replies, strict=True):
            console.print(Text(f"{visible(speaker.name)}: {visible(reply)}"), soft_wrap=True)
        return
    table = Table(expand=True)
    for speaker in speakers:
        table.add_column(Text(visible(speaker.name)), ratio=1, overflow="fold")
    table.add_row(*(Text(visible_lines(reply)) for reply in replies))
    console.print(table)


def typed() -> Iterator[str]:
    """Lines of standard input, after a prompt if it is a terminal."""
    accept_any_bytes(sys.stdin)
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  # input() then edits lines
    print("/new forgets the conversation; /quit or Ctrl-D ends it")
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
