"""Build Gymnasium vector environments with flat observations from a configuration, and save and restore their state."""

from __future__ import annotations

import difflib
import importlib.util
import multiprocessing
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation as FlattenOne
from gymnasium.wrappers import FrameStackObservation, NormalizeReward, RecordVideo
from gymnasium.wrappers import NormalizeObservation as NormalizeOne
from gymnasium.wrappers import TransformObservation as TransformOne
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import (
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TransformObservation,
    TransformReward,
)

from tokencredit.control.environment_wrappers import (
    AgreedSteps,
    NormalizeAllObservations,
    ReplayWrapper,
    ScaleReward,
    gather_copies,
    to_space,
)
from tokencredit.distributed.processes import Processes, restored
from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import Part, describe, is_users
from tokencredit.settings.control import ControlConfig, EnvConfig
from tokencredit.user_code.user_objects import described

EXPECTED_WARNINGS = (
    "ERROR: ",
    "precision lowered by casting to float32",
    "Overwriting existing videos",
    ".* is deprecated and will be removed",
)
"""Prefixes of warnings about intended behaviour, or that repeat an exception."""


PACKAGES = {
    "ALE": ("ale-py", "ale_py"),
    "MiniGrid": ("minigrid", "minigrid"),
    "BabyAI": ("minigrid", "minigrid"),
    "dm_control": ("shimmy[dm-control]", "shimmy"),
}
"""Packages of environments and the modules that register them, by the first part of an id."""


def make_envs(
    args: EnvConfig,
    number: int,
    gamma: float,
    *,
    stack: int = 1,
    training: bool = True,
    render: bool = False,
    videos: Path | None = None,
    prefix: str = "",
    processes: Processes | None = None,
) -> VectorEnv:
    """Copies of the environment that reset on the step after an episode's end, which is Gymnasium's default.

    `stack` observations are stacked, the oldest first; an episode's first one is repeated. Without `training` there are
    no reward normalisation and no worker processes. With `render` the copies give pictures. Statistics are those of the
    copies of all `processes`.

    Raises:
        ConfigError: unknown environment, missing dependency, or unsupported observation space.
    """
    layers: list[Callable[[gym.Env], gym.Env]] = [_ignore_sigint, _refuse_statistics]
    options: dict[str, Any] = {}
    if render or videos is not None:
        options["render_mode"] = "rgb_array"
    if videos is not None:
        recording: dict[str, Any] = {"video_folder": str(videos), "name_prefix": prefix}
        layers.append(partial(RecordVideo, **recording | {"episode_trigger": lambda _: True}))
    if stack > 1:
        layers += [_flatten, partial(FrameStackObservation, stack_size=stack)]
    layers.append(ReplayWrapper)
    mode = "async" if args.processes and training else "sync"
    # No copies: callers copy the observations that they keep.
    options["vector_kwargs"] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "copy": False}
    envs = make_copies(args, num_envs=number, vectorization_mode=mode, wrappers=layers, **options)
    if not _numeric(space := envs.single_observation_space):
        envs.close()
        raise ConfigError(
            f"env.id: its observations are {space}; Box, Discrete, MultiDiscrete and MultiBinary are supported, and "
            "Dict and Tuple of them; leave out others by a wrapper, such as gymnasium.wrappers.FilterObservation"
        )
    return wrap_envs(envs, args, gamma, training, processes)


