"""A run.yaml from another project's settings, with the origin of each value as a comment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import ConfigError, pages_by_title
from tokencredit.runs.untrusted import visible
from tokencredit.settings.fields import check_value, settings_of, unused
from tokencredit.settings.foreign_names import misspelt
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.projects.translation import Project, Translation, translate
from tokencredit.settings.projects.trl import TRL
from tokencredit.settings.reader import Dumper, read_yaml
from tokencredit.settings.text import PPOConfig

MAX_LISTED = 12
"""Names on the terminal; the file has all."""
NEEDED = {
    "model.name": "no model is named",
    "reward": "no reward is named; the default rewards negative reviews of films",
    "prompts.dataset": "no prompts are named",
    "run.iterations": "no length is given",
    "rollout.max_new_tokens": "no length of completions is given; the default is 24 tokens",
}
"""Keys without which a run would be another one, and the reason that is said."""
OPEN: dict[str, Any] = {
    "model.name": "./MODEL",
    "reward": [{"function": "REWARD.py:reward"}],
    "prompts.dataset": "PROMPTS.jsonl",
}
"""Values of keys that are left to the user, which no run takes: the defaults would train something else."""


@dataclass(kw_only=True)
class Migrated(Translation):
    """A translation whose settings load, and what is said of the rest.

    Attributes:
        title: the project.
        notes: remarks on what was not read.
        unused: by key, the reason that a value would have no effect here.
    """

    title: str
    notes: list[str]
    unused: dict[str, str] = field(default_factory=dict)

    def text(self, names: str) -> str:
        """The YAML file."""
        lines = [f"# {names} ({self.title}), by tokencredit migrate. A comment names the setting that a value is from."]
        for key, setting in settings_of(PPOConfig).items():
            indent = "  " * key.count(".")
            if key in self.settings:
                value = yaml.dump(self.settings[key], Dumper=Dumper, default_flow_style=True, width=10**6)
                value = value.removesuffix("...\n").strip()
                lines.append(f"{indent}{setting.name}: {value}  # {comment(self.origins[key])}")
            elif any(own.startswith(f"{key}.") for own in self.settings):
                lines.append(f"{indent}{setting.name}:")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.without.items():
            reasons.setdefault(reason, []).append(name)
        sections = {
            "Left to you": self.undecided,
            "Without effect here": self.unused,
            "Not read": dict.fromkeys(self.notes, ""),
            "Without counterpart": {", ".join(own): reason for reason, own in reasons.items()},
        }
        for title, rows in sections.items():
            lines += ["", f"# {title}:"] * bool(rows)
            lines += [f"#   {comment(f'{name}: {reason}' if reason else name)}" for name, reason in rows.items()]
        return "\n".join(lines) + "\n"

    def summary(self, names: str) -> str:
        """The lines for the terminal."""
        own = sum(map(_own, self.origins.values()))
        lines = [f"{names}: {self.title}, {len(self.settings)} settings, {own} of them its defaults"]
        lines += [f"  left to you: {key}: {reason}" for key, reason in self.undecided.items()]
        lines += [f"  without effect here: {key} {reason}" for key, reason in self.unused.items()]
        lines += [f"  not read: {note}" for note in dict.fromkeys(self.notes)]
        listed = ", ".join(list(self.without)[:MAX_LISTED])
        more = f" and {len(self.without) - MAX_LISTED} more" if len(self.without) > MAX_LISTED else ""
        lines += [f"  without counterpart, with reasons in the file: {listed}{more}"] * bool(self.without)
        return "\n".join(visible(pages_by_title(line)) for line in lines)

    def leave(self, key: str, reason: str) -> None:
        """Leave a setting to the user."""
        value, origin = self.settings.pop(key), self.origins.pop(key)
        self.undecided[key] = reason if str(value) in reason else f"{reason} ({origin})"

    def drop_unused(self) -> None:
        """Leave out settings that have no effect with the others, which a configuration refuses."""
        known = settings_of(PPOConfig)
        values = {key: setting.default for key, setting in known.items()} | self.settings
        for key, why in unused(PPOConfig, values, rows=()).items():
            if key in self.settings and self.settings[key] != known[key].default:
                origin = self.origins.pop(key)
                del self.settings[key]
                if not _own(origin):
                    self.unused[key] = f"{why} ({origin})"


def migrated(project: Project, given: Mapping[str, Any], notes: list[str]) -> Migrated:
    """A configuration that loads, of a project's settings; values that are refused here are left to the user."""
    found = translate(project, {**given, "num_labels": None})
    made = Migrated(**vars(found), title=project.title, notes=[*notes])
    settings, known = made.settings, settings_of(PPOConfig)
    for key in list(settings):
        try:
            if key not in known:
                raise ConfigError(f"there is no key {key}")
            value = settings[key]
            if float in (known[key].hint, *getattr(known[key].hint, "__args__", ())) and type(value) is int:
                settings[key] = value = float(value)
            if key != "reward":  # whose terms are checked with the whole
                check_value(key, value, known[key].hint, known[key].limits)
        except (ConfigError, OverflowError) as error:
            made.leave(key, str(error))
    _compare_tokenizers(made)
    made.drop_unused()
    while message := _refused(settings):
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+|\breward\b", message)
        named = sorted(filter(settings.__contains__, named), key=lambda key: not _own(made.origins[key]))
        if not named:
            raise ConfigError(message)
        made.leave(named[0], message)  # rather a default of the project's than a value that was given
        made.drop_unused()
    for key, reason in NEEDED.items():
        if key not in settings:
            made.undecided.setdefault(key, reason)
    made.undecided |= _doubts(project, given, settings)
    for key in OPEN.keys() & made.undecided.keys():
        settings[key], made.origins[key] = OPEN[key], "left to you"
    _choose_labels(made, given.get("num_labels"))
    for key, value in settings.items():
        if re.search(r"\$[\w({]|`", str(value)):
            made.undecided[key] = f"the shell sets a part of {value}; write what it is"
    for name in [name for name, reason in made.without.items() if not reason]:
        near = _near(project, name)
        made.notes += [f"{name} is not known; did you mean {near}?"] * bool(near)
        made.without[name] = "not known" + bool(near) * f"; did you mean {near}?"
    return made


