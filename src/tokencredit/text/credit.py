"""Credit: from the scores of completions to the reward, advantage and return of each token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.core.advantages import Where, estimate
from tokencredit.core.masked import VARIANCE_GUARD, Reduce, explained_variance, moments, whiten
from tokencredit.core.rewards import overlong_penalty, token_rewards
from tokencredit.errors import RunStopped
from tokencredit.learn.controllers import AdaptiveKL, FixedKL, RunningMoments
from tokencredit.learn.experience import Experience
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import ADAPTED, AdvantageConfig, KLConfig
from tokencredit.text.batch import Batch
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.pipeline import Scored

NOISE = math.sqrt(VARIANCE_GUARD)
"""Deviation of scores up to which their differences are noise."""
EXPLAINED_DECAY = 0.8
"""Weight that earlier batches keep in the explained variance that λ follows, when one arrives."""


class ScoreScale(NamedTuple):
    """y = (x − mean) / deviation + offset."""

    mean: float = 0.0
    deviation: float = 1.0
    offset: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores on this scale."""
        return (scores - self.mean) / self.deviation + self.offset


class Credit:
    """Gives credit, and remembers from batch to batch what that needs: the price of KL, the means of earlier scores."""

    def __init__(self, args: PPOConfig, reduce: Reduce):
        """Start with nothing seen; `reduce` sums a tensor over processes."""
        self.args, self.reduce = args, reduce
        self.kl = build_kl(args.kl)
        self.scores = RunningMoments()
        self.baseline = RunningMoments(args.advantage.baseline_decay)
        self.explained = RunningMoments(EXPLAINED_DECAY)

    def give(self, scored: Scored) -> tuple[Batch, Experience]:
        """Completions with the reward, advantage and return of each token, and the experience to learn from.

        A completion that was cut off at the length limit is treated as ended there: its score is paid in full, once, so
        the value of the state after it is 0. To bootstrap from the critic as well would count the score twice, and
        since the critic learns from that sum, its values would climb without end. With `advantage.bootstrap` it is
        worth that value, and rewards must come token by token.

        With `ppo.mask_truncated` completions that were cut off are left out of the loss, and of the whitening, which is
        for what the loss sums. Their scores count in groups, running means and `score.normalize` like all others, as in
        TRL's GRPOTrainer.

        Raises:
            RunStopped: there is to be a bootstrap, and a completion has a score of its whole text.
        """
        args, rollout = self.args, scored.rollout
        if args.advantage.bootstrap:
            self._require_dense(scored)
        paid, price = self._rewards(scored, self.normalize(scored.scores))
        rewards = paid + price
        if args.advantage.lam_follows:
            self._measure_critic(scored, paid, price)
        advantages, returns = self._estimate(scored, paid, price, self.advantage_now())
        self.baseline.update(rewards.sum(1), reduce=self.reduce)
        in_loss = self._in_loss(rollout)
        batch = Batch(scored, rewards, advantages, returns, in_loss, masks=args.ppo.mask_truncated)
        if args.advantage.whitened_over("batch") and (tokens := float(self.reduce(in_loss.sum()))) > 0:
            advantages = whiten(advantages, in_loss, reduce=self.reduce, count=tokens)
        return batch, self._experience(scored, replace(rollout, mask=in_loss), advantages, returns)

    def monte_carlo(self, scored: Scored) -> Experience:
        """The experience that a critic alone learns from: its returns are the sampled ones, whatever the estimator.

        Raises:
            RunStopped: as in `give`.
        """
        if self.args.advantage.bootstrap:
            self._require_dense(scored)
        estimator = replace(self.args.advantage, estimator="monte_carlo")
        paid, price = self._rewards(scored, self.normalize(scored.scores))
        advantages, returns = self._estimate(scored, paid, price, estimator)
        rollout = replace(scored.rollout, mask=self._in_loss(scored.rollout))
        return self._experience(scored, rollout, advantages, returns)

    @property
    def lam(self) -> float:
        """λ: that of the settings, or as `advantage.lam_follows` has it.

        Part of the variance of sampled returns is noise that no critic explains, so a critic's share of the variance
        of true values is at least its explained variance: λ trusts it no more than is shown.
        """
        args = self.args.advantage
        return 1 - (1 - args.lam) * self.explained.mean if args.lam_follows else args.lam

    def advantage_now(self) -> AdvantageConfig:
        """The settings with the λ of now, for credit and for comparisons with it."""
        return replace(self.args.advantage, lam=self.lam, lam_follows=False)

    def metrics(self) -> dict[str, float]:
        """The coefficients that it gave credit with."""
        return {"kl_coef": self.kl.coef} | ({"lam": self.lam} if self.args.advantage.lam_follows else {})

    def _measure_critic(self, scored: Scored, paid: Tensor, price: Tensor) -> None:
        """Take in how much of a batch's sampled returns the critic explains, which has not learned from it yet."""
        values, mask = scored.rollout.values, scored.rollout.mask
        assert values is not None, "the estimator needs a critic"
        _, returns = self._estimate(scored, paid, price, replace(self.args.advantage, estimator="monte_carlo"))
        explained = explained_variance(values, returns, mask, self.reduce)
        if explained.isfinite():  # else returns do not vary, and there is nothing to explain
            self.explained.update(explained.clamp(min=0))

    def _in_loss(self, rollout: Rollout) -> Tensor:
        """True at the tokens that take part in the loss."""
        return rollout.mask & ~(rollout.truncated.unsqueeze(1) & self.args.ppo.mask_truncated)

    def returns(self, scored: Scored, scale: ScoreScale) -> Tensor:
        """Returns of each token, `[batch, time]`: the discounted sum of the rewards from it on, as sampled.

        Args:
            scored: completions, of which nothing is remembered.
            scale: from `score_scale`.
        """
        paid, price = self._rewards(scored, scale(scored.scores))
        options = {"gamma": self.args.advantage.gamma}
        returns, _ = estimate("reward_to_go", paid + price, options=options, **self._where(scored))
        return returns

    def advantages(self, scored: Scored, scale: ScoreScale, args: AdvantageConfig) -> Tensor:
        """Advantages of each token by another estimator, before any whitening; arguments as in `returns`."""
        return self._estimate(scored, *self._rewards(scored, scale(scored.scores)), args)[0]

    def _rewards(self, scored: Scored, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards of tokens in two parts, `[batch, time]` each: normalised scores with penalties, and −β · KL."""
        args, rollout, mask = self.args.score, scored.rollout, scored.rollout.mask
        overlong = None
        if args.overlong_tokens is not None:
            limit = self.args.rollout.max_new_tokens
            overlong = overlong_penalty(
                mask.sum(1), limit=limit, tokens=args.overlong_tokens, penalty=args.overlong_penalty
            )
        paid = token_rewards(
            scores,
            mask,
            eos=~rollout.truncated,
            missing_eos_penalty=args.missing_eos_penalty,
            overlong=overlong,
            clip=args.clip,
        )
        if scored.dense is not None:
            paid[mask] += torch.tensor([x for row in scored.dense for x in row], device=mask.device)
        nothing = torch.zeros_like(scored.scores)
        return paid, token_rewards(nothing, mask, kl=scored.reference.kl, kl_coef=self.kl.coef)

    def _estimate(self, scored: Scored, paid: Tensor, price: Tensor, args: AdvantageConfig) -> tuple[Tensor, Tensor]:
        """Advantages and returns.

        The KL takes no part in a group's normalisation: A = (s − mean s) / (deviation of s + 1e-4) − β (KL − mean KL).
        Divided too, it would be noise of size 1 where all scores of a group are equal, as sparse ones mostly are.
        """
        rollout = scored.rollout
        options = args.options() | {"baseline": self.baseline.mean, "group_size": self.args.rollout.per_prompt}
        if args.estimator == "group_relative" and args.scale:
            advantages, returns = estimate(args.estimator, paid, options=options, mask=rollout.mask)
            options["scale"] = False
            of_price, price_returns = estimate(args.estimator, price, options=options, mask=rollout.mask)
            return advantages + of_price, returns + price_returns
        return estimate(args.estimator, paid + price, rollout.values, options=options, **self._where(scored))

    def _where(self, scored: Scored) -> Where:
        """Where the policy acted, and the bootstrap of completions that were cut off."""
        mask = scored.rollout.mask
        where: Where = {"mask": mask}
        if scored.bootstrap is not None:
            after = torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, True) - 1
            where["truncated"] = after & scored.rollout.truncated.unsqueeze(1)
            where["bootstrap"] = scored.bootstrap.unsqueeze(1).expand(mask.shape)
        return where

    def _require_dense(self, scored: Scored) -> None:
        """Raise `RunStopped`, in every process, if a completion has a score of its whole text."""
        if self.reduce(torch.tensor(float(scored.of_texts), device=scored.scores.device)) == 0:
            return
        raise RunStopped(
            "advantage.bootstrap is True, and the reward scores whole completions; one that was cut off would be paid "
            "its score and, by the critic's value, a score once more. Let every term of the reward return a list of "
            "numbers, one per token, or set advantage.bootstrap: false"
        )

    def _experience(self, scored: Scored, rollout: Rollout, advantages: Tensor, returns: Tensor) -> Experience:
        """The experience to learn from; the rollout's mask is true at the tokens that take part in the loss."""
        reference, inputs = scored.reference, rollout.inputs()
        if reference.hidden is not None:
            inputs["ref_hidden"] = reference.hidden
        if self.args.critic.members > 1:
            inputs["member"] = torch.arange(len(rollout.mask), device=rollout.mask.device) % self.args.critic.members
        return Experience(
            inputs=inputs,
            mask=rollout.mask,
            lengths=rollout.lengths(),
            logprobs=rollout.logprobs,
            values=rollout.values,
            advantages=advantages,
            returns=returns,
            ref_logprobs=reference.logprobs if self.args.kl.place == "loss" else None,
        )

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What it remembers."""
        return {name: getattr(self, name).state_dict() for name in ("kl", "scores", "baseline", "explained")}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Remember what `state_dict` gave; what there is no state of begins anew."""
        for name, remembered in state.items():
            getattr(self, name).load_state_dict(remembered)

    def normalize(self, scores: Tensor) -> Tensor:
        """Scores as `score.normalize` wants them; the running deviation includes this batch."""
        args = self.args.score
        if args.normalize == "batch":
            everyone = torch.ones_like(scores, dtype=torch.bool)
            return whiten(scores, everyone, shift_mean=args.shift_mean, reduce=self.reduce)
        if args.normalize == "running":
            self.scores.update(scores, reduce=self.reduce)
        return self.score_scale(scores)(scores)

    def score_scale(self, scores: Tensor) -> ScoreScale:
        """The scale of `score.normalize`, held still: by all scores so far, or by this batch's.

        It divides where the running deviation is above 1e-4, the guard of `whiten` in units of the score.
        """
        args = self.args.score
        if args.normalize == "none":
            return ScoreScale()
        if args.normalize == "batch":
            _, mean, variance = moments(scores, torch.ones_like(scores, dtype=torch.bool), self.reduce)
            deviation = math.sqrt(float(variance) + VARIANCE_GUARD)
            return ScoreScale(float(mean), deviation, 0.0 if args.shift_mean else float(mean))
        # A smaller deviation is noise, and scores that all agree would be blown up by it with their mean.
        deviation = self.scores.deviation if self.scores.deviation > NOISE else 1.0
        return ScoreScale(self.scores.mean if args.shift_mean else 0.0, deviation)


def build_kl(args: KLConfig) -> FixedKL | AdaptiveKL:
    """The controller of the KL coefficient."""
    if args.target is None:
        return FixedKL(args.coef)
    return AdaptiveKL(args.coef, target=args.target, horizon=args.horizon, bounds=ADAPTED)
