"""One episode of an agent, drawn, with the credit that training would give its steps."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from tokencredit.control.agent import Agent
from tokencredit.control.agent_evaluation import chosen, no_display
from tokencredit.control.agent_rollout import rollout_of
from tokencredit.control.environment_wrappers import EpisodesUnfinished, environment_errors, refuse_endless
from tokencredit.control.vector_environments import evaluation_envs, scaled_rewards
from tokencredit.errors import RunStopped
from tokencredit.report.agent_episode import STEPS
from tokencredit.report.notebook import drawn
from tokencredit.report.story import Fact
from tokencredit.report.templating import fill
from tokencredit.runs.summary import figure
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.training import AdvantageSettings

FRAMES = 16
"""Fewest frames of a long episode; the most are twice as many, and the last."""
PIXELS = 160
"""Largest side of a frame."""


@dataclass(frozen=True, repr=False)
class PlayedEpisode:
    """An episode with the credit of its steps; lists have an entry per step. A notebook draws it."""

    observations: list[list[float]]
    """As the agent read them: flat, and normalised if the run's are."""
    actions: list[Any]
    rewards: list[float]
    """As the environment gave them."""
    values: list[float] | None
    """The critic's values of the states before the actions; None without a critic."""
    advantages: list[float]
    """By the run's estimator, in units of its rewards, which `env.normalize_rewards` scales."""
    terminated: bool
    """The episode ended in a terminal state, and not by a time limit."""
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    """Pictures of the environment, as PNG, and the number of steps before each; empty if it is not drawn."""

    def __repr__(self) -> str:
        return f"<PlayedEpisode: return {figure(sum(self.rewards))} in {len(self.rewards)} steps, {self.ending}>"

    @property
    def ending(self) -> str:
        """What ended the episode, in words."""
        return "a terminal state" if self.terminated else "a time limit"

    def record(self) -> dict[str, Any]:
        """Its first `STEPS` steps for episode.json, with the return and the length of all."""
        # Rewards have a unit of their own: `env.normalize_rewards` scales values and advantages alone.
        reward, credit = rounding(self.rewards), rounding([*self.advantages, *(self.values or ())])
        units = {"rewards": reward, "values": credit, "advantages": credit}
        return {
            "return": reward(sum(self.rewards)),
            "length": len(self.rewards),
            "terminated": self.terminated,
            "actions": [np.asarray(action).tolist() for action in self.actions[:STEPS]],
            **{key: list(map(unit, x[:STEPS])) for key, unit in units.items() if (x := getattr(self, key)) is not None},
            "frames": [{"step": n, "png": base64.b64encode(x).decode()} for n, x in self.frames if n <= STEPS],
        }

    def _repr_html_(self) -> str:
        steps = list(range(1, 1 + len(self.rewards)))
        charts = {"advantage of each step": self.advantages, "value before each step": self.values}
        return fill(
            "notebook.html",
            name="episode",
            story=[
                Fact("return", figure(sum(self.rewards))),
                Fact("steps", str(len(steps))),
                Fact("ended by", self.ending),
            ],
            frames=self.record()["frames"],
            charts=[
                drawn({"title": title, "lines": [{"name": title, "x": steps, "y": numbers}]})
                for title, numbers in (charts | {"reward of each step": self.rewards}).items()
                if numbers is not None
            ],
        )


def rounding(numbers: Sequence[float]) -> Callable[[float], float | None]:
    """Round to the precision of float32 at the largest of these numbers; None for a number that is not finite."""
    largest = max((abs(x) for x in numbers if math.isfinite(x)), default=0.0)
    digits = 5 - math.floor(math.log10(largest or 1))
    return lambda value: round(value, digits) if math.isfinite(value) else None


