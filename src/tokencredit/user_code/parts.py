"""Load the parts of a run that may be a user's: estimators, losses and critics."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokencredit.core.estimator_table import BOUNDS, INPUTS, parameters_of
from tokencredit.errors import ConfigError, RunStopped, quoted
from tokencredit.learn.objective import Objective
from tokencredit.learn.own_loss import LOSS_INPUTS, LOSS_SETTINGS
from tokencredit.learn.rng import preserved
from tokencredit.provenance.parts import is_users
from tokencredit.runs.checkpoint import as_read
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.model import CriticConfig
from tokencredit.settings.parts import PYTHON, is_own, label_of, name_of
from tokencredit.settings.run_kind import own_parts
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageSettings, PPOSettings
from tokencredit.user_code.user_objects import check_kwargs, load_object, user_code

Advantage = TypeVar("Advantage", bound=AdvantageSettings)
Update = TypeVar("Update", bound=PPOSettings)
Config = TypeVar("Config", bound=PPOConfig | ControlConfig)
AGENT_INPUTS = ("logprobs", "entropy")
"""Inputs of an agent's estimator besides those that every run has."""


def load_part(value: Any, key: str) -> Any:
    """The object of a setting: as it is, or loaded by its name, `path/file.py:name`.

    Raises:
        ConfigError: there is no such object, or it was given from Python, and only its name is known.
    """
    if not isinstance(value, str):
        return value
    if value.startswith(PYTHON):
        name = value.removeprefix(PYTHON)
        group, _, field = key.rpartition(".")
        raise ConfigError(
            f"{key} is {name}, which was given from Python, and a file cannot hold it: give it again, as in "
            f"config.{group}.{field} = {name}, or name its file, {key}: path/file.py:{re.split(r'[ (]', name)[0]}"
        )
    try:
        return load_object(value, "critic" if key == "critic.kind" else key.rpartition(".")[2])
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def loaded_parts(config: PPOConfig | ControlConfig) -> dict[str, Any]:
    """The parts of a user by key, loaded, each with its `kwargs`; raises as `load_part`."""
    loaded = {}
    for key, part in own_parts(config).items():
        kwargs = attrgetter(f"{key.partition('.')[0]}.kwargs")(config)
        loaded[key] = partial(load_part(part, key), **kwargs) if kwargs else load_part(part, key)
    return loaded


def guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function, with copies of its tensors, whose exceptions end the run with a line that names it, file and line.

    `what` begins with the key of the part that has to be mended then. Copies, since a function that works in place
    would change what the run learns from and writes down.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: _copied(value) for name, value in kwargs.items()}
        with user_code(what, what.partition(" ")[0]):
            return function(*args, **kwargs)

    return call


def guarded_class(loss: type[Objective], what: str) -> type[Objective]:
    """A subclass of a user's objective whose own methods are guarded."""
    own = {
        name: guarded(method, what)
        for name, method in inspect.getmembers(loss, inspect.isfunction)
        if is_users(method) and not isinstance(inspect.getattr_static(loss, name), staticmethod)
    }
    return type(loss.__name__, (loss,), {"__module__": loss.__module__, "__qualname__": loss.__qualname__} | own)


def check_fields(loss: type[Objective], name: str, kwargs: Collection[str]) -> None:
    """Raise `ConfigError` for a keyword that is no field of a user's objective, or one that the run gives it."""
    parameters, ours = inspect.signature(loss).parameters.values(), {field.name for field in fields(Objective)}
    taken = [x.name for x in parameters if x.name not in ours]
    others = ours if any(x.kind is x.VAR_KEYWORD for x in parameters) else set(kwargs) - set(taken)
    if other := sorted(others & set(kwargs)):
        raise ConfigError(
            f"ppo.kwargs has {other[0]!r}, which {name} does not take from there; it takes {', '.join(taken) or 'none'}"
        )


def _copied(value: Any) -> Any:
    """A tensor's copy; others, and those of the graph of gradients, as they are."""
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value