def _numeric(space: spaces.Space[Any]) -> bool:
    """True for a space whose flat form is numbers."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(map(_numeric, space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def wrap_envs(
    envs: VectorEnv, args: EnvConfig, gamma: float, training: bool, processes: Processes | None = None
) -> VectorEnv:
    """Add the vector wrappers: episode statistics, flat float32 observations, and normalisation if it is set."""
    several = processes if processes is not None and processes.count > 1 else None
    gather = partial(gather_copies, several) if several else None
    if several and (args.normalize_observations or args.normalize_rewards):
        envs = AgreedSteps(envs, several)
    envs = RecordEpisodeStatistics(envs, buffer_length=1)
    if not isinstance(envs.single_observation_space, spaces.Box) or len(envs.single_observation_space.shape) != 1:
        envs = FlattenObservation(envs)
    if envs.single_observation_space.dtype != np.float32:
        envs = DtypeObservation(envs, np.float32)
    if args.normalize_observations:
        envs = NormalizeAllObservations(envs, gather)
        envs = TransformObservation(envs, lambda x: np.clip(x, -args.clip, args.clip).astype(np.float32))
    if args.normalize_rewards and training:
        envs = ScaleReward(envs, gamma, gather)
        envs = TransformReward(envs, lambda x: np.clip(x, -args.clip, args.clip))
    return envs


def make_copies(args: EnvConfig, **options: Any) -> VectorEnv:
    """Call `gymnasium.make_vec`; turns its errors, and those of user code, into a `ConfigError`."""
    module, colon, _ = args.id.rpartition(":")
    if module.endswith(".py"):
        name = args.id.replace(module, module.removesuffix(".py").removeprefix("./").replace("/", "."))
        raise ConfigError(f"env.id is {args.id!r}; it names a module, not a file: give {name}")
    made = f"env.id {args.id!r} cannot be made with env.kwargs {args.kwargs}"
    try:
        with current_folder(), restored():
            return gym.make_vec(args.id, **options, **args.kwargs)
    except ConfigError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env.id {args.id!r}: {error}") from error  # which names the package
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv, gym.error.VersionNotFound) as error:
        why = f"; importing {module} registers no such id" if colon else ""
        raise ConfigError(f"env.id is {args.id!r}, which is not registered{why}{_registered_by(args.id)}") from error
    except ImportError as error:
        stem = args.id.rpartition("-v")[0]
        versions = [spec for spec in gym.registry.values() if f"-v{spec.version}" == spec.id.removeprefix(stem)]
        newest = max(versions, key=lambda spec: spec.version or 0).id if versions else args.id
        hint = f"; its newest version is {newest}" if newest != args.id else ""
        raise ConfigError(f"env.id is {args.id!r}: {error}{hint}") from error
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(f"{made}: {error}") from error
    except (Exception, SystemExit) as error:  # the environment's own
        raise ConfigError(f"{made}: it {described(error)}") from error


@contextmanager
def current_folder() -> Iterator[None]:
    """A context in which modules of the current folder are found, after all others."""
    before = list(sys.path)
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _registered_by(name: str) -> str:
    """The package that registers an environment of this name, or similar names."""
    package, module = PACKAGES.get(re.split("[/-]", name)[0], ("", ""))
    if package:
        return f"; it is of the package {package}: pip install {package}, and give env.id {module}:{name}"
    module, colon, own = name.rpartition(":")
    near = ", ".join(module + colon + other for other in difflib.get_close_matches(own, gym.registry, n=3))
    hint = "" if colon else "give env.id module:ID, so that the module that registers it is imported"
    if near:
        return f"; did you mean {near}?{f' For one of your own {hint}' * bool(hint)}"
    return f"; {hint}" * bool(hint)


def _refuse_statistics(env: gym.Env) -> gym.Env:
    """Refuse wrappers whose running statistics belong to one copy."""
    layer = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, NormalizeOne | NormalizeReward):
            key = "env.normalize_observations" if isinstance(layer, NormalizeOne) else "env.normalize_rewards"
            raise ConfigError(
                f"env.id: the environment has the wrapper {type(layer).__name__}, whose statistics evaluations and "
                f"resumed runs would begin anew; leave it out, and set {key}: true"
            )
        layer = layer.env
    return env


def registered_code(name: str) -> Any:
    """The user's class or function that makes the environment of an id; None for a package's, or if it fails."""
    module, _, own = name.rpartition(":")
    with current_folder(), suppress(Exception):  # making the environment reports it
        if module:
            importlib.import_module(module)
        return users_code(gym.spec(own))
    return None


def environment_part(envs: VectorEnv) -> Part | None:
    """The description of the user's class or function that made the environments; None for a package's."""
    spec = base_env(envs).spec
    code = None if spec is None else users_code(spec)
    return None if code is None else describe(code)


def users_code(spec: EnvSpec) -> Any:
    """The user's class or function that makes an environment; None for a package's."""
    entry: Any = spec.entry_point
    code = load_env_creator(entry) if isinstance(entry, str) else entry
    return code if is_users(code.func if isinstance(code, partial) else code) else None


def _flatten(env: gym.Env) -> gym.Env:
    """Check each observation, and copy it: a stack would hold one array several times, if the environment reuses it."""
    return FlattenOne(TransformOne(env, partial(to_space, env.observation_space), None))


@contextmanager
def expected_warnings(args: EnvConfig) -> Iterator[None]:
    """Silence expected warnings within this context; MuJoCo's messages become warnings, not output and a file."""
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", f".*{message}", UserWarning)
        uses_mujoco = "mujoco" in str(getattr(gym.registry.get(args.id), "entry_point", ""))
        if not uses_mujoco or importlib.util.find_spec("mujoco") is None:  # Gymnasium reports what is missing
            yield
            return
        import mujoco

        before = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(lambda message: warnings.warn(message, UserWarning, stacklevel=2))
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(before)


