"""The same messages to several models, side by side: `tokencredit chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencredit.errors import ConfigError
from tokencredit.runs.untrusted import accept_any_bytes, visible, visible_lines
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.run_kind import ModelSource
from tokencredit.text.data.prompts import Prompt, PromptBatch, Prompts
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.tools.scoring_options import SamplingOptions
from tokencredit.tools.trained_policy import Policy


@dataclass
class Speaker:
    """A model in a chat. With a chat template it sees the whole conversation; without one it continues each message."""

    name: str
    policy: Policy
    generator: torch.Generator
    """Random numbers of the replies."""
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def converses(self) -> bool:
        """True if the tokenizer has a chat template."""
        return self.policy.tokenizer.chat_template is not None

    def read(self, message: str) -> PromptBatch:
        """The message as a prompt, after as many of the earlier turns as fit.

        Raises:
            ConfigError: the message alone does not fit, has no token, or the chat template rejects it.
        """
        longest = self.policy.config.rollout.max_new_tokens
        limit = max_prompt_length(self.policy.model.lm, longest)
        own = self.policy.config.prompts
        settings = PromptsConfig(add_bos=own.add_bos, chat_template_kwargs=own.chat_template_kwargs)
        turns = [*self.history, user(message)]
        while True:
            prompt: Prompt = turns if self.converses else message
            prompts = Prompts([{"prompt": prompt}], self.policy.tokenizer, settings, name="the message", keys="")
            batch = prompts.batch(0, 1)
            length = batch.ids.shape[1]
            if limit is None or length <= limit:
                return batch
            if not self.converses or len(turns) == 1:
                raise ConfigError(
                    f"the message has {length} tokens, and {max(limit, 0)} fit into the context of {self.name!r} "
                    f"beside --max_new_tokens {longest}; shorten one of them"
                )
            turns = turns[2:]

    def reply(self, message: str, batch: PromptBatch) -> str:
        """Sample the reply to a message that `read` has tokenized."""
        sampling = self.policy.config.rollout
        uniforms = torch.rand(1, sampling.max_new_tokens, generator=self.generator)
        text = self.policy.pipeline.sample(batch, sampling, uniforms).completions[0]
        if self.converses:
            self.history += [user(message), {"role": "assistant", "content": text}]
        return text


def user(message: str) -> dict[str, Any]:
    """A user's message of a conversation."""
    return {"role": "user", "content": message}


def load_speaker(source: ModelSource, which: str, options: SamplingOptions) -> Speaker:
    """Load a model for a chat; arguments as in `Policy`, but for the seed: all models have the same, by default 1."""
    policy = Policy(source, which, options, critic=False)
    name = source.name + (f" ({which})" if which != "policy" else "")
    return Speaker(name, policy, torch.Generator().manual_seed(1 if options.seed is None else options.seed))


def chat(
    speakers: Sequence[Speaker], messages: Iterator[str], console: Console, complain: Callable[[str], None]
) -> None:
    """Answer messages until they end, or `/quit`; `/new` begins a new conversation.

    `complain` shows why a message has no reply.
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
