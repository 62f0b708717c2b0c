"""Everything that can be known of a run before its first rollout, in one list: `tokencredit train --check`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, NotInstalled, RunStopped, naming
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.summary import figure, shortened
from tokencredit.runs.trackers import Trackers
from tokencredit.settings.fields import refuse_unused, require_config
from tokencredit.settings.text import PPOConfig
from tokencredit.text import ppo_setup as setup
from tokencredit.text.data.hub import check_push
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.rollout import unpadded
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.models.critic import check_tokenizer
from tokencredit.text.models.model_loading import load_tokenizer, max_prompt_length
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rewards.terms import score
from tokencredit.text.rewards.texts import last_message
from tokencredit.tools.plan.plan import make_plan
from tokencredit.tools.plan.show import gigabytes, warnings
from tokencredit.tools.plan.work import base_config

MADE_UP = ("That is good.", "No.")
"""Completions on which rewards are tried."""
State = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """A line of the list."""

    state: State
    part: str
    text: str
    """What was found; of an error also what to do."""


@dataclass
class Known:
    """What the checks of a run have loaded, for those after them."""

    config: PPOConfig
    reward_funcs: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    lm: Any = None
    """Stands for the model, with its configuration alone; None if that cannot be read."""
    tokenizer: PreTrainedTokenizerBase | None = None
    rows: Prompts | Tasks | None = None
    by_command: bool = False
    """True if messages name flags of the command."""


def check(config: PPOConfig, **given: Any) -> list[Finding]:
    """All findings on a run, without loading the policy; rewards are called on two made-up completions.

    `given` are `reward_funcs`, `train_dataset` and `eval_dataset` of `PPOTrainer`, and `by_command`. A check that fails
    does not end the list.
    """
    known, findings = Known(require_config(config, PPOConfig), **given), list[Finding]()
    for part, examine in CHECKS.items():
        try:
            for state, text in examine(known):  # what was found before a failure stays
                findings.append(Finding(state, part, text))
        except (ConfigError, RunStopped, OSError) as error:
            findings.append(Finding("error", part, str(error)))
    return findings


Lines = Iterator[tuple[State, str]]


def check_settings(known: Known) -> Lines:
    """Settings without an effect."""
    given = [name for name in ("train_dataset", "eval_dataset") if getattr(known, name) is not None]
    refuse_unused(known.config, rows=given)
    yield "ok", "they go together, and each has an effect"


def check_packages(known: Known) -> Lines:
    """Packages of the engine and the trackers."""
    rollout = known.config.rollout
    if rollout.engine == "vllm" and rollout.server is None and find_spec("vllm") is None:
        yield "error", str(NotInstalled("rollout.engine: vllm", "vLLM", "tokencredit[vllm]"))
    Trackers(known.config.run.trackers, Path(), print, enabled=False)


def check_folder(known: Known) -> Lines:
    """The run's folder."""
    folder = RunFolder(known.config.run.dir)
    folder.refuse_if_used(known.by_command)
    place = folder.path.absolute()
    below = next(path for path in (place, *place.parents) if path.exists())
    if not (below.is_dir() and os.access(below, os.W_OK)):
        raise ConfigError(f"{str(below)!r} is no folder that can be written to; set run.dir to another folder")
    yield "ok", str(folder.path)


def check_model(known: Known) -> Lines:
    """Configuration and tokenizer of the policy, and of a critic by name."""
    model, critic = known.config.model, known.config.critic.name
    lm_config = base_config(model)
    with naming("model.name"):
        known.tokenizer = load_tokenizer(model)
    known.lm = cast(Any, SimpleNamespace(config=lm_config))
    yield "ok", f"{model.name}, {lm_config.model_type}, a tokenizer of {len(known.tokenizer):,} tokens"
    if critic is not None:
        kind = base_config(model, critic).model_type
        check_tokenizer(f"critic.name is {critic!r}", critic, model, known.tokenizer)
        yield "ok", f"critic.name {critic}, {kind}"