def save_envs(envs: VectorEnv) -> dict[str, Any]:
    """The replay state of each copy, and the arrays and running statistics of each vector wrapper."""
    return {
        "copies": list(base_env(envs).call("save_state")),
        "layers": [wrapper_state(layer) for layer in vector_wrappers(envs)],
    }


def restore_envs(envs: VectorEnv, state: dict[str, Any]) -> list[int]:
    """Restore the result of `save_envs`; returns the copies that could not be replayed and will be reset.

    Raises:
        ConfigError: a step of processes was interrupted, so that their answers cannot be told apart any more, or they
            have ended.
    """
    try:
        base_env(envs).reset()  # Gymnasium's own notes on which copies to reset in the next step
    except (gym.error.AlreadyPendingCallError, gym.error.ClosedEnvironmentError) as error:
        raise ConfigError("processes of environments were interrupted, or closed; resume with a new trainer") from error
    base_env(envs).set_attr("saved_state", state["copies"])
    lost = [copy for copy, restored in enumerate(base_env(envs).call("restore")) if not restored]
    for layer, saved in zip(vector_wrappers(envs), state["layers"], strict=True):
        for name, value in saved.items():
            if isinstance(value, dict):
                vars(getattr(layer, name)).update(value)
            else:
                setattr(layer, name, value)
                if name.endswith("prev_dones"):
                    value[lost] = True
    return lost


def merged_envs(parts: Sequence[Mapping[str, Any]], share: slice) -> dict[str, Any]:
    """A share of the copies, from the results of `save_envs` in all processes, in their order."""

    def merged(values: Sequence[Any]) -> Any:
        return values[0] if isinstance(values[0], dict) else np.concatenate(values)[share]

    layers = zip(*(part["layers"] for part in parts), strict=True)
    return {
        "copies": [copy for part in parts for copy in part["copies"]][share],
        "layers": [{name: merged([layer[name] for layer in same]) for name in same[0]} for same in layers],
    }


def base_env(envs: VectorEnv) -> SyncVectorEnv | AsyncVectorEnv:
    """The vector environment inside all wrappers; its `call` reaches each copy."""
    return cast("SyncVectorEnv | AsyncVectorEnv", envs.unwrapped)


def vector_wrappers(envs: VectorEnv) -> list[VectorEnv]:
    """The wrappers around all copies that are the same in any number of processes."""
    return [layer for layer in wrappers(envs) if layer is not envs.unwrapped and not isinstance(layer, AgreedSteps)]


def wrapper_state(layer: VectorEnv) -> dict[str, Any]:
    """A wrapper's arrays, and its running statistics as dicts."""
    state: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, np.ndarray):
            state[name] = value.copy()
        elif isinstance(value, RunningMeanStd):
            # Python numbers must stay Python numbers: NumPy's would promote sums with float32 to float64.
            state[name] = {part: np.asarray(x) if isinstance(x, np.generic) else x for part, x in vars(value).items()}
    return state


def _ignore_sigint(env: gym.Env) -> gym.Env:
    """Leave Ctrl-C to the training process, in a worker process."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


def statistics(envs: VectorEnv) -> dict[str, Any]:
    """Running statistics of the normalising wrappers, by name."""
    by_name = {}
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            by_name["observations"] = layer.obs_rms
        if isinstance(layer, ScaleReward):
            by_name["rewards"] = layer.return_rms
    return by_name


def scaled_rewards(rewards: Sequence[float], training: VectorEnv, clip: float) -> np.ndarray:
    """Rewards as training counts them, float64."""
    scaled, scale = np.asarray(rewards, dtype=np.float64), statistics(training).get("rewards")
    return scaled if scale is None else np.clip(scaled / np.sqrt(scale.var + 1e-8), -clip, clip)


def share_statistics(envs: VectorEnv, source: VectorEnv) -> None:
    """Normalise observations with another environment's statistics, without updating them."""
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            layer.obs_rms = statistics(source)["observations"]
            layer.update_running_mean = False


@contextmanager
def evaluation_envs(args: ControlConfig, number: int, training: VectorEnv, **options: Any) -> Iterator[VectorEnv]:
    """Copies of a run's environment, closed at the end, with its training statistics, which they do not change."""
    envs = make_envs(args.env, number, args.advantage.gamma, stack=args.agent.observations(), training=False, **options)
    try:
        share_statistics(envs, training)
        yield envs
    finally:
        envs.close()


def wrappers(envs: VectorEnv) -> Iterator[VectorEnv]:
    """The environment's wrappers from the outside in, then the environment itself."""
    layer: VectorEnv | None = envs
    while layer is not None:
        yield layer
        layer = getattr(layer, "env", None)
