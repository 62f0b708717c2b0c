"""Files of other projects, recognised by their content: the project, and its settings by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import flat, settings_of
from tokencredit.settings.projects.llama_factory import LLAMA_FACTORY, SWIFT
from tokencredit.settings.projects.openrlhf import OPENRLHF
from tokencredit.settings.projects.translation import Project
from tokencredit.settings.projects.trl import OLD_TRL, TRL
from tokencredit.settings.projects.verl import VERL
from tokencredit.settings.reader import MAX_SIZE, load_yaml, read_yaml
from tokencredit.settings.text import PPOConfig
from tokencredit.tools.migration.arithmetic import UNREADABLE, assignments, computed, names_in_scope
from tokencredit.tools.migration.shell import Script, arguments, flags

PROGRAMS = {
    re.compile(r"(.*[./])?main_ppo(\.py)?"): VERL,
    re.compile(r".*openrlhf\.cli\.train_ppo\w*"): OPENRLHF,
    re.compile(r"rlhf|.*swift/cli/rlhf\.py"): SWIFT,
    re.compile(r"llamafactory-cli|.*src/train\.py"): LLAMA_FACTORY,
    re.compile(r".*ppo\w*\.py"): TRL,
}
"""Projects by the word of a command that is their program."""
LOADERS = {
    "AutoModelForCausalLM": "model_name_or_path",
    "AutoModelForCausalLMWithValueHead": "model_name_or_path",
    "AutoModelForSequenceClassification": "reward_model",
    "load_dataset": "dataset_name",
}
"""Names of TRL's by the call whose first argument is their value."""
PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of `LoraConfig`, which are not those of TRL's command line."""
GRPO = {"num_generations", "max_completion_length", "num_iterations"}
"""Names of TRL's GRPOConfig that no PPOConfig has."""
KINDS = "TRL's PPOConfig (YAML, JSON or Python), LLaMA-Factory's stage: ppo, ms-swift's rlhf_type: ppo, verl, OpenRLHF"


@dataclass
class Source:
    """A file's settings.

    Attributes:
        project: the project that it is of; None if the file alone does not show it.
        given: its settings, by dotted names.
        notes: remarks on what was not read.
    """

    project: Project | None
    given: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def read(file: Path) -> Source:
    """The settings of a file, which is never run.

    Raises:
        ConfigError: it cannot be read, is too long, or is of no project that is known.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MAX_SIZE:
        raise ConfigError(f"{file} has {len(text)} characters; a file may have {MAX_SIZE}")
    if file.suffix == ".py":
        found = python_source(text, file)
    elif file.suffix in (".yaml", ".yml", ".json"):
        found = mapping_source(read_yaml(file), file)
    else:
        found = shell_source(text, file)
    if found is None:
        raise ConfigError(f"{file}: no settings of PPO were found; it may be of {KINDS}")
    return found


def mapping_source(settings: Mapping[Any, Any], file: Path) -> Source:
    """The settings of a YAML or JSON file."""
    values = {key: value for key, value in flat(settings).items() if value is not None}
    given = {key: value for key, x in values.items() if not unresolved(value := resolved(x, values))}
    scripts = (shell_source(value, file) for value in given.values() if isinstance(value, str) and "\n" in value)
    if found := next(filter(None, scripts), None):
        return found
    for key, project in (("stage", LLAMA_FACTORY), ("rlhf_type", SWIFT)):
        if (kind := settings.get(key, "ppo")) != "ppo":
            raise ConfigError(f"{file}: {key} is {kind}; migrate reads {key}: ppo")
        if key in settings:
            return Source(project, given)
    if {"actor_rollout_ref", "algorithm"} & {key.partition(".")[0] for key in given}:
        return Source(VERL, given)
    own, groups = settings_of(PPOConfig), {key.partition(".")[0] for key in settings}
    if groups & set(own) and not any(TRL.name_of(key) for key in settings if key not in own):
        command = f"tokencredit train --config {quote(str(file))}"
        raise ConfigError(f"{file}: it is a configuration of tokencredit already; {command}")
    if grpo := sorted(GRPO & {key.rpartition(".")[2] for key in given}):
        raise ConfigError(f"{file}: {grpo[0]} is of TRL's GRPOConfig, and migrate reads PPOConfig; {TRL.page} has both")
    return Source(trl_version(given), given)


def resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """A value in which Hydra's `${key}` of other keys are replaced."""
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if whole and whole[1] in values:
        return values[whole[1]]
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(values.get(match[1], match[0])), value)