def check_prompts(known: Known) -> Lines:
    """Prompts for training and evaluation, their chat template, and what is remarkable about them."""
    config, tokenizer = known.config, known.tokenizer
    if known.lm is None or tokenizer is None:
        yield "warning", "not read: the model above cannot be"
        return
    environments = setup.environments_of(config)
    rows = known.train_dataset, known.eval_dataset
    prepared = setup.prepare_rows(config, known.lm, tokenizer, environments, *rows)
    known.rows = prepared[0]
    if isinstance(known.rows, Tasks):
        yield "ok", f"{len(known.rows.kept):,} rows of {known.rows.name}, for the environment"
    else:
        first = shortened(last_message(known.rows.batch(0, 1).prompts[0]), 60)
        yield "ok", f"{len(known.rows.kept):,} of {known.rows.name}; the first: {first}"
    dropped = [line for part in dict.fromkeys(prepared) if (line := part.dropped())]
    for line in (*dropped, *setup.remarks(config, known.rows, sharded=True)):
        yield "warning", line


def check_rewards(known: Known) -> Lines:
    """Each reward term, on two made-up completions of the first prompts."""
    environments = setup.environments_of(known.config)
    terms = setup.load_terms(known.config, known.reward_funcs, Processes().device, environments)
    for term in terms:
        if not isinstance(known.rows, Prompts):
            yield "ok", f"{term.name}: loaded; not called, for there are no prompts yet"
            continue
        try:
            values = " and ".join("none" if x is None else figure(x) for x in called(known, term, known.rows))
        except (ConfigError, RunStopped) as error:
            yield "error", str(error)
        else:
            yield "ok", f"{term.name}: {values} for two made-up completions"


def called(known: Known, term: Term, prompts: Prompts) -> list[float | None]:
    """The values of a term for two made-up completions; it is called once."""
    assert known.tokenizer is not None
    batch = prompts.batch(0, len(MADE_UP))
    ids = [known.tokenizer(text, add_special_tokens=False)["input_ids"] for text in MADE_UP]
    columns = {**batch.columns, "completion_ids": ids, "completion_mask": [[1] * len(row) for row in ids]}
    columns["prompt_ids"] = unpadded(batch.ids, batch.mask)
    if known.config.kl.coef > 0:
        columns["ref_logprobs"] = [[-1.0] * len(row) for row in ids]
    scores = score(
        [replace(term, retries=0)], batch.questions(), batch.answers(MADE_UP), columns, [len(row) for row in ids]
    )
    return scores.terms[term.name]


def check_hub(known: Known) -> Lines:
    """Login and write access, if the policy is to be uploaded."""
    repository = known.config.run.push_to_hub
    if repository is not None:
        yield "ok", f"{check_push(repository)} may upload to {repository}"


def check_memory(known: Known) -> Lines:
    """Memory and disk, by a plan without times."""
    if known.lm is None:
        return
    longest = None
    if known.train_dataset is not None or not isinstance(known.rows, Prompts):
        new, budget = known.config.rollout.max_new_tokens, known.config.ppo.micro_batch_tokens
        limits = known.config.prompts.max_length or 128, max_prompt_length(known.lm, new, budget)
        longest = min(limit for limit in limits if limit is not None)
        yield "warning", f"planned with prompts of {longest} tokens; tokencredit plan --prompt_tokens takes others"
    plan = make_plan(known.config, time=False, prompt_tokens=longest)
    free = "" if plan.memory is None else f" of {gigabytes(plan.memory)}"
    disk = gigabytes(sum(plan.disk.values()))
    yield (
        "ok" if plan.fits else "error",
        f"{gigabytes(plan.peak[1])}{free} ({plan.work.device}), and {disk} on the disk",
    )
    for line in warnings(plan):
        yield "warning", line.removeprefix("warning").strip()
    yield "ok", "tokencredit plan, with the same settings, measures the time on this machine"


CHECKS: dict[str, Callable[[Known], Lines]] = {
    "settings": check_settings,
    "packages": check_packages,
    "folder": check_folder,
    "model": check_model,
    "prompts": check_prompts,
    "reward": check_rewards,
    "hub": check_hub,
    "memory": check_memory,
}
"""The checks by their parts, in an order in which each finds what it needs."""
