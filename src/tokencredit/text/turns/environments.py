"""The environments of a run: loaded from settings or Python, with an episode for each completion."""

from __future__ import annotations

import copy
import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

from tokencredit.errors import ConfigError, naming
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.text.rewards.calls import Term
from tokencredit.text.turns.protocols.episode import Episode
from tokencredit.text.turns.protocols.factories import Factory, Instance, NoEnvironment, inspect_factory, own_reward
from tokencredit.text.turns.protocols.step_episode import StepEpisode
from tokencredit.text.turns.protocols.tool_episode import ToolEpisode
from tokencredit.user_code.user_objects import check_kwargs, load_object
from tokencredit.user_code.workers import Workers

BUILT_IN = {
    "builtin:grid": "tokencredit.text.turns.builtin.grid:Grid",
    "builtin:calculator": "tokencredit.text.turns.builtin.calculator:Calculator",
}
"""The environments that come with the package."""
ADAPTERS = {
    "reasoning_gym": "tokencredit.text.turns.builtin.reasoning_gym:ReasoningGym",
    "gymnasium": "tokencredit.text.turns.builtin.gymnasium:Gymnasium",
    "openenv": "tokencredit.text.turns.builtin.openenv:OpenEnv",
}
"""Classes that make environments of other packages, by prefix of `env.factory`; the rest is their first argument."""
COLUMN = "environment"
"""Column that selects one of several factories by name."""


class Environments:
    """Factories of environments and functions; makes episodes of them."""

    def __init__(
        self,
        config: EnvironmentConfig,
        factories: Mapping[str | None, Callable[[], Any]],
        functions: Sequence[Callable[..., Any]],
        label: str,
    ):
        """Create one environment per factory, to read its tools.

        One factory alone has the name None; `NoEnvironment` is that of functions, the tools of all episodes, alone.
        `label` is the setting or argument that the factories come from, in messages.
        """
        self._config, self._workers = config, Workers()
        self.factories: dict[str | None, Factory] = {}
        self._free: dict[str, list[Instance]] = {}
        """Environments that no episode uses, by their factory's label, in the order of their creation."""
        self._numbers, self._lock = count(), threading.Lock()
        for name, create in factories.items():
            named = label if name is None else f"{label}[{name!r}]"
            factory = inspect_factory(named, create, functions, self._workers, config.timeout)
            first = self._instance(factory)
            first.value = factory.first
            self.factories[name], self._free[named] = factory, [first]
        kinds = [kind.__name__ for kind in dict.fromkeys(factory.kind for factory in self.factories.values())]
        if twice := [name for name, count in Counter(kinds).items() if count > 1]:
            raise ConfigError(f"{label} has two classes named {twice[0]!r}, and so would their rewards; rename one")
        tools: dict[str, Callable[..., Any]] = {}
        for factory in self.factories.values():
            tools |= factory.callables(factory.first)
        self.tools = list(tools.values())
        """All tools that some episode has, for a check of the chat template."""
        self._only_functions = factories.get(None) is NoEnvironment
        self.name = ", ".join(tools if self._only_functions else kinds)
        """Names of the classes; without any, of the functions."""

    def check_columns(self, columns: Collection[str], environments: Iterable[Any] = ()) -> None:
        """Check, before the first episode, that environments take the rows.

        `columns` are those that `begin` will get, `environments` the values of the column `environment`.
        """
        if self._only_functions and "prompt" not in columns:
            raise ConfigError(
                f"the tools {self.name} are given without prompts and without an environment; give prompts"
            )
        if None not in self.factories:
            if COLUMN not in columns:
                raise ConfigError(
                    f"there are several environments, {', '.join(map(str, self.factories))}, and the data set has no "
                    f"column {COLUMN!r} that selects one by name"
                )
            for name in environments:
                self._factory(name)
            columns = [column for column in columns if column != COLUMN]
        for factory in self.factories.values():
            factory.check_columns(columns)

    def begin(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Episode]:
        """One episode per row, each with an environment of its own until `release`; from any thread.

        A row holds the data set's columns, with the prompt, if there is one, as `prompt`. Its seed is used if it has no
        column `seed`. The completions of a group have equal rows and seeds.
        """
        with self._lock:
            return [self._episode(row, seed) for row, seed in zip(rows, seeds, strict=True)]

    def repeat(self, episodes: Iterable[Episode]) -> list[Episode]:
        """New episodes with the rows and seeds of these, each with an environment of its own until `release`."""
        with self._lock:
            return [self._begin(episode.instance.factory, episode.row) for episode in episodes]

    def release(self, episodes: Iterable[Episode]) -> None:
        """Let later episodes use the environments of these, which are over and scored, perhaps not for the first time.

        Those of a batch that is dropped are not released: a call of theirs may go on.
        """
        with self._lock:
            for instance in (episode.instance for episode in episodes if episode.instance.user is episode):
                free = self._free[instance.factory.label]
                if instance not in free:
                    insort(free, instance, key=attrgetter("number"))

    def require(self, episodes: Iterable[Episode]) -> None:
        """Raise `ConfigError` if an environment of these episodes is in the state of a later one."""
        if any(episode.instance.user is not episode for episode in episodes):
            raise ConfigError(
                "these episodes cannot be scored again, since later ones have their environments: give learn the batch "
                "that score returned, before another batch is sampled"
            )

    def terms(self) -> list[Term]:
        """The environments' own rewards, as reward terms named after their classes, with weight 1."""
        paying = {factory.kind: factory for factory in self.factories.values() if factory.pays}
        return [own_reward(factory, self._workers, self._config.timeout) for factory in paying.values()]

    def _episode(self, row: Mapping[str, Any], seed: int) -> Episode:
        name = None if None in self.factories else row.get(COLUMN)
        factory = self._factory(name)
        arguments = {key: value for key, value in row.items() if name is None or key != COLUMN}
        if factory.steps or factory.takes_seed():
            arguments = {"seed": seed, **arguments}
        return self._begin(factory, arguments)

    def _begin(self, factory: Factory, arguments: Mapping[str, Any]) -> Episode:
        free = self._free[factory.label]
        instance = free.pop(0) if free else self._instance(factory)
        kind = StepEpisode if factory.steps else ToolEpisode
        instance.user = episode = kind(instance, arguments, self._config.observation_tokens)
        return episode

    def _factory(self, name: Any) -> Factory:
        if not isinstance(name, str | None) or name not in self.factories:
            known = ", ".join(repr(known) for known in self.factories)
            raise ConfigError(f"the column {COLUMN!r} is {name!r}; it must be one of {known}")
        return self.factories[name]

    def _instance(self, factory: Factory) -> Instance:
        return Instance(factory, self._workers, self._config.timeout, next(self._numbers))


