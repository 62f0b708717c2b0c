"""λ of GAE from the data: the one whose advantages agree best with what tokens do in other completions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokencredit.core.masked import Reduce

LAMS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""λ to choose from; the last makes the advantages without bias that effects are means of."""
WITHOUT_DATA = 0.95
"""λ before the first batch, and while no λ agrees with the effects."""
BUCKETS = 4096
"""Token ids count modulo this, so that the state does not grow with the vocabulary."""
FOLDS = 8
"""Parts of a batch; an advantage is compared with effects from the others and from earlier batches."""
PRIOR = 3.0
"""Occurrences that an effect of 0 counts as."""
FORGET = 0.8
"""Factor on the weight of earlier batches, at each new one: the policy moves."""


class LamChoice:
    """The λ whose advantages A(λ) correlate best with the effect of their token.

    The effect e of a token is the mean of G − V over its other occurrences, in other completions: without bias,
    whatever the values, and with errors that have nothing to do with this completion. So the correlation of A(λ) with e
    is that with the true effects, times a factor that all λ share, and the best λ is known without knowing the truth:

        λ = argmax C(λ) / √D(λ),    C(λ) = Σ (A(λ) − mean A(λ)) · e,    D(λ) = Σ (A(λ) − mean A(λ))²

    It sees the part of credit that goes with the token itself, not with its context.
    """

    def __init__(self) -> None:
        """Start without data."""
        self.effects = torch.zeros(2, BUCKETS, dtype=torch.float64, device="cpu")  # Σ (G − V) and number, by token
        self.sums = torch.zeros(2, len(LAMS), dtype=torch.float64, device="cpu")  # C and D

    @property
    def lam(self) -> float:
        """The best λ so far."""
        agreement, size = self.sums
        best = int(torch.where(size > 0, agreement / size.sqrt(), 0.0).argmax())
        return LAMS[best] if agreement[best] > 0 else WITHOUT_DATA

    def update(self, advantages: Tensor, ids: Tensor, mask: Tensor, first: int, reduce: Reduce) -> None:
        """Add a batch.

        Args:
            advantages: [len(LAMS), batch, time], with each λ.
            ids: [batch, time], the tokens.
            mask: bool [batch, time], true at tokens that count.
            first: number of this process's first row in the whole batch, which decides the folds.
            reduce: sums a tensor over processes.
        """
        device = advantages.device

        def over_processes(x: Tensor) -> Tensor:
            return reduce(x.to(device)).cpu()

        mask = mask.cpu()
        tokens, found = (ids.cpu() % BUCKETS)[mask], advantages.double().cpu()[:, mask]
        fold = ((first + torch.arange(len(mask), device="cpu")) % FOLDS).unsqueeze(1).expand_as(mask)[mask]
        number = over_processes(torch.tensor(float(len(tokens)), dtype=torch.float64, device="cpu"))
        found = found - over_processes(found.sum(1, keepdim=True)) / number.clamp(min=1.0)
        # Effects for each fold, from all but its own completions.
        own = torch.zeros(2, FOLDS, BUCKETS, dtype=torch.float64, device="cpu")
        own[0].index_put_((fold, tokens), found[-1], accumulate=True)
        own[1].index_put_((fold, tokens), torch.ones_like(found[-1]), accumulate=True)
        own = over_processes(own)
        total = FORGET * self.effects + own.sum(1)
        effects, counts = total.unsqueeze(1) - own
        effect = (effects / (counts + PRIOR))[fold, tokens]
        self.effects = total
        self.sums = FORGET * self.sums + over_processes(torch.stack([(found * effect).sum(1), found.square().sum(1)]))

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        seen = self.effects[1].nonzero().squeeze(-1)
        return {"tokens": seen.tolist(), "effects": self.effects[:, seen].tolist(), "sums": self.sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.effects.zero_()
        self.effects[:, state["tokens"]] = torch.tensor(state["effects"], dtype=torch.float64, device="cpu")
        self.sums = torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
