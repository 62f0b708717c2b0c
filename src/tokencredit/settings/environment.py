"""Settings of environments and tools: episodes of several turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import setting

SOURCES = ("factory", "reasoning_gym", "gymnasium", "openenv")
"""Settings that name an environment; at most one is given."""
SEVERAL = " or ".join((*(f"env.{name}" for name in SOURCES), "tools", "environment_factory"))
"""The condition that episodes have several turns."""


@dataclass
class EnvironmentConfig:
    """Environment that answers the policy's turns (docs/turns.md); without one, and without `tools`, a completion is
    one turn."""

    factory: str | None = None
    """Environment class, or function that returns an environment: `pkg.module:MyEnv`, `path/file.py:MyEnv`,
    `builtin:grid` or `builtin:calculator`."""
    reasoning_gym: str | None = None
    """Data set of reasoning-gym by name, such as `chain_sum`: a question per episode, scored by its verifier."""
    gymnasium: str | None = None
    """Text-like environment of Gymnasium by id, such as `FrozenLake-v1`."""
    openenv: str | None = None
    """Address of an OpenEnv server, such as `http://localhost:8000`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory or of the data set."""
    max_turns: int = setting(8, needs=SEVERAL, at_least=1)
    """Most turns of the policy per episode; an episode that is not done by then is truncated."""
    turn_tokens: int | None = setting(None, needs=SEVERAL, at_least=1)
    """Longest turn of the policy, in tokens; null for what is left of rollout.max_new_tokens, which counts all tokens
    after the prompt, observations included."""
    observation_tokens: int = setting(512, needs=SEVERAL, at_least=1)
    """Longest observation, in tokens; a longer one is cut and says so."""
    timeout: float = setting(30.0, needs=SEVERAL, above=0)
    """Timeout of a call of an environment or tool, in seconds; the observation then says so."""

    def check(self) -> None:
        """Raise `ConfigError` for several environments, or arguments of none."""
        given = [f"env.{name}" for name in SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given; an episode has one environment, leave the others out")
        if self.kwargs and not given:
            names = ", ".join(f"env.{name}" for name in SOURCES)
            raise ConfigError(f"env.kwargs is given without an environment; give one of {names}, or leave it out")

    def with_limits_of(self, run: EnvironmentConfig) -> EnvironmentConfig:
        """This environment with the limits of a run in place of those that are defaults."""
        default = EnvironmentConfig()
        limits = {name: x for name, x in vars(run).items() if name not in (*SOURCES, "kwargs")}
        return replace(self, **{name: x for name, x in limits.items() if getattr(self, name) == getattr(default, name)})

    def given(self) -> bool:
        """True if an environment is named."""
        return any(getattr(self, name) is not None for name in SOURCES)
