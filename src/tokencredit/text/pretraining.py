"""Value pretraining: the critic learns the returns of the starting policy before the first iteration."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from functools import partial

import torch

from tokencredit.learn.controllers import Plateau
from tokencredit.learn.experience import critic_metrics
from tokencredit.learn.learner import Learner
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import duration, figure
from tokencredit.settings.text import PPOConfig
from tokencredit.text.credit import Credit
from tokencredit.text.data.stream import BatchStream
from tokencredit.text.pipeline import Pipeline, Stages, UnusableBatch, count_step
from tokencredit.text.sources.ahead import CurrentPolicy

FILE = "pretrain.jsonl"
PATIENCE, RISE = 10, 0.01
"""Early stopping: after `PATIENCE` batches in a row without a gain of `RISE` in explained variance.

Counted from the first batch with more than `RISE`, since on long texts a critic takes some batches to get there.
"""


class Pretraining:
    """Trains the critic alone on batches of the starting policy, with Monte-Carlo returns as targets.

    Yuan et al. 2025 (VC-PPO, arXiv 2503.01491), "value pretraining". Each batch is fresh and measured before the critic
    learns from it, so its explained variance is held out; noise in the returns keeps it below 1.
    """

    def __init__(
        self,
        args: PPOConfig,
        stream: BatchStream,
        pipeline: Pipeline,
        credit: Credit,
        learner: Learner,
        record: RunRecord,
    ):
        """Prepare for pretraining; `stream` must not be that of the iterations, which would be advanced."""
        self.args, self.source, self.pipeline = args, CurrentPolicy(pipeline, stream), pipeline
        self.credit, self.learner, self.record = credit, learner, record
        self.stages = Stages(self, ())  # callbacks are for iterations

    def batches(self) -> Generator[None, None, dict[str, float]]:
        """Train on one batch after another, yielding between them; returns metrics, means over the last batches."""
        began = time.perf_counter()
        if self.record.main:
            self.record.folder.write(FILE, "")  # an interrupted pretraining starts over
        plateau, tokens, risen = Plateau(patience=PATIENCE, min_delta=RISE), 0.0, True
        explained: list[float] = []
        number = 0
        while risen and number < self.args.critic.pretrain:
            if number:
                yield
            number += 1
            row = self._batch(number)
            tokens += row["tokens"]
            if math.isfinite(variance := row.get("explained_variance", math.nan)):
                explained.append(variance)
                risen = max(explained) <= RISE or not plateau.update(explained[-1])
        last = explained[1:][-PATIENCE:] or explained
        mean = sum(last) / len(last) if last else math.nan
        start = explained[0] if explained else math.nan
        seconds = time.perf_counter() - began
        self.record.event(
            f"pretraining: the critic learned from {number} batches ({tokens:,.0f} tokens) in {duration(seconds)}; "
            f"explained variance of new batches {figure(start)} → {figure(mean)}"
            + ("" if risen else ", which no longer rose")
        )
        sizes = {"pretrain/batches": number, "pretrain/tokens": tokens, "pretrain/seconds": seconds}
        return sizes | {"pretrain/explained_variance": mean}

    def _batch(self, number: int) -> dict[str, float]:
        """Sample a batch, measure and train the critic on it, and append its metrics to the file; returns them."""
        row: dict[str, float] = {"batch": number}
        began = time.perf_counter()
        settings, processes = self.args.rollout, self.pipeline.processes
        try:
            batch = self.pipeline.drawn(partial(self.source.sample, 0), settings, values=True, stage=self.stages)
            bootstrap = self.args.advantage.bootstrap
            scored = self.pipeline.scored(batch, settings, values=True, bootstrap=bootstrap, stage=self.stages)
        except UnusableBatch as bad:
            self.record.bad_step(0, str(bad), bad.rollout.inputs(), texts=bad.texts)
            row |= {"tokens": float(processes.sum(bad.rollout.mask.sum())), "critic_steps": 0, "bad_steps": 1}
        else:
            scored, experience = self.credit.monte_carlo(scored)
            rollout = scored.rollout
            assert rollout.values is not None
            valued = self.credit.valued(rollout)
            row |= critic_metrics(rollout.values, scored.returns, valued, processes.sum)
            learned = scored.returns.masked_fill(~valued, 0.0)
            sums = [x.sum().float() for x in (rollout.mask, valued, learned, scored.total_scores())]
            tokens, values, returns, reward = processes.sum(torch.stack(sums)).tolist()
            row |= {"return_mean": returns / values, "reward": reward / settings.batch_size, "tokens": tokens}
            with self.stages("update"), self.pipeline.precision.updates():
                on_step = partial(count_step, self.record, 0, scored)
                row |= self.learner.pretrain_critic(experience, on_step=on_step)
            self.pipeline.weights_changed(self.record.event)
        row["seconds"] = time.perf_counter() - began
        if self.record.main:
            self.record.folder.append(FILE, {key: x if math.isfinite(x) else None for key, x in row.items()})
        explained, loss = figure(row.get("explained_variance")), figure(row.get("critic_value_loss"))
        progress = f"pretraining {number}/{self.args.critic.pretrain}"
        self.record.screen.say(f"{progress}  explained variance {explained}  value loss {loss}")
        return row