def load_loss(args: Update) -> Update:
    """The settings with a policy loss of the user's, a function or a subclass of `Objective`, in place of its name.

    Raises:
        ConfigError: it cannot be loaded, is neither, needs what no loss is given, or ignores a setting.
    """
    if not is_own(args.loss):
        return args
    loss = load_part(args.loss, "ppo.loss")
    name = name_of(loss)
    known = (*LOSS_INPUTS, *LOSS_SETTINGS)
    if isinstance(loss, type) and issubclass(loss, Objective):
        check_fields(loss, name, args.kwargs)
        return replace(args, loss=guarded_class(loss, f"ppo.loss {name}"))
    if not callable(loss) or isinstance(loss, type):
        shown = label_of(args.loss)
        raise ConfigError(f"ppo.loss {shown} is neither a function nor a subclass of Objective (docs/your-own.md)")
    check_kwargs(name, loss, args.kwargs, known, "ppo.kwargs")
    given = partial(loss, **args.kwargs)
    require_known("ppo.loss", "ppo.kwargs", given, name, known)
    for key in ("clip", "clip_high", "dual_clip"):
        if getattr(args, key) != getattr(type(args)(), key) and key.removesuffix("_high") not in parameters_of(given):
            reason = f"which ppo.loss {name} does not read; let it take {key.removesuffix('_high')}, or leave it out"
            raise ConfigError(f"ppo.{key} is {quoted(getattr(args, key))}, {reason}")
    return replace(args, loss=guarded(loss, f"ppo.loss {name}"))


METHODS = ("values", "fit", "state_dict", "load_state_dict")
"""Methods of a critic of the user's."""
CRITIC_READS, FIT_READS = ("mask", "gamma"), ("rewards", "returns", "values")
"""What both methods of a critic may name besides `INPUTS`, and what only `fit` may."""


@dataclass(frozen=True)
class OwnCritic:
    """A critic of the user's: its values of the states before steps, its fit to returns, and its state."""

    values: Callable[..., Tensor]
    fit: Callable[..., None]
    name: str
    """Its name, with the arguments that were given to a class."""
    part: Any
    """The object that is trained: a copy of the user's, if it can be copied."""
    untrained: Callable[[], Any]
    """Makes the object as it was before training; None if it cannot be copied."""

    @property
    def inputs(self) -> set[str]:
        """Names of what its methods read."""
        return {*parameters_of(self.values), *parameters_of(self.fit)}

    def check_state(self, values_of: Callable[[OwnCritic], Tensor]) -> bool:
        """True once it is known that an untrained critic with the state of this one has the same values.

        False while training has changed none. Called after a fit; `values_of` gives a critic's values of one batch.

        Raises:
            RunStopped: its values differ, so that a resumed run would go on with another critic, or no checkpoint can
                hold its state.
        """
        with preserved():
            part = self.untrained()
        if part is None:
            return True
        what = f"critic.kind {self.name}"
        other = replace(self, part=part, values=guarded(part.values, what))
        trained, before = _drawn_alike(values_of, self), _drawn_alike(values_of, other)
        if torch.equal(trained, before):
            return False
        with preserved():
            state = as_read(guarded(self.part.state_dict, what)(), f"{what}: state_dict()")
            guarded(part.load_state_dict, what)(state)
        if not torch.allclose(_drawn_alike(values_of, other), trained, rtol=1e-3, atol=1e-6):
            raise RunStopped(
                f"{what}: a new one that loads its state has other values, so that a resumed run would go on with "
                "another critic; let state_dict() return all that fit changes, and load_state_dict(state) restore it"
            )
        return True


def _drawn_alike(values_of: Callable[[OwnCritic], Tensor], critic: OwnCritic) -> Tensor:
    """A critic's values, with the random numbers that every call has, and none of the run's."""
    with preserved():
        return values_of(critic)


