"""Gymnasium's vector environments, made as a configuration asks, with flat observations."""

from __future__ import annotations

import difflib
import importlib.util
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation as FlattenOne
from gymnasium.wrappers import FrameStackObservation, RecordVideo
from gymnasium.wrappers.utils import RunningMeanStd
from gymnasium.wrappers.vector import (
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TransformObservation,
    TransformReward,
)

from tokencredit.control.reward_scale import ScaleReward
from tokencredit.errors import ConfigError
from tokencredit.settings.control import EnvConfig

EXPECTED = (
    "ERROR: ",
    "precision lowered by casting to float32",
    "Overwriting existing videos",
    ".* is deprecated and will be removed",
)
"""Beginnings of warnings about what is meant so, or what an exception says again."""


LONGEST = 100_000
"""Steps of an episode that are remembered; one that is longer begins anew when a run is resumed."""


class EnvironmentRaised(RuntimeError):
    """An exception of an environment's own, as text, since it may come from another process."""


class Witness(gym.Wrapper):
    """The outermost wrapper of one environment: knows how it came to be where it is.

    So it can say which environment raised an exception, when and where; and, since no environment can be saved as it
    is, lead another one there: to the randomness that its episode began with, and on through the episode's actions.

    It keeps back `info`, which nobody here reads: to gather a few numbers of MuJoCo's from all copies at each step
    takes as long as the step itself.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.seed: int | None = None
        self.steps = 0
        self.began: dict[str, Any] = {}
        self.actions: list[Any] = []
        self.observation: Any = None
        self.ended = self.must_reset = False
        self.trail: dict[str, Any] = {}
        """Where `follow` leads."""

    def leave_trail(self) -> dict[str, Any]:
        """What `follow` needs to come here."""
        if self.ended:  # all that is left of it is the randomness of the episodes to come
            return {"seed": self.seed, "ended": True, "began": self._beginning(None)}
        here = {"steps": self.steps, "observation": self.flat_observation()}
        return {"seed": self.seed, "ended": False, "began": self.began, "actions": np.array(self.actions)} | here

    def follow(self) -> bool:
        """Go where `trail` leads; False if that failed. The next step is then a reset, as after an episode's end."""
        trail, began = self.trail, self.trail["began"]
        self.must_reset = True
        if began["seed"] is None and began["random"] is None:
            return False
        if began["random"] is not None:
            self.unwrapped.np_random.bit_generator.state = began["random"]
        if trail["ended"]:
            self.seed = trail["seed"]
            return True
        self.reset(seed=began["seed"])
        for action in trail["actions"]:
            self.step(action)
        self.seed = trail["seed"]
        self.must_reset = not (
            self.steps == trail["steps"] and np.array_equal(self.flat_observation(), trail["observation"])
        )
        return not self.must_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, and remember the seed that the environment's randomness goes back to."""
        self.seed, self.steps = self.seed if seed is None else seed, 0
        self.began, self.actions, self.ended, self.must_reset = self._beginning(seed), [], False, False
        try:
            self.observation, _ = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._raised(error) from None
        return self.observation, {}

    def step(self, action: Any) -> Any:
        """Step, and count."""
        if self.must_reset:
            return self.reset()[0], 0.0, False, False, {}
        self.steps += 1
        if self.steps <= LONGEST:
            self.actions.append(action)
        try:
            self.observation, reward, terminated, truncated, _ = self.env.step(action)
        except Exception as error:
            raise self._raised(error) from None
        self.ended = bool(terminated or truncated)
        return self.observation, reward, terminated, truncated, {}

    def _beginning(self, seed: int | None) -> dict[str, Any]:
        """What decides the episode that a reset with this seed would begin now."""
        generator = getattr(self.unwrapped, "np_random", None)
        state = generator.bit_generator.state if seed is None and isinstance(generator, np.random.Generator) else None
        return {"seed": seed, "random": state}

    def flat_observation(self) -> np.ndarray:
        """The last observation in one row."""
        return np.asarray(spaces.flatten(self.env.observation_space, self.observation))

    def _raised(self, error: Exception) -> EnvironmentRaised:
        return EnvironmentRaised(
            f"the environment with seed {self.seed} raised {type(error).__name__}: {error}, in step {self.steps} "
            f"of an episode\n{traceback.format_exc().rstrip()}"
        )


