"""User code that a configuration would execute, and `--no-code`."""

from __future__ import annotations

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import FunctionTerm
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.text import PPOConfig


def foreign_code(config: PPOConfig | ControlConfig | OfflineSettings) -> list[str]:
    """Lines on the user code that a run of this configuration executes, each beginning with its key."""
    if isinstance(config, ControlConfig):
        module, colon, _ = config.env.id.rpartition(":")
        return [f"env.id imports the module {module}"] if colon else []
    if isinstance(config, OfflineSettings):
        name = config.model.name
        return [f"model.trust_remote_code runs the code, if there is any, in {name}"] * config.model.trust_remote_code
    lines = [
        f"reward[{number}].function runs {term.function}"
        for number, term in enumerate(config.reward)
        if isinstance(term, FunctionTerm) and ":" in term.function  # a built-in one has a bare name
    ]
    env = config.env
    if env.factory is not None and not env.factory.startswith("builtin:"):
        lines.append(f"env.factory runs {env.factory}")
    if env.gymnasium is not None and ":" in env.gymnasium:
        lines.append(f"env.gymnasium imports the module {env.gymnasium.rpartition(':')[0]}")
    lines += [f"tools[{number}] runs {tool}" for number, tool in enumerate(config.tools)]
    if config.model.trust_remote_code:
        names = [name for name in (config.model.name, config.critic.name) if name is not None]
        lines.append(f"model.trust_remote_code runs the code, if there is any, in {' and '.join(names)}")
    return lines


def refuse_foreign_code(config: PPOConfig | ControlConfig | OfflineSettings) -> None:
    """Raise `ConfigError` if a run of this configuration would execute user code."""
    if lines := foreign_code(config):
        raise ConfigError(f"--no-code, but the configuration executes user code: {'; '.join(lines)}")
