"""Credit: from scores of completions to the reward, advantage and return of each token."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokencredit.core.episodes import EpisodeBounds
from tokencredit.core.estimator_table import INPUTS, named
from tokencredit.core.estimators import Turns, estimate, estimate_by_turn
from tokencredit.core.masked import VARIANCE_GUARD, Reduce, moments, whiten, whiten_with_divisor
from tokencredit.core.off_policy import correction
from tokencredit.core.rewards import kl_of_next, overlong_penalty, token_rewards
from tokencredit.errors import RunStopped
from tokencredit.learn.controllers import KLController, RunningMoments
from tokencredit.learn.experience import Experience
from tokencredit.runs.checkpoint import as_read
from tokencredit.settings.parts import is_own
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import ADAPTED, AdvantageConfig
from tokencredit.text.batch import Batch
from tokencredit.text.data.lam_choice import LamChoice
from tokencredit.text.data.prefixes import PrefixFit
from tokencredit.text.data.rollout import Rollout
from tokencredit.user_code.parts import OwnCritic, read_by_parts

NOISE = math.sqrt(VARIANCE_GUARD)
"""Standard deviation of scores up to which their differences count as noise."""


class ScoreScale(NamedTuple):
    """Affine normalisation of scores: (x − mean) / deviation + offset."""

    mean: float = 0.0
    deviation: float = 1.0
    offset: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        """Normalise scores."""
        return (scores - self.mean) / self.deviation + self.offset


class Credit:
    """Assigns credit, and keeps its running state: the KL coefficient and moments of earlier scores."""

    def __init__(self, args: PPOConfig, reduce: Reduce, first: int = 0):
        """Start with empty running moments; `first` is the number of this process's first row in the whole batch."""
        self.args, self.reduce, self.first = args, reduce, first
        kl = args.kl
        self.kl = KLController(kl.coef, target=kl.target, horizon=kl.horizon, error_clip=kl.error_clip, bounds=ADAPTED)
        self.scores = RunningMoments()
        self.baseline = RunningMoments()
        self.lam_choice = LamChoice()
        self.chooses_lam = args.advantage.lam == "auto" and "lam" in args.advantage.reads().settings
        self.prefixes = PrefixFit(args.rollout.max_new_tokens)
        if not args.critic.ours or "prefix_scores" in read_by_parts(args):  # users' parts read scores of the text alone
            self.prefixes.end = []
        self.own = args.critic.kind if isinstance(args.critic.kind, OwnCritic) else None
        self.state_checked = self.of_texts = False

    def give(self, scored: Batch, *, fit: bool = True) -> tuple[Batch, Experience]:
        """Compute reward, advantage and return of each token, and the experience to learn from.

        `advantage.lam: auto` follows the batch, and a critic of the user's is fitted to the returns, unless `fit` is
        false.

        A truncated completion counts as terminal: it gets its full score, and the value of the state after it is 0.
        Bootstrapping from the critic as well would count the score twice, and since the critic learns from that sum,
        its values would diverge. `advantage.bootstrap` does bootstrap, and therefore needs rewards per token.

        With `ppo.mask_truncated` truncated completions are excluded from the loss and from whitening. Their scores
        still count in groups, running means and `score.normalize`, as in TRL's GRPOTrainer.

        Raises:
            RunStopped: the settings do not fit the kind of scores, of whole completions or per token.
        """
        args = self.args
        self._check(scored)
        # Reward of each token: the normalised score, usually at the last one, and −β · KL.
        score_rewards, kl_rewards = self._rewards(scored, self.normalize(scored.scores))
        # Values: those fitted to the scores of prefixes, with the critic's share for what they leave.
        rewards = score_rewards + kl_rewards
        scored = self._with_fit(scored, rewards)
        if fit and scored.fitted is not None and self.chooses_lam:
            self._choose_lam(scored, rewards)
        rollout = scored.rollout
        # Advantages and returns. This batch's rewards enter the running baseline only now, since a baseline must not
        # depend on what it is subtracted from.
        advantages, returns = self._estimate(scored, score_rewards, kl_rewards, self.advantage_now())
        in_loss = self._in_loss(rollout)
        if self.own is not None and fit and in_loss.any():
            known = self._inputs(scored) | {"rewards": rewards, "returns": returns, "values": rollout.values}
            self.own.fit(**named(self.own.fit, known | {"mask": in_loss}))
            self.state_checked = self.state_checked or self.own.check_state(partial(self._own_values, scored))
        self.baseline.update(rewards.sum(1), reduce=self.reduce)
        batch = replace(
            scored,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            in_loss=in_loss,
            valued=self.valued(rollout),
            weights=self._weights(rollout),
            masks=args.ppo.mask_truncated,
        )
        # Whiten what the update reads; records keep advantages in units of the reward.
        divisor: Tensor | float = 1.0
        if args.advantage.whiten == "batch" and (tokens := float(self.reduce(in_loss.sum()))) > 0:
            advantages, divisor = whiten_with_divisor(advantages, in_loss, reduce=self.reduce, count=tokens)
        experience = self._experience(scored, replace(rollout, mask=in_loss), advantages, returns)
        return batch, replace(experience, weights=batch.weights, divisor=divisor)

    def monte_carlo(self, scored: Batch) -> tuple[Batch, Experience]:
        """The batch with its values and sampled returns, whatever the estimator, and the critic's experience of it."""
        self._check(scored)
        estimator = replace(self.args.advantage, estimator="monte_carlo")
        score_rewards, kl_rewards = self._rewards(scored, self.normalize(scored.scores))
        scored = self._with_fit(scored, score_rewards + kl_rewards)
        advantages, returns = self._estimate(scored, score_rewards, kl_rewards, estimator)
        rollout = replace(scored.rollout, mask=self._in_loss(scored.rollout))
        return replace(scored, returns=returns), self._experience(scored, rollout, advantages, returns)

    def _with_fit(self, scored: Batch, rewards: Tensor) -> Batch:
        """Values fitted to the scores of prefixes and a critic's outputs; this batch joins the fit."""
        if self.own is not None:
            return replace(scored, rollout=replace(scored.rollout, values=self._own_values(scored, self.own)))
        if scored.prefixes is None or not self.args.critic.ours:
            return scored
        rollout, options = scored.rollout, {"gamma": self.args.advantage.gamma}
        returns, _ = estimate("reward_to_go", rewards, options=options, **self._where(scored))
        batch = (rollout.values, returns, self._in_loss(rollout), self.first, self.reduce)
        fitted, values = self.prefixes.values(scored.prefixes, *batch)
        if scored.ended is not None:
            self.prefixes.try_end(scored.ended, scored.prefixes, *batch)
        fitted, values = (x.masked_fill(~rollout.mask, 0.0) for x in (fitted, values))
        return replace(scored, rollout=replace(rollout, values=values), fitted=fitted, critic_outputs=rollout.values)

    def _choose_lam(self, scored: Batch, rewards: Tensor) -> None:
        """Let this batch count for `advantage.lam: auto`."""
        rollout, where, gamma = scored.rollout, self._where(scored), self.args.advantage.gamma

        def advantages(lam: float) -> Tensor:
            return estimate("gae", rewards, rollout.values, options={"gamma": gamma, "lam": lam}, **where)[0]

        self.lam_choice.update(advantages, rollout.response_ids, self._in_loss(rollout), self.first, self.reduce)

    @property
    def lam(self) -> float:
        """λ of the settings or, with `advantage.lam: auto`, the one that agrees best with the effects of tokens."""
        lam = self.args.advantage.lam
        return self.lam_choice.lam if lam == "auto" else lam

    def advantage_now(self) -> AdvantageConfig:
        """The advantage settings with the current λ."""
        return replace(self.args.advantage, lam=self.lam)

    def metrics(self) -> dict[str, float]:
        """The current KL coefficient and, if they follow the data, λ and the critic's share in the values."""
        followed = {"lam": self.lam} if self.chooses_lam else {}
        if self.prefixes.moments.any():
            followed["critic_share"] = self.prefixes.share
        return {"kl_coef": self.kl.coef} | followed

    def _in_loss(self, rollout: Rollout) -> Tensor:
        return rollout.mask & ~(rollout.truncated.unsqueeze(1) & self.args.ppo.mask_truncated)

    def _weights(self, rollout: Rollout) -> Tensor | None:
        """Importance weights of the tokens; None without a correction, or if they change with the proximal policy.

        Adopted completions without log-probs have none: they count as drawn from the policy.
        """
        args, behavior = self.args.off_policy, rollout.behavior_logprobs
        if args.correct == "none" or args.proximal == "interpolated" or behavior is None:
            return None
        bounds = dict(zip(("low", "high"), args.bounds, strict=True))
        return correction(rollout.logprobs, behavior, rollout.mask, level=args.level, outside=args.correct, **bounds)

    def _policies(self, rollout: Rollout) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`logprobs`, `behavior_logprobs` and `age` of the experience."""
        proximal = self.args.off_policy.proximal
        if proximal == "recomputed":
            return rollout.logprobs, None, None
        unscored = rollout.behavior_logprobs is None  # `logprobs` are then those of the draws
        behavior = rollout.logprobs if rollout.behavior_logprobs is None else rollout.behavior_logprobs
        if proximal == "interpolated":
            new = torch.zeros_like(rollout.mask, dtype=torch.long)  # pretraining samples nothing ahead
            return behavior, behavior, new if rollout.age is None else rollout.age
        return behavior, behavior if unscored else None, None

    def _turns(self, rollout: Rollout) -> Turns | None:
        """The turns of a rollout, if they are the steps of the estimator."""
        if self.args.advantage.unit == "token" or rollout.turn_ends is None:
            return None
        return Turns.of(rollout.mask, rollout.turn_ends)

    def valued(self, rollout: Rollout) -> Tensor:
        """True at tokens whose value the critic learns."""
        turns = self._turns(rollout)
        return rollout.mask if turns is None else turns.first

    def totals(self, scored: Batch) -> Tensor:
        """Reward of each completion, `[batch]`: with `score.clip` and penalties, without the KL's and normalisation."""
        return self._rewards(scored, scored.scores)[0].sum(1)

    def shaped(self, scored: Batch) -> Tensor | None:
        """`totals`, where `score` clips or penalizes; None otherwise, and for normalized scores, of another scale."""
        args = self.args.score
        shapes = args.clip is not None or args.overlong is not None or args.missing_eos_penalty > 0
        return self.totals(scored) if shapes and args.normalize == "none" else None

    def returns(self, scored: Batch, scale: ScoreScale) -> Tensor:
        """Sampled returns `[batch, time]`, the discounted sums of rewards; running state is not updated."""
        score_rewards, kl_rewards = self._rewards(scored, scale(scored.scores))
        options = {"gamma": self.args.advantage.gamma}
        rewards, where = score_rewards + kl_rewards, self._where(scored)
        if (turns := self._turns(scored.rollout)) is None:
            return estimate("reward_to_go", rewards, options=options, **where)[1]
        # Steps are turns: a token's return is its turn's, without the rewards of the turn's tokens before it.
        _, returns = estimate_by_turn("reward_to_go", rewards, turns=turns, options=options, **where)
        before = rewards.cumsum(1) - rewards
        return returns - (before - turns.spread(turns.at_first(before))) * scored.rollout.mask

    def advantages(self, scored: Batch, scale: ScoreScale, args: AdvantageConfig) -> Tensor:
        """Unwhitened advantages by another estimator; arguments as in `returns`."""
        return self._estimate(scored, *self._rewards(scored, scale(scored.scores)), args)[0]

    def _rewards(self, scored: Batch, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards per token in two parts, `[batch, time]` each: normalised scores with other penalties, and −β · KL."""
        args, rollout, mask = self.args.score, scored.rollout, scored.rollout.mask
        overlong = None
        if args.overlong is not None:
            tokens, penalty = args.overlong
            lengths, limit = rollout.response_lengths(), self.args.rollout.max_new_tokens
            overlong = overlong_penalty(lengths, limit=limit, tokens=int(tokens), penalty=penalty)
        eos, missing = ~rollout.truncated, args.missing_eos_penalty
        score_rewards = token_rewards(
            scores, mask, eos=eos, missing_eos_penalty=missing, overlong=overlong, clip=args.clip
        )
        # Rewards per token come on top as they are: no normalisation, clip or penalty applies to them.
        if scored.dense is not None:
            score_rewards[mask] += torch.tensor([x for row in scored.dense for x in row], device=mask.device)
        nothing, kl = torch.zeros_like(scored.scores), scored.reference.kl
        if kl is not None and self.args.kl.place == "both":
            kl = kl_of_next(kl, mask)
        return score_rewards, token_rewards(nothing, mask, kl=kl, kl_coef=self.kl.coef)

    def _estimate(
        self, scored: Batch, score_rewards: Tensor, kl_rewards: Tensor, args: AdvantageConfig
    ) -> tuple[Tensor, Tensor]:
        rollout = scored.rollout
        options = args.options() | {"baseline": self.baseline.mean, "group_size": self.args.rollout.per_prompt}
        # A group's normalisation excludes the KL: A = (s − mean s) / (std s + 1e-4) − β (KL − mean KL). If it were
        # divided too, a group with equal scores, common with sparse rewards, would get advantages of noise.
        if args.estimator == "group_relative" and args.scale:
            advantages, returns = estimate(args.estimator, score_rewards, options=options, mask=rollout.mask)
            options["scale"] = False
            kl_advantages, kl_returns = estimate(args.estimator, kl_rewards, options=options, mask=rollout.mask)
            return advantages + kl_advantages, returns + kl_returns
        rewards, where = score_rewards + kl_rewards, self._where(scored, every=is_own(args.estimator))
        known: dict[str, Any] = {
            "options": options,
            "inputs": {name: x for name, x in self._inputs(scored).items() if name in INPUTS},
            **where,
        }
        if (turns := self._turns(rollout)) is not None:
            return estimate_by_turn(args.estimator, rewards, rollout.values, turns=turns, **known)
        return estimate(args.estimator, rewards, rollout.values, **known)

    def _inputs(self, scored: Batch) -> dict[str, Any]:
        """What estimators and critics of the user's may name, of what is known."""
        rollout = scored.rollout
        return {
            "logprobs": rollout.logprobs,
            "entropy": rollout.entropy,
            "ref_logprobs": scored.reference.logprobs,
            "token_ids": rollout.response_ids,
            "prefix_scores": scored.prefixes,
            "mask": rollout.mask,
            "gamma": self.args.advantage.gamma,
        }

    def _own_values(self, scored: Batch, own: OwnCritic) -> Tensor:
        """Values by a critic of the user's, 0 outside the mask."""
        mask = scored.rollout.mask
        values: Any = own.values(**named(own.values, self._inputs(scored)))
        name = f"values of critic.kind {own.name}"
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            found = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
            raise RunStopped(f"{name} is {found:.80}; it must be a tensor of shape {tuple(mask.shape)}, one per token")
        if not values[mask].isfinite().all():
            raise RunStopped(f"{name} has a number that is not finite where the policy acted")
        return values.detach().float().masked_fill(~mask, 0.0)

    def _where(self, scored: Batch, *, every: bool = False) -> EpisodeBounds:
        """The mask and, if there is one, the bootstrap of truncated completions; `every` bound for an own estimator.

        Without a bootstrap every completion terminates.
        """
        mask, bootstrap = scored.rollout.mask, scored.bootstrap
        where: EpisodeBounds = {"mask": mask}
        if bootstrap is not None or every:
            last = scored.rollout.response_lengths().unsqueeze(1) - 1
            after = torch.arange(mask.shape[1], device=mask.device) == last
            truncated = after & scored.rollout.truncated.unsqueeze(1) & (bootstrap is not None)
            values = torch.zeros_like(scored.scores) if bootstrap is None else bootstrap
            where |= {"truncated": truncated, "bootstrap": values.unsqueeze(1).expand(mask.shape)}
            where |= {"terminated": after & ~truncated} if every else {}
        return where

    def _check(self, scored: Batch) -> None:
        """Raise `RunStopped`, in every process, if the settings do not fit the kind of scores."""
        args = self.args.score
        keys = ["score.normalize"] * (args.normalize != "none") + ["score.clip"] * (args.clip is not None)
        if not (self.args.advantage.bootstrap or keys):
            return
        of_texts = bool(self.reduce(torch.tensor(float(scored.of_texts), device=scored.scores.device)) > 0)
        if self.args.advantage.bootstrap and of_texts:
            raise RunStopped(
                "advantage.bootstrap is True, and the reward scores whole completions; a truncated one's score would "
                "count twice: let every term return one number per token, or set advantage.bootstrap: false"
            )
        self.of_texts = self.of_texts or of_texts  # a term may pass over a whole batch later
        if keys and not self.of_texts:
            raise RunStopped(
                f"{' and '.join(keys)} act{'s' * (len(keys) == 1)} on scores of whole completions, and the reward "
                "gives one number per token or turn; scale the reward itself instead"
            )

    def _experience(self, scored: Batch, rollout: Rollout, advantages: Tensor, returns: Tensor) -> Experience:
        """The experience to learn from; the rollout's mask is true at tokens in the loss."""
        reference, inputs = scored.reference, rollout.inputs()
        turns = self._turns(scored.rollout)
        if reference.hidden is not None:
            inputs["ref_hidden"] = reference.hidden
        if rollout.support is not None:
            inputs["support"] = rollout.support
        logprobs, behavior, age = self._policies(rollout)
        return Experience(
            inputs=inputs,
            mask=rollout.mask,
            lengths=rollout.lengths(),
            logprobs=logprobs,
            values=rollout.values,
            advantages=advantages,
            returns=returns,
            critic_outputs=scored.critic_outputs,  # the critic learns what the fit leaves
            critic_targets=None if scored.fitted is None else returns - scored.fitted,
            ref_logprobs=reference.logprobs if self.args.kl.place == "loss" else None,
            value_mask=None if turns is None else turns.first & rollout.mask,
            behavior_logprobs=behavior,
            age=age,
        )

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The KL controller's state, the running moments, the fit to prefixes and what λ follows."""
        parts = ("kl", "scores", "baseline", "prefixes", "lam_choice")
        state = {name: getattr(self, name).state_dict() for name in parts}
        if self.own is not None:  # a copy, since `fit` may work in place
            state["own"] = as_read(self.own.part.state_dict(), f"critic.kind {self.own.name}: state_dict()")
        return state

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restore the state of `state_dict`; parts without a state stay."""
        for name, part in state.items():
            target = getattr(self, name)
            (target.part if name == "own" else target).load_state_dict(part)

    def normalize(self, scores: Tensor) -> Tensor:
        """Normalise scores by `score.normalize`; running moments include this batch."""
        args = self.args.score
        if args.normalize == "batch":
            all_rows = torch.ones_like(scores, dtype=torch.bool)
            return whiten(scores, all_rows, shift_mean=args.shift_mean, reduce=self.reduce)
        if args.normalize == "running":
            self.scores.update(scores, reduce=self.reduce)
        return self.score_scale(scores)(scores)

    def score_scale(self, scores: Tensor) -> ScoreScale:
        """The current scale of `score.normalize`, from all scores so far or from this batch.

        It divides only by a running deviation above 1e-4, the guard of `whiten` in units of the score.
        """
        args = self.args.score
        if args.normalize == "none":
            return ScoreScale()
        if args.normalize == "batch":
            _, mean, variance = moments(scores, torch.ones_like(scores, dtype=torch.bool), self.reduce)
            deviation = math.sqrt(float(variance) + VARIANCE_GUARD)
            return ScoreScale(float(mean), deviation, 0.0 if args.shift_mean else float(mean))
        # A smaller deviation is noise; dividing by it would blow up scores that are all equal.
        deviation = self.scores.deviation if self.scores.deviation > NOISE else 1.0
        return ScoreScale(self.scores.mean if args.shift_mean else 0.0, deviation)
