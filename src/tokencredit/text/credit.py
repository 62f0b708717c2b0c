"""Credit: from the scores of completions to the reward, advantage and return of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from tokencredit.core.advantages import estimate
from tokencredit.core.masked import Reduce, whiten
from tokencredit.core.rewards import token_rewards
from tokencredit.learn.controllers import AdaptiveKL, FixedKL, RunningMoments
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.engines.sampling import Rollout


class Credit:
    """Gives credit, and remembers from batch to batch what that needs: the price of KL, the means of earlier scores."""

    def __init__(self, args: PPOConfig, reduce: Reduce):
        """Start with nothing seen; `reduce` sums a tensor over processes."""
        self.args, self.reduce = args, reduce
        self.kl = build_kl(args.kl)
        self.scores = RunningMoments()
        self.baseline = RunningMoments()

    def give(
        self, rollout: Rollout, scores: Tensor, dense: list[list[float]] | None, kl: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, advantages and returns of a rollout's tokens, `[batch, time]`.

        A completion that was cut off at the length limit is treated as ended there: its score is paid in full, once, so
        the value of the state after it is 0. To bootstrap from the critic as well would count the score twice, and
        since the critic learns from that sum, its values would climb without end.

        Args:
            rollout: what was sampled.
            scores: `[batch]`, paid at the last token.
            dense: for each completion one number a token, paid where it stands; None without.
            kl: `[batch, time]`, what each token pays for in nats; None where the loss pays, or nobody.
        """
        args, mask = self.args, rollout.mask
        rewards = token_rewards(
            self.normalize(scores),
            mask,
            kl=kl,
            kl_coef=self.kl.coef,
            eos=~rollout.truncated,
            missing_eos_penalty=args.score.missing_eos_penalty,
            clip=args.score.clip,
        )
        if dense is not None:
            rewards[mask] += torch.tensor([x for row in dense for x in row], device=mask.device)
        options = args.advantage.options()
        options |= {"baseline": self.baseline.mean, "group_size": args.rollout.per_prompt}
        advantages, returns = estimate(args.advantage.estimator, rewards, rollout.values, options=options, mask=mask)
        self.baseline.update(rewards.sum(1), reduce=self.reduce)
        return rewards, advantages, returns

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
