"""The trainer for Gymnasium environments: one iteration, and the run around it."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Discrete
from gymnasium.spaces.utils import flatdim
from torch import Tensor, nn

from tokencredit.audit.verdict import audit_command
from tokencredit.control.actions import Categorical
from tokencredit.control.agent import Agent
from tokencredit.control.agent_evaluation import Player, check_videos, episode_metrics, save_agent
from tokencredit.control.agent_rollout import AgentRollout, Collector, NonFiniteReward
from tokencredit.control.audit.agent_auditor import AgentAuditor
from tokencredit.control.environment_wrappers import EpisodesUnfinished
from tokencredit.control.played_episode import play_episode
from tokencredit.control.vector_environments import environment_part, expected_warnings, make_envs
from tokencredit.core.masked import moments, whiten
from tokencredit.distributed.processes import Processes, threads
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.controllers import EarlyStopping
from tokencredit.learn.experience import Experience, critic_metrics
from tokencredit.learn.learner import Learner
from tokencredit.learn.objective import CriticOutputs, Passes, PolicyLoss, PolicyOutputs
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.own_loss import objective_of
from tokencredit.learn.rng import isolated, preserved, random_state, seed_all, set_random_state
from tokencredit.learn.state import nbytes
from tokencredit.learn.update import NonFiniteUpdate, UpdateSettings
from tokencredit.provenance.parts import describe, label
from tokencredit.report.page import LARGEST, write_final_report
from tokencredit.runs.folder import EPISODE
from tokencredit.runs.loop import INTERRUPT, Iteration, State, Trainer, run
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import EPISODES, Summary, count
from tokencredit.settings.control import HOMEWORK_TAGS, AgentConfig, ControlConfig
from tokencredit.settings.fields import require_config
from tokencredit.settings.run_kind import CONTROL, own_parts
from tokencredit.user_code.parts import load_parts, loaded_parts

EVALUATION_SEED = 10_000
"""Added to the run's seed, so that evaluation episodes differ from training episodes."""


