"""Other projects' names of settings and arguments, and those here; suggestions for keys that are not known."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

from tokencredit.errors import ConfigError

APART = ("eval", "audit", "critic")
"""Groups whose keys do not stand for the same keys of training."""


def counterpart(key: str, known: Collection[str]) -> str:
    """The keys here for another project's name, or that there are none; empty for a name that is not known.

    A name in a group of ours stands for keys of that group, if it has any; in one of `APART` for those alone.
    """
    from tokencredit.settings.projects import projects

    group, _, last = key.rpartition(".")
    for project in projects():
        name = project.name_of(key, patterns=key.partition(".")[0] not in known)
        if not name or (project.needs and project.needs not in known):
            continue
        keys, note = project.answer(name)
        if any(key not in known for key in re.findall(r"\w+\.\w+\b(?<!\.md)(?<!\.jsonl)", note)):
            continue
        note = note or project.page
        brackets = f" ({note})" if note else ""
        if not keys:
            return f"it has no counterpart here{brackets}"
        here = [key for key in keys if key in known]
        own = [key for key in here if key.startswith(f"{group}.")] if name == last else []
        if wanted := own or ([] if name == last and key.partition(".")[0] in APART else here):
            return f"here it is {', '.join(wanted)}{brackets}"
    return ""


def close(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1; 0 unless one may be a misspelling of the other."""
    alike = SequenceMatcher(None, one, other).ratio()
    return alike if alike >= 0.8 else 0.0


def misspelt(name: str, known: Iterable[str]) -> list[str]:
    """The names that are most like one, if any may be meant; dotted names part by part."""
    scores = {}
    for key in known:
        pairs = list(zip(key.split("."), name.split("."), strict=False))
        whole = key.count(".") == name.count(".")
        scores[key] = min(close(*pair) for pair in pairs) if whole else 0.0
    best = max(scores.values(), default=0.0)
    return [key for key, score in scores.items() if best and score == best]


def suggestion(key: str, known: Collection[str], otherwise: str = "see --print_config for all keys") -> str:
    """Advice on an unknown key: the key here for another project's name, or for a misspelling, or its group's keys."""
    name = key[:1] + key[1:].replace("-", "_")
    group = name.rpartition(".")[0]
    if name not in known and (here := counterpart(name, known)):
        return here
    near = [own for own in known if own.endswith(f".{name}") or own.replace(".", "_") == name.replace(".", "_")]
    near = near or sorted({f"{name.partition('.')[0]}.{name.rpartition('.')[2]}"} & set(known))  # eval.prompts.dataset
    near = near or misspelt(name, known)
    if not near and not group:
        ends = {own: own.rpartition(".")[2] for own in known}
        near = [own for own, end in ends.items() if end in misspelt(name, set(ends.values()))]
    if near:
        return f"did you mean {' or '.join(near)}?"
    own_keys = [own.removeprefix(f"{group}.") for own in known if own.rpartition(".")[0] == group]
    return f"{group} has {', '.join(own_keys)}" if group and own_keys else otherwise


def names_elsewhere(names: Iterable[str]) -> str:
    """A message with the keys for names of TRL's, or of another project's, among these; empty if there is none."""
    from tokencredit.settings.projects import projects
    from tokencredit.settings.projects.trl import TRL

    found = []
    for name in names:
        project = next((x for x in (TRL, *projects()) if not x.needs and x.name_of(name, patterns=False)), None)
        if project is not None:
            keys, note = project.answer(project.name_of(name))
            what = f" name for {', '.join(keys)}" if keys else f", and has no counterpart here ({note})"
            page = f" ({project.page})" if project.page else ""
            found.append(f"{name} is {project.title}'s{what}{page}")
    return "; ".join(found)


def refuse_arguments(names: Collection[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for arguments of `PPOTrainer` that it does not take; `known` are those that it takes."""
    if not names:
        return
    other = [name for name in names if not names_elsewhere([name])]
    near = misspelt(other[0], known) if other else []
    advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}; settings go into args"
    lines = [f"PPOTrainer takes no argument {', '.join(other)}; {advice}"] if other else []
    raise ConfigError("; ".join(filter(None, [names_elsewhere(names), *lines])))