def load_critic(args: CriticConfig, inputs: Collection[str]) -> CriticConfig:
    """The settings with a critic of the user's as an `OwnCritic`, from an object, or a class called with `kwargs`.

    Raises:
        ConfigError: it cannot be loaded or called, lacks one of `METHODS`, or needs what there is not.
    """
    if not is_own(args.kind) or isinstance(args.kind, OwnCritic):
        return args
    part = load_part(args.kind, "critic.kind")
    name = name_of(part)
    if isinstance(part, type):
        check_kwargs(name, part, args.kwargs, key="critic.kwargs")
        name = name_of(partial(part, **args.kwargs))
        untrained = partial(guarded(part, f"critic.kind {name}"), **args.kwargs)
        try:
            part = untrained()
        except RunStopped as error:
            raise ConfigError(str(error)) from error
    else:  # a copy is trained, so that the next run begins with the object as it is
        untrained = partial(_deep_copy, _deep_copy(part))
        part = part if (copied := untrained()) is None else copied
    if missing := [method for method in METHODS if not callable(getattr(part, method, None))]:
        raise ConfigError(f"critic.kind {label_of(args.kind)} has no method {', '.join(missing)} (docs/your-own.md)")
    known = (*CRITIC_READS, *inputs)
    require_known("critic.kind", "critic.kwargs", part.values, f"{name}.values", known)
    require_known("critic.kind", "critic.kwargs", part.fit, f"{name}.fit", (*known, *FIT_READS))
    values, fit = (guarded(method, f"critic.kind {name}") for method in (part.values, part.fit))
    return replace(args, kind=OwnCritic(values, fit, name, part, untrained), kwargs={})


def _deep_copy(part: Any) -> Any:
    """A deep copy; None of what cannot be copied, such as a lock, or a function made in `__init__`, of its object."""
    if any(isinstance(x, FunctionType) and x.__closure__ for x in getattr(part, "__dict__", {}).values()):
        return None
    try:
        return copy.deepcopy(part)
    except Exception:  # of the user's code
        return None


def load_parts(args: Config) -> Config:
    """The configuration with a user's parts in place of their names; raises `ConfigError` for one that cannot work."""
    if isinstance(args, ControlConfig):
        return replace(args, advantage=load_estimator(args.advantage, AGENT_INPUTS), ppo=load_loss(args.ppo))
    inputs = inputs_of(args)
    critic = load_critic(args.critic, [name for name in inputs if name in INPUTS])
    return replace(args, critic=critic, advantage=load_estimator(args.advantage, inputs), ppo=load_loss(args.ppo))


def inputs_of(args: PPOConfig) -> list[str]:
    """What a run of texts can give an estimator besides rewards, values, bounds and settings."""
    absent = ["ref_logprobs"] * (args.kl.coef == 0)
    absent += ["token_ids", "prefix_scores"] * (args.advantage.unit == "turn")
    return [name for name in (*INPUTS, "group_size", "baseline") if name not in absent]


def read_by_parts(args: PPOConfig) -> set[str]:
    """Names of the inputs that an estimator and a critic of the user's read."""
    critic = args.critic.kind
    return {*args.advantage.reads().inputs, *(critic.inputs if isinstance(critic, OwnCritic) else ())}


def require_known(key: str, kwargs: str, function: Callable[..., Any], name: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a parameter without a default that is none of the `known` ones."""
    for parameter in parameters_of(function).values():
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and (parameter.name not in known or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"{key} {name} needs {parameter.name}, which this run does not have; it may name {', '.join(known)}, "
                f"or give {kwargs}"
            )


def load_estimator(args: Advantage, inputs: Collection[str]) -> Advantage:
    """The settings with the function of an estimator of the user's in place of its name; others as they are.

    `inputs` are what this kind of run can give besides rewards, values, bounds and settings.

    Raises:
        ConfigError: it cannot be loaded, is no function, or needs what there is not.
    """
    if not is_own(args.estimator):
        return args
    function = load_part(args.estimator, "advantage.estimator")
    name = name_of(function)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"advantage.estimator {label_of(args.estimator)} is not a function (docs/your-own.md)")
    check_kwargs(name, function, args.kwargs, (), "advantage.kwargs")
    if args.kwargs:
        function = partial(function, **args.kwargs)
    settings = args.options()
    known = ("rewards", "values", *BOUNDS, *settings, *inputs)
    require_known("advantage.estimator", "advantage.kwargs", function, name, known)
    for setting in (x for x in parameters_of(function).values() if x.name in settings):
        value = settings[setting.name]
        if setting.default is not setting.empty and repr(setting.default) != repr(value):
            raise ConfigError(
                f"advantage.estimator {name} gives {setting.name} the default {setting.default!r}, which the setting "
                f"advantage.{setting.name}, {value!r}, would replace; leave the default out, or rename the parameter"
            )
    return replace(args, estimator=guarded(function, f"advantage.estimator {name}"), kwargs={})