class ControlTrainer(Trainer):
    """Trains an agent in an environment; `ControlTrainer().train()` is what `tokencredit control` does."""

    def __init__(self, args: ControlConfig | None = None):
        """Make environments, agent and optimizer; raises `ConfigError` for what cannot be used."""
        self.args = args = require_config(args, ControlConfig)
        processes = Processes(args.run.timeout)
        refuse_unsplit(args, processes)
        self.record = RunRecord(args.run, processes, CONTROL)
        with isolated(), threads(args.threads), expected_warnings(args.env):
            seed_all(args.seed)  # for draws by libraries and by user code
            loaded = load_parts(args)
            self.advantage = loaded.advantage
            self.record.parts = {key: describe(part) for key, part in loaded_parts(args).items()}
            own = own_parts(args)
            given = {key: label(self.record.parts[key]) for key, part in own.items() if not isinstance(part, str)}
            self.args = replace(args, python=given)
            copies, stack = args.env.number // processes.count, args.agent.observations()
            self.envs = make_envs(args.env, copies, args.advantage.gamma, stack=stack, processes=processes)
            if part := environment_part(self.envs):
                self.record.parts["env.id"] = part
            spaces = self.envs.single_observation_space, self.envs.single_action_space
            self.agent = Agent(*spaces, args.agent, args.critic.kind)
            if args.eval.videos:
                check_videos(args)
            self.player = Player(args, self.agent, self.envs, self.record.signals.overdue)
            self.auditor = AgentAuditor(loaded, self.agent, self.envs)
            self.learner = build_learner(loaded, self.agent, processes)
            self.collector = Collector(self.envs, self.agent, args.seed, processes)
            self.rng = random_state()
        self.reduce = processes.sum
        self.stopping = EarlyStopping(reward=args.stop.reward, patience=args.stop.patience)
        self.episodes: deque[tuple[float, int]] = deque(maxlen=EPISODES)
        self.steps = 0
        self.before: State | None = None
        """Environments and RNG state when the iteration began; None once it counts."""

    def train(self, resume_from_checkpoint: bool = False) -> Summary:
        """Run all iterations, write the run's folder, and return the summary; see docs/resuming.md.

        Raises:
            ConfigError: `run.dir` is in use, or cannot be resumed with these settings.
            RunStopped: numbers were not finite several times in a row, or an environment raised; the agent is saved.
            KeyboardInterrupt: Ctrl-C, as in `PPOTrainer.train`.
        """
        weights = nbytes(self.agent.parameters())
        with isolated(), threads(self.args.threads), expected_warnings(self.args.env):
            set_random_state(self.rng)
            return run(self, resume=resume_from_checkpoint, reserve=weights + LARGEST + 2**20, weights=weights)

    def overview(self) -> Iterator[tuple[str, str]]:
        """Environment, agent, device and folder: pairs of a label and a text."""
        args, observations, actions = self.args, self.envs.single_observation_space, self.envs.single_action_space
        yield "environment", args.env.id + (f", {args.env.number} copies" if args.env.number > 1 else "")
        yield "observation", f"of length {flatdim(observations) // args.agent.observations()}"
        size = math.prod(actions.shape or ())
        yield "action", f"one of {actions.n}" if isinstance(actions, Discrete) else f"of length {size}"
        yield "agent", f"{args.agent.policy}, {count(sum(p.numel() for p in self.agent.parameters()))} parameters"
        yield "device", f"{self.record.processes.device}, float32"
        least = "at least " * args.whole_episodes
        steps = f"{args.run.iterations:,} iterations of {least}{args.env.number * args.steps:,} steps"
        yield "run", f"{self.record.folder.path}, {steps}"

    def iteration(self, number: int) -> Iteration:
        """Collect a rollout, compute credit, update, evaluate if due; returns metrics, and no samples."""
        started, args = time.perf_counter(), self.args
        # Kept until the iteration counts: one that fails before is repeated when the run is resumed.
        self.progress = None
        self.before = self._own_state()
        # Learning rates first: both the update and the metrics need those of this iteration.
        metrics: dict[str, float] = {"iteration": number} | self.learner.set_rates(number)
        try:
            # Act with the current agent; the copies go on where the last rollout stopped.
            rollout = self.collector.collect(args.steps, args.whole_episodes, args.advantage.bootstrap)
            collected, episodes = time.perf_counter(), rollout.episodes
            # Credit before the update, from the values with which the rollout was collected; then learn from it.
            experience, credit = self.give_credit(rollout)
            metrics |= credit | self.update(number, experience)
        except NonFiniteReward as error:
            # Nothing can be learned from such a rollout: save it, and go on unless it is one of several in a row.
            collected, episodes = time.perf_counter(), error.episodes
            tensors = {"observations": torch.from_numpy(error.observations), "rewards": torch.from_numpy(error.rewards)}
            self.record.bad_step(number, str(error), tensors)
            self.before = None
            metrics |= {"bad_steps": 1}
        # Training returns over the last episodes, since a rollout may end none; and where the time went.
        self.episodes.extend(episode for episode in episodes if math.isfinite(episode[0]))
        seconds = time.perf_counter() - started
        self.steps += (steps := self.collector.taken)
        metrics |= {
            **episode_metrics("train", list(self.episodes)),
            "episodes": len(episodes),
            "steps": steps,
            "total_steps": self.steps,
            "seconds": seconds,
            "seconds/rollout": collected - started,
            "seconds/update": seconds - (collected - started),
            "steps_per_second": steps / seconds,
        }
        # Evaluate and audit last, so that their time is not in the figures above; they change nothing of the run.
        self.progress = metrics, []
        last = number == args.run.iterations or self.stopping.reached(reward=metrics["train/average_return"], kl=0.0)
        if last or (args.eval.every and number % args.eval.every == 0):
            evaluated = self._by_main(partial(self.evaluate, number))
            metrics |= evaluated
            if args.eval.homework_tags and evaluated:  # all of them in the same iterations: readers pair their points
                metrics |= {tag: metrics[name] for tag, name in HOMEWORK_TAGS.items() if name in metrics}
        if args.audit.every and number % args.audit.every == 0:
            metrics |= self._by_main(partial(self.auditor.measure, number, self.record))
        return metrics, []

    def _by_main(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of the main process, in every process: metrics decide when to save, so must be equal."""
        processes = self.record.processes
        if processes.count == 1:
            return measure()
        with processes.agreed(OSError, RunStopped):
            metrics = measure() if processes.main else {}
        received: dict[str, Any] = json.loads(processes.texts(json.dumps(metrics))[0])
        return received

    def give_credit(self, rollout: AgentRollout) -> tuple[Experience, dict[str, float]]:
        """The experience, with one row per transition, and metrics of its credit."""
        advantages, returns = rollout.credit(self.advantage, self.agent)
        _, mean, variance = moments(advantages, rollout.mask, self.reduce)
        metrics = {"advantage_mean": float(mean), "advantage_std": float(variance.sqrt())}
        if rollout.values is not None:
            metrics |= critic_metrics(rollout.values, returns, rollout.mask, self.reduce)
        if self.args.advantage.whiten == "batch":
            advantages = whiten(advantages, rollout.mask, reduce=self.reduce)
        return rollout.experience(advantages, returns), metrics

    def update(self, number: int, experience: Experience) -> dict[str, float]:
        """Update on the transitions; returns the update's metrics."""

        def on_step(minibatch: Experience, error: NonFiniteUpdate | None) -> None:
            """Count consecutive skipped steps, and save their minibatches."""
            if error is None:
                self.record.bad_in_a_row = 0
            else:
                self.record.bad_step(number, str(error), minibatch.tensors(), diverged=True)

        self.before = None
        return self.learner.update(experience, on_step=on_step)

    def evaluate(self, number: int) -> dict[str, float]:
        """Play whole episodes in separate copies, with the training statistics; records videos of some.

        Returns metrics; none if the episodes do not end.
        """
        settings, seed = self.args.eval, self.args.seed + EVALUATION_SEED
        metrics: dict[str, float] = {}
        try:
            with preserved():  # an environment may draw from the global generators
                if settings.episodes:
                    metrics = self.player.measure(settings, seed)
                    self._record_episode(number, seed)
                if settings.videos:
                    self.player.record(settings, seed, self.record.folder.path / "videos", f"iteration-{number}")
        except EpisodesUnfinished as error:
            self.record.event(f"{'videos are' if metrics else 'an evaluation is'} skipped: {error}")
        return metrics

    def _record_episode(self, number: int, seed: int) -> None:
        """Play one episode by the evaluation's seed, and write it with its credit for the page."""
        overdue, greedy = self.record.signals.overdue, self.args.eval.greedy
        options: dict[str, Any] = {"seed": seed, "greedy": greedy, "overdue": overdue}
        try:
            episode = play_episode(self.args, self.advantage, self.agent, self.envs, **options)
        except RunStopped as error:  # training does not depend on it
            self.record.event(f"no episode for the page: {error}")
            return
        self.record.folder.write_json(EPISODE, {"iteration": number, "greedy": greedy} | episode.record())

    def state(self) -> tuple[State, State]:
        """Resumable state, shared and of this process, which has its environments."""
        return self._shared_state(), self._own_state()

    def rewind(self) -> tuple[State, State] | None:
        """State at the start of a failed iteration if it counts in no process; the environments may be gone."""
        unlearned = self.record.processes.all(self.before is not None)
        return (self._shared_state(), self.before) if unlearned and self.before is not None else None

    def _shared_state(self) -> State:
        return self.learner.state() | {"episodes": list(self.episodes), "steps": self.steps}

    def _own_state(self) -> State:
        return {"collector": self.collector.state(), "random": random_state()}

    def load(self, state: State, changed: set[str]) -> Sequence[str]:  # noqa: ARG002  (of `Trainer`)
        """Restore the result of `state`; returns events to record. Raises `ConfigError` for another agent's state."""
        own, everyone = state["process"], state["all_processes"]
        self.learner.load(state)
        lost = self.collector.load(own["collector"], everyone and [part["collector"] for part in everyone])
        self.episodes.clear()
        self.episodes.extend((score, length) for score, length in state["episodes"])
        self.steps = state["steps"]
        set_random_state(own["random"])
        if not lost:
            return ()
        copies, why = ", ".join(map(str, lost)), "seed and actions do not determine their course"
        return [f"environments {copies} could not be restored ({why}); they start a new episode"]

    def finish(self, stopped_by: str) -> Summary:
        """Write the agent, summary, audit and report at the end of a run; returns the summary."""
        summary = self.record.end(stopped_by, lambda folder, _: save_agent(folder, self.agent, self.envs))
        self.auditor.at_end(summary, self.record, self._by_main)
        write_final_report(self.record)
        command = audit_command(self.record.folder.path, self.record.config)
        audit = {"tokencredit audit RUN": "audit of the credit"} if command else {}
        play = {"tokencredit play RUN": "whole episodes with the trained agent"}
        self.record.next_steps({} if self.record.registers else play | audit)
        if stopped_by != INTERRUPT:  # after which another train() goes on
            with suppress(Exception):  # everything is written; a process of an environment may be gone
                self.envs.close()
        return summary


def refuse_unsplit(args: ControlConfig, processes: Processes) -> None:
    """Raise `ConfigError` if several processes cannot share the environments."""
    if args.env.number % processes.count:
        count = processes.count
        raise ConfigError(f"env.number is {args.env.number}; {count} processes share them: give a multiple of {count}")
    if processes.count > 1 and args.whole_episodes:
        raise ConfigError(f"whole_episodes is true; it needs one process, and there are {processes.count}")
    if processes.count > 1 and processes.device.type != "cpu":
        raise ConfigError("several processes train an agent on CPUs; set ACCELERATE_USE_CPU=true")


@dataclass(frozen=True)
class AgentPasses(Passes):
    """The passes of an agent."""

    agent: Agent
    entropy: bool
    """The loss needs entropies."""

    def evaluate(self, model: nn.Module, inputs: dict[str, Tensor], loss: PolicyLoss) -> PolicyOutputs:
        """Outputs of actor and critic."""
        outputs: PolicyOutputs = model(**inputs, policy_loss=loss, entropy=self.entropy)
        return outputs

    def critic(self, inputs: dict[str, Tensor]) -> CriticOutputs:
        """Outputs of the critic."""
        return CriticOutputs(self.agent.critic_values(inputs["observations"]))


def build_learner(args: ControlConfig, agent: Agent, processes: Processes) -> Learner:
    """The learner of an agent; raises `ConfigError` for a setting without effect on the environment's actions."""
    for key in ("log_std", "actions"):
        value = getattr(args.agent, key)
        if isinstance(agent.distribution, Categorical) and value != getattr(AgentConfig(), key):
            raise ConfigError(f"agent.{key} is {value!r}, which has no effect with discrete actions; leave it out")
    # A plain policy gradient takes one step on the whole batch.
    one_step = {"epochs": 1, "minibatches": 1} if args.algorithm == "policy_gradient" else {}
    return Learner(
        agent,
        build_agent_optimizer(args, agent),
        AgentPasses(agent, entropy=args.ppo.entropy_coef > 0),
        objective_of(args.ppo.loss, args.ppo.kwargs, args.ppo.objective(args.critic) | {"horizon": 1}),
        UpdateSettings(**args.ppo.passes(args.critic, args.advantage, args.optim) | one_step),
        schedule(**args.optim.rates(args.run.iterations)),
        torch.Generator().manual_seed(args.seed + 1),
        processes,
        agent.critic_parts().parameters() if args.critic.coef == 0 else (),
    )


def build_agent_optimizer(args: ControlConfig, agent: Agent) -> torch.optim.Optimizer:
    """One optimizer for actor and critic; at equal rates a single group, which takes half the time of two."""
    hidden = hidden_matrices(agent, exclude=agent.outer_parameters())
    if args.optim.name == "muon" and not hidden:
        raise ConfigError(
            f"optim.name is muon, and agent.hidden {args.agent.hidden} gives no hidden matrix; add a layer"
        )
    actor, critic = (list(part.parameters()) for part in (agent.actor_parts(), agent.critic_parts()))
    critic_group = {"params": critic, "lr": args.critic.lr, "metric": "value_lr"}
    groups = [{"params": actor, "lr": args.optim.lr}, critic_group]
    if args.optim.lr == args.critic.lr:
        groups = [{"params": actor + critic, "lr": args.optim.lr}]
    return build_optimizer(
        [group | {"weight_decay": args.optim.weight_decay} for group in groups if group["params"]],
        args.optim.name,
        hidden=hidden,
        eps=args.optim.eps,
    )
