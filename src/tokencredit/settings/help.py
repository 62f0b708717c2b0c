"""The short help of commands that train: options, and the keys that people change first."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from argparse import Action
from collections.abc import Iterable, Mapping
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.offline import DPOConfig, RewardModelConfig, SFTConfig
from tokencredit.settings.text import PPOConfig

OFFLINE_DATA = ("data.dataset", "data.column", "data.template", "data.held_out", "data.batch_size", "data.micro_batch")
OFFLINE_MODEL = ("seed", "model.name", "model.lora.rank", *OFFLINE_DATA)
OFFLINE_RUN = ("data.epochs", "optim.lr", "optim.schedule", "eval.every", "run.dir", "run.iterations", "run.save_every")
FIRST_KEYS: dict[type, tuple[str, ...]] = {
    PPOConfig: (
        "seed",
        "model.name",
        "model.lora.rank",
        "critic.kind",
        "critic.lr",
        "prompts.text",
        "prompts.dataset",
        "reward",
        "rollout.batch_size",
        "rollout.max_new_tokens",
        "rollout.temperature",
        "advantage.estimator",
        "advantage.lam",
        "ppo.epochs",
        "ppo.micro_batch_tokens",
        "kl.coef",
        "optim.lr",
        "eval.every",
        "run.dir",
        "run.iterations",
    ),
    ControlConfig: (
        "seed",
        "algorithm",
        "env.id",
        "env.number",
        "env.normalize_observations",
        "agent.hidden",
        "critic.kind",
        "critic.lr",
        "steps",
        "advantage.estimator",
        "advantage.gamma",
        "advantage.lam",
        "ppo.epochs",
        "ppo.minibatches",
        "ppo.clip",
        "ppo.entropy_coef",
        "optim.lr",
        "eval.episodes",
        "run.dir",
        "run.iterations",
    ),
    SFTConfig: (*OFFLINE_MODEL, "data.completion", "sft.loss_on", *OFFLINE_RUN),
    RewardModelConfig: ("seed", "model.name", *OFFLINE_DATA, "data.chosen", "data.rejected", *OFFLINE_RUN),
    DPOConfig: (*OFFLINE_MODEL, "data.chosen", "data.rejected", "dpo.loss", "dpo.beta", *OFFLINE_RUN),
}
"""The keys that people change first, by configuration."""
OPTIONS = {"resume": "RUN", "processes": "N", "tokens": "N", "prompt_tokens": "N", "out": "FILE"}
"""Options with a value that only some of the commands have, and the value's name."""
NARROWEST, WIDEST = 60, 120
"""Width of the help in characters, within which it follows the terminal's."""


def short_help(command: str, description: str, keys: Iterable[str], actions: Iterable[Action]) -> str:
    """The help of a command that trains: its options, these keys with their defaults, and where the others are.

    Args:
        command: such as `tokencredit train`.
        description: one line on the command.
        keys: in their groups' order.
        actions: the parser's.
    """
    known = {action.dest: action for action in actions}
    own = {f"--{name.replace('_', '-')}": known[name].help for name in ("no_time",) if name in known}
    own |= {f"--{name} {value}": known[name].help for name, value in OPTIONS.items() if name in known}
    prints = {"--print_config": "Print all keys with their values and meanings, as a YAML file for --config."}
    options = {
        "--config FILE": known["config"].help,
        **own,
        **(prints if "resume" in known else {}),
        "--no-code": known["no_code"].help,
        "--debug": known["debug"].help,
        "--help GROUP": "Show the keys of a group, such as optim, in full; all for everything.",
    }
    first = {f"--{key} {default_of(known[key])}".rstrip(): str(known[key].help) for key in keys}
    groups = {key.partition(".")[0]: None for key in known if "." in key}
    shown = {key.partition(".")[0] for key in keys}
    further = [group for group in groups if group not in shown]
    more = f"More keys of these groups{', and of ' if further else ''}{', '.join(further)}"
    return "\n".join(
        [
            f"usage: {command} [--config FILE] [--KEY VALUE ...]",
            "",
            description,
            "",
            "options:",
            *table(first_sentences(options)),
            "",
            "the keys that are changed first, with their defaults:",
            *table(first_sentences(first)),
            "",
            f"{more}: {command} --help all",
            "",
        ]
    )


def group_help(topic: str, actions: Iterable[Action]) -> str:
    """The keys of a group, or one key, with their defaults and whole meanings.

    Raises:
        ConfigError: there is no such group or key.
    """
    keys = {action.dest: action for action in actions if action.option_strings}
    wanted = [key for key in keys if key.startswith(f"{topic}.")] or [key for key in keys if key == topic]
    if not wanted:
        groups = ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key))
        raise ConfigError(f"--help has no group {topic}; give all" + (f", or one of {groups}" if groups else ""))
    rows = {f"--{key} {default_of(keys[key])}".rstrip(): keys[key].help for key in wanted}
    return "\n".join([*table(rows), ""])


def default_of(action: Action) -> str:
    """The default of a key, if it is short."""
    if isinstance(action.default, str):
        return action.default
    return json.dumps(action.default) if isinstance(action.default, int | float | None) else ""


def first_sentences(rows: Mapping[str, Any]) -> dict[str, str]:
    """The rows of a table, each with the first sentence of its text."""
    return {name: re.split(r"(?<=\.)\s", " ".join(str(text).split()))[0] for name, text in rows.items()}


def table(rows: Mapping[str, Any]) -> list[str]:
    """Lines of two columns, of which the second is wrapped."""
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    left = max(map(len, rows)) + 4
    lines: list[str] = []
    for name, text in rows.items():
        wrapped = textwrap.wrap(" ".join(str(text).split()), width - left) or [""]
        lines.append(f"  {name}".ljust(left) + wrapped[0])
        lines += [" " * left + line for line in wrapped[1:]]
    return lines