def load_environments(
    config: EnvironmentConfig,
    tools: Sequence[str],
    *,
    factory: Any = None,
    functions: Sequence[Callable[..., Any]] | None = None,
) -> Environments:
    """Load environments and the tools of the setting `tools`, and create one environment per factory.

    `factory` and `functions` are the arguments `environment_factory` and `tools` of `PPOTrainer`, in place of those of
    the settings. `ConfigError`: one of them cannot be loaded or used, or is given twice.
    """
    if factory is not None and config.factory is not None:
        raise ConfigError("environment_factory and env.factory are both given; leave one of them out")
    if functions is not None and tools:
        raise ConfigError("tools are given as an argument and as a setting; leave one of them out")
    if functions is not None and not isinstance(functions, list | tuple):
        raise ConfigError(f"tools is {functions!r:.200}; it must be a list of functions")
    loaded = [*(functions or ()), *load_tools(tools)]
    label, factory = load_factory(config) if factory is None else ("environment_factory", factory)
    if factory == {}:
        raise ConfigError(f"{label} is an empty dict; give at least one environment")
    if not isinstance(factory, dict):
        return Environments(config, {None: NoEnvironment if factory is None else factory}, loaded, label)
    if wrong := [name for name in factory if not isinstance(name, str)]:
        raise ConfigError(f"{label} has the name {wrong[0]!r}; names of environments must be texts")
    return Environments(config, factory, loaded, label)


def load_tools(tools: Sequence[str]) -> list[Any]:
    """The functions of the setting `tools`; `ConfigError` names the key of one that cannot be loaded."""
    loaded = []
    for number, spec in enumerate(tools):
        with naming(f"tools[{number}]"):
            loaded.append(load_object(spec, "tool"))
    return loaded


def load_factory(config: EnvironmentConfig) -> tuple[str, Any]:
    """The setting that names an environment, and its factory with the settings' arguments; None if there is none."""
    if config.factory is None:
        return "env", None
    label = f"env.factory {config.factory}"
    package, _, name = config.factory.partition(":")
    if package in ADAPTERS:
        return label, _with_copies(partial(load_object(ADAPTERS[package], "environment"), name), config.kwargs)
    with naming(label):
        if ":" not in config.factory or (config.factory.startswith("builtin:") and config.factory not in BUILT_IN):
            raise ConfigError(f"it must be one of {', '.join(BUILT_IN)}, 'pkg.module:name' or 'path/file.py:name'")
        create = load_object(BUILT_IN.get(config.factory, config.factory), "environment")
        if not config.kwargs:
            return label, create
        if not callable(create):
            raise ConfigError("env.kwargs is given, and this takes no arguments; leave it out")
        check_kwargs(config.factory, create, config.kwargs)
    return label, _with_copies(create, config.kwargs)


def _with_copies(create: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """Create environments, each with its own copy of the arguments, which it may change; some objects have none."""

    def copied(value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception:  # of a lock or a client, say
            return value

    return lambda: create(**{name: copied(value) for name, value in kwargs.items()})