def _doubts(project: Project, given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """By key, the reason that a value, although it is written, may not be that of the file."""
    doubts = {}
    if project is TRL and given.get("learning_rate") is None:
        doubts["optim.lr"] = "3e-6 is the default since TRL 0.29; it was 5e-5 before"
    batch = ["of one process; write it times the number of processes, with run.iterations for as many completions"]
    batch *= given.get("world_size", 1) is None
    if project is TRL and given.get("num_mini_batches") not in (None, 1):
        batch.append("as since TRL 0.17; before, num_mini_batches times as many completions")
    if batch:
        doubts["rollout.batch_size"] = "; ".join(batch)
    place, coef = settings.get("kl.place"), settings.get("kl.coef")
    if coef and place in ("loss", "both") and settings.get("advantage.whiten") == "batch":
        doubts["kl.coef"] = (
            "a KL in the loss is divided by the deviation of the advantages here, and not there: give "
            f"{coef:g} × advantage_std of a first run"
        )
    return doubts


def _compare_tokenizers(made: Migrated) -> None:
    """Leave out a critic whose tokenizer is not the policy's, which a run refuses, if the folders of both are here."""
    model, critic = (str(made.settings.get(key, "")) for key in ("model.name", "critic.name"))
    if model == critic or not all(name and Path(name).expanduser().is_dir() for name in (model, critic)):
        return
    from tokencredit.text.models.critic import check_tokenizer
    from tokencredit.text.models.model_loading import load_tokenizer

    policy = ModelConfig(name=model)
    try:
        tokenizer = load_tokenizer(policy)
    except ConfigError:
        return  # training says so of the policy
    try:
        check_tokenizer(f"no value model is taken over from {critic}", critic, policy, tokenizer)
    except ConfigError as error:
        made.leave("critic.name", f"{error}; as it is, the critic begins as a copy of the policy")


def _choose_labels(made: Migrated, count: Any) -> None:
    """Make a classifier of a reward model with labels: those in its folder, or so many; the last is rewarded."""
    known = min(count, 99) if isinstance(count, int) else 0
    for number, term in enumerate(made.settings["reward"]):
        name = term.get("classifier", term.get("reward_model"))
        if name is None or count == 1:
            continue
        listed = ", ".join(labels := _labels_of(name) or [f"LABEL_{i}" for i in range(known)])
        if not labels:
            made.notes.append(f"labels of {name}, no folder here: if --check finds any, name a classifier and label")
        elif len(labels) > 1:
            options = {key: value for key, value in term.items() if key not in ("classifier", "reward_model")}
            made.settings["reward"][number] = {"classifier": name, "label": labels[-1]} | options
            made.origins["reward"] += f"; a classifier of {listed}"
            made.undecided[f"reward[{number}].label"] = (
                f"the last of {listed} is written; name the one that is rewarded"
            )


def _labels_of(name: str) -> list[str]:
    """The labels of the classifier in a folder; empty if it is not here, or another model."""
    try:
        config = read_yaml(Path(name).expanduser() / "config.json")
    except ConfigError:
        return []
    heads, labels = str(config.get("architectures")), config.get("id2label")
    if "SequenceClassification" in heads and labels is None:
        return ["LABEL_0", "LABEL_1"]  # Transformers writes down other labels only
    return list(map(str, labels.values())) if isinstance(labels, dict) else []


def comment(text: str) -> str:
    """A text on one line."""
    return visible(pages_by_title(" ".join(text.split())))


def _own(origin: str) -> bool:
    """True for a value that is the project's, not the file's."""
    return origin.startswith(("as ", "default of "))


def _near(project: Project, name: str) -> str:
    """The names of a project that one may be a misspelling of."""
    parts = name.split(".")
    names = [own for own in (*project.answers, *project.aliases) if "*" not in own]
    near = (misspelt(".".join(parts[first:]), names) for first in range(len(parts)))
    return " or ".join(next(filter(None, near), []))


def _refused(settings: Mapping[str, Any]) -> str:
    try:
        PPOConfig.from_dict(settings)
    except ConfigError as error:
        return str(error)
    return ""
