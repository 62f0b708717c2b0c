"""Credit: from the scores of completions to the reward, advantage and return of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from tokencredit.core.advantages import estimate
from tokencredit.core.masked import Reduce, whiten
from tokencredit.core.rewards import token_rewards
from tokencredit.learn.controllers import AdaptiveKL, FixedKL, RunningMoments
from tokencredit.learn.experience import Experience
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.batch import Batch
from tokencredit.text.pipeline import Scored


class Credit:
    """Gives credit, and remembers from batch to batch what that needs: the price of KL, the means of earlier scores."""

    def __init__(self, args: PPOConfig, reduce: Reduce):
        """Start with nothing seen; `reduce` sums a tensor over processes."""
        self.args, self.reduce = args, reduce
        self.kl = build_kl(args.kl)
        self.scores = RunningMoments()
        self.baseline = RunningMoments()

    def give(self, scored: Scored) -> tuple[Batch, Experience]:
        """Completions with the reward, advantage and return of each token, and the experience to learn from.

        A completion that was cut off at the length limit is treated as ended there: its score is paid in full, once, so
        the value of the state after it is 0. To bootstrap from the critic as well would count the score twice, and
        since the critic learns from that sum, its values would climb without end.
        """
        args, rollout, mask = self.args, scored.rollout, scored.rollout.mask
        rewards = token_rewards(
            self.normalize(scored.scores),
            mask,
            kl=scored.reference.kl,
            kl_coef=self.kl.coef,
            eos=~rollout.truncated,
            missing_eos_penalty=args.score.missing_eos_penalty,
            clip=args.score.clip,
        )
        if scored.dense is not None:
            rewards[mask] += torch.tensor([x for row in scored.dense for x in row], device=mask.device)
        options = args.advantage.options()
        options |= {"baseline": self.baseline.mean, "group_size": args.rollout.per_prompt}
        advantages, returns = estimate(args.advantage.estimator, rewards, rollout.values, options=options, mask=mask)
        self.baseline.update(rewards.sum(1), reduce=self.reduce)
        batch = Batch(scored, rewards, advantages, returns)
        if args.advantage.whitened_over("batch"):
            advantages = whiten(advantages, mask, reduce=self.reduce)
        return batch, self._experience(scored, advantages, returns)

    def _experience(self, scored: Scored, advantages: Tensor, returns: Tensor) -> Experience:
        rollout, reference = scored.rollout, scored.reference
        return Experience(
            inputs=rollout.inputs() | ({} if reference.hidden is None else {"ref_hidden": reference.hidden}),
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
        return {name: getattr(self, name).state_dict() for name in ("kl", "scores", "baseline")}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Remember what `state_dict` gave; what there is no state of begins anew."""
        for name, remembered in state.items():
            getattr(self, name).load_state_dict(remembered)

    def normalize(self, scores: Tensor) -> Tensor:
        """Scores as `score.normalize` wants them; the running deviation includes this batch."""
        args = self.args.score
        if args.normalize == "none":
            return scores
        if args.normalize == "batch":
            everyone = torch.ones_like(scores, dtype=torch.bool)
            return whiten(scores, everyone, shift_mean=args.shift_mean, reduce=self.reduce)
        self.scores.update(scores, reduce=self.reduce)
        shifted = scores - self.scores.mean if args.shift_mean else scores
        return shifted / self.scores.deviation if self.scores.deviation else shifted


def build_kl(args: KLConfig) -> FixedKL | AdaptiveKL:
    """The controller of the KL coefficient."""
    if args.target is None:
        return FixedKL(args.coef)
    return AdaptiveKL(args.coef, target=args.target, horizon=args.horizon)