def make_envs(
    args: EnvConfig,
    number: int,
    gamma: float,
    *,
    stack: int = 1,
    training: bool = True,
    videos: Path | None = None,
    prefix: str = "",
) -> VectorEnv:
    """Copies of the environment that reset on the step after an episode's end, which is Gymnasium's default.

    Inside out: the episodes' own returns are recorded, observations become flat float32, and observations and rewards
    are normalised if asked for, rewards only in training.

    Args:
        args: which environment, and how.
        number: of copies.
        gamma: of the discounted return whose deviation rewards are divided by.
        stack: how many of the last observations are one, the oldest first; an episode's first one is repeated.
        training: whether rewards are normalised, and processes used.
        videos: the folder in which every episode is recorded; None records none.
        prefix: of the videos' names.

    Raises:
        ConfigError: no such environment, something that it needs is missing, or observations that are not supported.
    """
    layers: list[Callable[[gym.Env], gym.Env]] = [deaf_to_ctrl_c]
    rendered = {}
    if videos is not None:
        rendered = {"render_mode": "rgb_array"}
        layers.append(
            partial(RecordVideo, video_folder=str(videos), name_prefix=prefix, episode_trigger=lambda _: True)
        )
    if stack > 1:
        layers += [flat, partial(FrameStackObservation, stack_size=stack)]
    layers.append(Witness)
    envs = make_copies(
        args,
        num_envs=number,
        vectorization_mode="async" if args.processes and training else "sync",
        # Whoever steps them copies the observations that it keeps.
        vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP, "copy": False},
        wrappers=layers,
        **rendered,
    )
    if not isinstance(envs.single_observation_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.Dict):
        envs.close()
        raise ConfigError(
            f"env.id: its observations are {envs.single_observation_space}; "
            "Box, Discrete, MultiDiscrete and Dict are supported"
        )
    return wrapped(envs, args, gamma, training)


def wrapped(envs: VectorEnv, args: EnvConfig, gamma: float, training: bool) -> VectorEnv:
    """The wrappers around all copies: episodes' returns, flat float32 observations, normalisation if asked for."""
    envs = RecordEpisodeStatistics(envs, buffer_length=1)
    if not isinstance(envs.single_observation_space, spaces.Box) or len(envs.single_observation_space.shape) != 1:
        envs = FlattenObservation(envs)
    if envs.single_observation_space.dtype != np.float32:
        envs = DtypeObservation(envs, np.float32)
    if args.normalize_observations:
        envs = NormalizeObservation(envs)
        envs = TransformObservation(envs, lambda x: np.clip(x, -args.clip, args.clip).astype(np.float32))
    if args.normalize_rewards and training:
        envs = ScaleReward(envs, gamma=gamma)
        envs = TransformReward(envs, lambda x: np.clip(x, -args.clip, args.clip))
    return envs


def make_copies(args: EnvConfig, **options: Any) -> VectorEnv:
    """What `gymnasium.make_vec` makes of the environment with these options, or a `ConfigError` that says why not."""
    try:
        return gym.make_vec(args.id, **options, **args.kwargs)
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env.id {args.id} needs what is not installed ({error}): pip install tokencredit[control]"
        ) from error
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv, gym.error.VersionNotFound) as error:
        near = difflib.get_close_matches(args.id, gym.registry, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"env.id is {args.id!r}, which is not registered{hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id is {args.id!r}: {error}") from error
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(
            f"env.id is {args.id!r}, which cannot be made with env.kwargs {args.kwargs}: {error}"
        ) from error


