"""The parts of a run: what it was given from Python, and what its settings name in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from tokencredit.errors import naming
from tokencredit.provenance.parts import Part, describe, label, rows_digest
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import PACKAGED, DefaultReward, FunctionTerm, RewardTerm
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.run_kind import own_parts
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.models.critic import saved_start
from tokencredit.text.models.model_loading import folder_digest, weights_digest
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rewards.terms import load_function
from tokencredit.text.turns.environments import load_factory, load_tools
from tokencredit.user_code.parts import load_parts, loaded_parts
from tokencredit.user_code.user_objects import load_object


def given_parts(args: PPOConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given, and the settings that are objects of users."""
    given = {argument: value for argument, value in arguments.items() if value is not None}
    return given | {key: part for key, part in own_parts(args).items() if not isinstance(part, str)}


def parts_of(
    args: PPOConfig,
    given: Mapping[str, Any],
    prompts: Prompts | Tasks,
    held_out: Prompts | Tasks,
    start: Mapping[str, str],
) -> dict[str, Part]:
    """Descriptions of what a run was `given` from Python or reads by name, by argument or key.

    `start` has the fingerprints of the model and of its tokenizer.
    """
    saved = saved_start(args.critic, args.model)
    unread = "reward[" if "reward_funcs" in given else None
    read = {key: value for key, value in named_parts(args).items() if unread is None or not key.startswith(unread)}
    if args.critic.name is not None and saved is not None and saved.trunk is not None:
        read["critic.name"] = str(saved.trunk)
    parts = {key: part for key, value in read.items() if (part := part_of(value)) is not None}
    fingerprints = {"model": start["model"], "processing_class": start["tokenizer"]}
    for argument, value in given.items():
        if argument in fingerprints:
            parts[argument] = {"name": type(value).__name__, "digest": fingerprints[argument]}
        elif argument not in ("train_dataset", "eval_dataset", *parts):
            parts |= {key: part_of(entry) or describe(entry) for key, entry in entries(argument, value).items()}
    apart = args.held_out_prompts() is not None or "eval_dataset" in given
    for group, rows in (("prompts", prompts), *[("eval", held_out)] * apart):
        if rows.rows is not None and rows.name != f"{group}.text":
            parts[rows.name if rows.name in given else f"{group}.dataset"] = describe(rows.rows)
    return parts


def named_parts(args: PPOConfig | ControlConfig | OfflineSettings) -> dict[str, Any]:
    """What settings name that may be a model's folder or code in a file, by key."""
    if isinstance(args, OfflineSettings):
        return {"model.name": args.model.name}
    read = loaded_parts(args)
    if isinstance(args, ControlConfig):
        return read
    read |= {"model.name": args.model.name, "critic.name": args.critic.name, "env.factory": args.env.factory}
    read |= {f"tools[{i}]": tool for i, tool in enumerate(args.tools)}
    return read | {f"reward[{i}].{kind}": name for i, term in enumerate(args.reward) for kind, name in [term.source()]}


def check_code(args: PPOConfig | ControlConfig) -> None:
    """Load the code of users that settings name, as a run does; `ConfigError` names the key of what cannot be used."""
    load_parts(args)
    if isinstance(args, PPOConfig):
        for number, term in enumerate(args.reward):
            with naming(f"reward[{number}]"):
                if isinstance(term, FunctionTerm):
                    load_function(term.function, term.kwargs)
        load_factory(args.env)
        load_tools(args.tools)


def entries(argument: str, value: Any) -> dict[str, Any]:
    """The parts in an argument of `PPOTrainer`: the entries of a list or dict, or the one value."""
    if isinstance(value, Mapping):
        return {f"{argument}[{key}]": entry for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return {f"{argument}[{i}]": x for i, x in enumerate(value)}
    return {argument: value}


def part_of(value: Any) -> Part | None:
    """The description of an entry, or of what a setting names; None for a name of ours or of the hub."""
    if isinstance(value, Term):
        name = "term_weight" if "weight" in value.kwargs else "weight"  # beside the function's own
        weight = {} if value.weight == 1 else {name: value.weight}
        return describe(partial(value.function, **value.kwargs, **weight))
    if isinstance(value, RewardTerm):  # with the code or the weights that it names
        part, (kind, name) = describe(value), value.source()
        changed = {key: x for key, x in part["arguments"].items() if x != getattr(type(value), key, x)}
        digests = [part["digest"], (part_of(name) or part)["digest"]]
        return part | {"arguments": {kind: name} | changed, "digest": rows_digest(digests)}
    if isinstance(value, PreTrainedModel):
        return {"name": f"{type(value).__name__} {value.config._name_or_path}", "digest": weights_digest(value)}
    if not isinstance(value, str):
        return None if value is None else describe(value)
    if (digest := folder_digest(value)) is not None:
        return {"name": value, "digest": digest}
    return describe(load_object(value, "user")) if ":" in value and value.partition(":")[0] not in PACKAGED else None


def with_labels(args: PPOConfig, given: Mapping[str, Any], parts: Mapping[str, Part]) -> PPOConfig:
    """The configuration with the parts `given` from Python by their labels, and no default in place of them."""
    python: dict[str, Any] = {}
    for argument, value in given.items():
        keys = [argument] if argument in parts else list(entries(argument, value))
        named = [label(parts[key]) for key in keys]
        python[argument] = named[0] if keys == [argument] else named
    if args.model.name:  # which names the model
        python.pop("model", None)
    reward = [] if "reward_funcs" in given else args.reward
    if {"environment_factory", "tools"} & given.keys():
        reward = [term for term in reward if not isinstance(term, DefaultReward)]
    return replace(args, python=python, reward=reward)
