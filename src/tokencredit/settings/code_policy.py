"""Code that is neither Tokencredit's nor its libraries', and that a configuration can let run."""

from __future__ import annotations

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.text import PPOConfig


def foreign_code(config: PPOConfig | ControlConfig) -> list[str]:
    """What such code a run of this configuration lets run: a line each, which begins with the key; most have none."""
    if isinstance(config, ControlConfig):
        module, colon, _ = config.env.id.rpartition(":")
        return [f"env.id imports the module {module}"] if colon else []
    lines = [
        f"reward[{number}].function runs {term.function}"
        for number, term in enumerate(config.reward)
        if term.function is not None and ":" in term.function  # a ready-made one has a bare name
    ]
    if config.model.trust_remote_code:
        names = [config.model.name] + [config.model.critic_name] * (config.model.critic_name is not None)
        lines.append(f"model.trust_remote_code runs the code, if there is any, in {' and '.join(names)}")
    return lines


def refuse_foreign_code(config: PPOConfig | ControlConfig) -> None:
    """Raise `ConfigError` if a run of this configuration would let such code run."""
    if found := foreign_code(config):
        raise ConfigError(f"--no-code refuses what the configuration asks for: {'; '.join(found)}")