def flat(env: gym.Env) -> gym.Env:
    """The environment with observations in one row."""
    space = env.observation_space
    return env if isinstance(space, spaces.Box) and len(space.shape) == 1 else FlattenOne(env)


@contextmanager
def expected_warnings(args: EnvConfig) -> Iterator[None]:
    """Silence the warnings of Gymnasium and MuJoCo that are no news, in here alone.

    MuJoCo's messages become Python's warnings, instead of lines on the screen and in a file.
    """
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", f".*{message}", UserWarning)
        uses_mujoco = "mujoco" in str(getattr(gym.registry.get(args.id), "entry_point", ""))
        if not uses_mujoco or importlib.util.find_spec("mujoco") is None:  # Gymnasium says what is missing
            yield
            return
        import mujoco

        before = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(lambda message: warnings.warn(message, UserWarning, stacklevel=2))
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(before)


def leave_trails(envs: VectorEnv) -> dict[str, Any]:
    """What `follow_trails` needs to bring other copies of these environments where they are: plain values and arrays.

    Of each copy its trail, and of each wrapper around all of them the arrays and running statistics that it holds.
    """
    return {
        "copies": list(copies(envs).call("leave_trail")),
        "layers": [memory(layer) for layer in vector_layers(envs)],
    }


def follow_trails(envs: VectorEnv, trails: dict[str, Any]) -> list[int]:
    """Bring environments where others were; returns the copies that cannot be brought there, and will be reset."""
    copies(envs).set_attr("trail", trails["copies"])
    lost = [copy for copy, arrived in enumerate(copies(envs).call("follow")) if not arrived]
    for layer, remembered in zip(vector_layers(envs), trails["layers"], strict=True):
        for name, value in remembered.items():
            if isinstance(value, dict):
                vars(getattr(layer, name)).update(value)
            else:
                setattr(layer, name, value)
                if name.endswith("prev_dones"):
                    value[lost] = True
    return lost


def copies(envs: VectorEnv) -> SyncVectorEnv | AsyncVectorEnv:
    """The vector environment inside all wrappers, whose `call` reaches each copy."""
    inner = envs.unwrapped
    assert isinstance(inner, SyncVectorEnv | AsyncVectorEnv)  # the two that `make_copies` makes
    return inner


def vector_layers(envs: VectorEnv) -> list[VectorEnv]:
    """The wrappers around all copies."""
    return [layer for layer in wrappers(envs) if layer is not envs.unwrapped]


def memory(layer: VectorEnv) -> dict[str, Any]:
    """The arrays that a wrapper holds itself, and what its running statistics hold, each a dict."""
    held: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, np.ndarray):
            held[name] = value
        elif isinstance(value, RunningMeanStd):
            # A number of Python's must stay one: with one of NumPy's, sums with float32 would become float64.
            held[name] = {part: np.asarray(x) if isinstance(x, np.generic) else x for part, x in vars(value).items()}
    return held


def deaf_to_ctrl_c(env: gym.Env) -> gym.Env:
    """The environment as it is; a process of its own leaves Ctrl-C to the one that trains."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


def statistics(envs: VectorEnv) -> dict[str, Any]:
    """The running statistics of the normalising wrappers, by name."""
    found = {}
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            found["observations"] = layer.obs_rms
        if isinstance(layer, ScaleReward):
            found["rewards"] = layer.return_rms
    return found


def share_statistics(envs: VectorEnv, source: VectorEnv) -> None:
    """Let one environment normalise observations with the statistics of another, without changing them."""
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            layer.obs_rms = statistics(source)["observations"]
            layer.update_running_mean = False


def wrappers(envs: VectorEnv) -> Iterator[VectorEnv]:
    """The environment's wrappers from the outside in, and at last the environment."""
    layer: VectorEnv | None = envs
    while layer is not None:
        yield layer
        layer = getattr(layer, "env", None)