def unresolved(value: Any) -> bool:
    """True for a value that repeats another, as in Hydra's files, or has to be given."""
    return isinstance(value, str) and (value.startswith("${") or value == "???")


def trl_version(names: Mapping[str, Any], text: str = "") -> Project | None:
    """TRL's table with most of the names; None if neither has any."""
    old, new = ({name for name in names if project.name_of(name)} for project in (OLD_TRL, TRL))
    if not old | new:
        return None
    return OLD_TRL if (len(old - new), "ValueHead" in text or ".step(" in text) > (len(new - old), False) else TRL


def shell_source(text: str, file: Path) -> Source | None:
    """The settings of the first command in a shell script that trains with PPO."""
    script, found = Script(), list[Source]()
    for words in script.commands(text):
        line = " ".join(words)
        for program, project in PROGRAMS.items():
            if not (rest := arguments(words, program)):
                continue
            source = command_source(project, rest, file)
            if project is not VERL and project is not OPENRLHF and (count := script.processes(line)) != 1:
                source.given.setdefault("world_size", count)
            found.append(source)
            break
    if len(found) > 1:
        found[0].notes.append(f"{len(found)} commands train; the first is read")
    return found[0] if found else None


def command_source(project: Project, words: list[str], file: Path) -> Source:
    """The settings of a command's arguments."""
    places = pairwise(["", *words]) if project is LLAMA_FACTORY else ()
    free = (word for before, word in places if before[:2] != "--" or "=" in before)  # which are no flag's value
    own = next((word for word in free if re.fullmatch(r"[^=]+\.(ya?ml|json)", word)), None)
    words = [word for word in words if word != own]
    plain = list(takewhile(lambda word: project is VERL or not word.startswith("-"), words))
    pairs = [word.lstrip("+").partition("=") for word in plain if not word.startswith("-")]
    given = {key: value_of(value) for key, equals, value in pairs if equals}
    notes = [key for key, equals, _ in pairs if not equals and key != "train"]
    if project is VERL:
        notes += [f"{word} is Hydra's, and its values are not read" for word in words if word.startswith("-")]
    else:
        given |= {key: value_of(value) for key, value in flags(words).items()}
    if own and (path := file.parent / own).is_file():
        given = mapping_source(read_yaml(path), path).given | given
    elif own:
        notes.append(f"{path} is not there; give it to migrate as well")
    if (kind := given.get("rlhf_type", given.get("stage", "ppo"))) != "ppo":
        raise ConfigError(f"{file}: its command trains with {kind}; migrate reads ppo")
    given = {key: value for key, value in given.items() if value is not None}
    return Source(trl_version(given) or TRL if project is TRL else project, given, notes)


def value_of(text: Any) -> Any:
    """The value of a flag: YAML, or the text itself."""
    if isinstance(text, list):
        return [value_of(item) for item in text]
    try:
        return load_yaml(text) if isinstance(text, str) else text
    except yaml.YAMLError:
        return text