@torch.no_grad()
def play_episode(
    config: ControlConfig,
    advantage: AdvantageSettings,
    agent: Agent,
    training: VectorEnv,
    *,
    seed: int,
    greedy: bool,
    overdue: Callable[[], bool] = lambda: False,
) -> PlayedEpisode:
    """Play an episode in the run's environment, with the credit that training would give its steps, and pictures.

    Args:
        config: the run's configuration.
        advantage: its estimator, loaded.
        agent: plays.
        training: environments whose statistics normalise observations and rewards; they are not changed.
        seed: of the environment and of sampled actions.
        greedy: take the most likely actions.
        overdue: true once a signal is to stop the run.

    Raises:
        RunStopped: the environment raises or gives a number that is not finite, or the episode does not end.
    """

    def played(render: bool, film: Film) -> tuple[list[Tensor], list[Tensor], list[float], bool]:
        generator, rewards = torch.Generator().manual_seed(seed), list[float]()
        with environment_errors(), evaluation_envs(config, 1, training, render=render) as envs:
            observation, _ = envs.reset(seed=seed)
            frames, actions, ended = [torch.tensor(observation)], list[Tensor](), False
            while not ended:
                if overdue():
                    raise EpisodesUnfinished("a signal came before its episode had ended")
                refuse_endless(len(rewards))
                film.look(envs, len(rewards))
                actions.append(chosen(agent, frames[-1], greedy, generator))
                taken = agent.distribution.to_env(actions[-1].numpy())
                observation, reward, terminated, truncated, _ = envs.step(taken)
                rewards.append(float(reward[0]))
                frames.append(torch.tensor(observation))
                ended = bool(terminated[0] | truncated[0])
            film.look(envs, len(rewards), last=True)
        return frames, actions, rewards, bool(terminated[0])

    film = Film()
    try:
        frames, actions, rewards, terminated = played(drawable(config, training), film)
    except EpisodesUnfinished:
        raise
    except Exception:  # of any type: an environment may fail because it is to be drawn
        film = Film()
        frames, actions, rewards, terminated = played(render=False, film=film)
    read, learned = torch.stack(frames, 1)[0], scaled_rewards(rewards, training, config.env.clip)
    ends = terminated or not config.advantage.bootstrap
    rollout = rollout_of(agent, [read], [torch.cat(actions)], [learned], [ends])
    if not (read.isfinite().all() and rollout.rewards.isfinite().all()):
        raise RunStopped("the environment gave an observation or a reward that is not finite, which has no credit")
    advantages, _ = rollout.credit(advantage, agent)
    return PlayedEpisode(
        observations=read[:-1].tolist(),
        actions=[agent.distribution.to_env(action.numpy())[0] for action in actions],
        rewards=rewards,
        values=None if rollout.values is None else rollout.values[0].tolist(),
        advantages=advantages[0].tolist(),
        terminated=terminated,
        frames=film.pictures(),
    )


def drawable(config: ControlConfig, training: VectorEnv) -> bool:
    """True if the run's environment can be drawn.

    MuJoCo needs OpenGL, which may end the process: it draws only where `eval.videos` does so too. It is known by its
    depth images, in a user's class as well.
    """
    modes = training.metadata.get("render_modes") or ()
    return "rgb_array" in modes and (config.eval.videos > 0 or "depth_array" not in modes)


class Film:
    """Pictures of an episode of unknown length, evenly spaced."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, Any]] = []
        self.every = 1

    def look(self, envs: VectorEnv, step: int, *, last: bool = False) -> None:
        """Keep a picture if one is due; an environment that fails to draw is not drawn at all."""
        if envs.render_mode != "rgb_array" or self.every == 0 or (step % self.every and not last):
            return
        try:
            with no_display(), warnings.catch_warnings(action="ignore"):  # Gymnasium's, and graphics libraries'
                self.frames.append((step, np.array(envs.render()[0])))  # type: ignore[index]
        except Exception:  # such as pygame, which is missing
            self.frames, self.every = [], 0
        if len(self.frames) == 2 * FRAMES and not last:
            self.frames, self.every = self.frames[::2], 2 * self.every

    def pictures(self) -> list[tuple[int, bytes]]:
        """The pictures as small PNG files; none if they are none, or Pillow is missing."""
        pictures = []
        with suppress(Exception):
            from PIL import Image

            for step, frame in self.frames:
                image, file = Image.fromarray(frame), io.BytesIO()
                image.thumbnail((PIXELS, PIXELS))
                image.quantize(64).save(file, "png", optimize=True)
                pictures.append((step, file.getvalue()))
        return pictures