def python_source(text: str, file: Path) -> Source | None:
    """The arguments of the first `PPOConfig(…)` with any, and the models and data that are loaded by name; without such
    a call, a command in the file's docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} is not Python that can be read: {error}") from error
    nodes = list(ast.walk(tree))
    scopes = names_in_scope(tree)
    calls = [(called(node), node) for node in nodes if isinstance(node, ast.Call)]
    configs = [node for name, node in calls if name in ("PPOConfig", "PPOv2Config") and node.keywords]
    if not configs:
        if of_groups := sorted({name for name, _ in calls} & {"GRPOConfig", "RLOOConfig"}):
            raise ConfigError(f"{file}: {of_groups[0]} is not read; migrate reads PPOConfig, and {TRL.page} has both")
        if "stable_baselines3" in text and "PPO" in dict(calls):
            raise ConfigError(
                f"{file}: PPO of Stable-Baselines3 is not read; give its arguments as flags of tokencredit control, "
                "which answers with the keys here (docs/names.md)"
            )
        texts = [x.value.value for x in nodes if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
        found = (shell_source(own, file) for own in texts if isinstance(own, str) and "--" in own)
        return next((source for source in found if source), None)
    source = Source(None, {})
    critics: list[ast.expr | None] = [x.value for x in nodes if isinstance(x, ast.keyword) and x.arg == "value_model"]
    assigned = assignments(nodes)
    critics += [x.value for target, x in assigned if getattr(target, "id", "") == "value_model"]
    made = [ast.unparse(target) for target, x in assigned if x.value is configs[0]]
    for name, node in calls:
        bound, known = scopes[node]
        values = call_arguments(name, node, node in configs[:1], bound)
        if values and node in critics:  # of the reward model's class, and often of another folder
            values = {"value_model_path": node.args[0]}
        if "reward_model" in source.given:  # whose labels those of a second one are not
            values.pop("num_labels", None)
        for argument, value in values.items():
            try:
                source.given.setdefault(argument, computed(value, {} if "**" in argument else known))
            except UNREADABLE:
                if argument not in source.given:
                    shown = "**" if "**" in argument else f"{argument}="
                    source.notes.append(f"{shown}{ast.unparse(value)} is computed by the script")
    source.given = {name: value for name, value in source.given.items() if value is not None}
    source.project = trl_version(source.given, text)
    source.notes += [f"{ast.unparse(value)}, an argument without a name" for value in configs[0].args]
    source.notes += [ast.unparse(x) for target, x in assigned if ast.unparse(target).rpartition(".")[0] in made]
    if len(configs) > 1:
        source.notes.append(f"{len(configs)} calls of PPOConfig; the first is read")
    return source


def called(node: ast.Call) -> str:
    """The name of what a call calls; the class of `from_pretrained`."""
    parts = ast.unparse(node.func).split(".")
    return parts[-2] if parts[-1] == "from_pretrained" and len(parts) > 1 else parts[-1]


def keywords_of(node: ast.Call, bound: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """The arguments of a call by name, those of dicts after `**` too; `**` and its text for another one."""
    found: dict[str, ast.expr] = {}
    todo, bound = list(node.keywords), dict(bound)
    while todo:
        item = todo.pop(0)
        spread = None if item.arg else bound.pop(getattr(item.value, "id", ""), item.value)
        if isinstance(spread, ast.Dict):
            names = [str(key.value) if isinstance(key, ast.Constant) else None for key in spread.keys]
            todo[:0] = [ast.keyword(name, value) for name, value in zip(names, spread.values, strict=True)]
        elif isinstance(spread, ast.Call) and called(spread) == "dict" and not spread.args:
            todo[:0] = spread.keywords
        else:
            found[item.arg or f"**{ast.unparse(item.value)}"] = item.value
    return found


def call_arguments(name: str, node: ast.Call, config: bool, bound: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """The arguments of a call that are settings, by TRL's names."""
    keywords = keywords_of(node, bound)
    if config:
        return keywords
    if name == "LoraConfig":
        found = {key: ast.Constant(value) for key, value in PEFT.items()} | keywords
        return {f"lora_{key.removeprefix('lora_')}": value for key, value in found.items()} | {
            "use_peft": ast.Constant(True)
        }
    if name == "BitsAndBytesConfig":
        return {key: value for key, value in keywords.items() if key.startswith("load_in_")}
    if name == "load_dataset" and "data_files" in keywords:
        return {"dataset_name": keywords["data_files"]}
    labels = {"num_labels": keywords["num_labels"]} if "num_labels" in keywords else {}
    return {LOADERS[name]: node.args[0]} | labels if name in LOADERS and node.args else {}
