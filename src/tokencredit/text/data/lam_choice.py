"""λ of GAE from the data: the one whose advantages agree best with what tokens do in other completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokencredit.core.masked import Reduce

LAMS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""λ to choose from."""
WITHOUT_DATA = 0.95
"""λ before the first batch, and while none agrees with the effects."""
BUCKETS = 4096
"""Token ids count modulo this, so that the state does not grow with the vocabulary."""
FOLDS = 8
"""Parts of a batch; an advantage is compared with effects from the others and from earlier batches."""
PRIOR = 3.0
"""Occurrences that an effect of 0 counts as."""
FORGET = 0.8
"""Factor on the weight of earlier batches in the effects, at each new one: the policy moves."""
FORGET_AGREEMENT = 0.95
"""The same in the agreement: which λ is best changes slowly, and late in a run a batch tells little of it."""


class LamChoice:
    """The λ whose advantages A correlate best with their tokens' effects.

    The effect e of a token is the mean of G − V over its other occurrences, in other completions: it has no bias by λ,
    and its errors have nothing to do with this completion. So the correlation of A with e is that with the true
    effects, times a factor that all λ share, and the best one is known without knowing the truth:

        λ = argmax C / √D,    C = Σ (A − mean A) · e,    D = Σ (A − mean A)²

    It sees the part of credit that goes with the token itself, not with its context.

    Attributes:
        lam: the best λ so far.
    """

    def __init__(self) -> None:
        self.effects = torch.zeros(2, BUCKETS, dtype=torch.float64, device="cpu")  # Σ (G − V) and number, by token
        self.sums = torch.zeros(2, len(LAMS), dtype=torch.float64, device="cpu")  # C and D
        self.lam = WITHOUT_DATA

    def update(
        self, advantages: Callable[[float], Tensor], ids: Tensor, mask: Tensor, first: int, reduce: Reduce
    ) -> None:
        """Add a batch.

        Args:
            advantages: gives those by a λ, `[batch, time]`.
            ids: [batch, time], the tokens.
            mask: bool [batch, time], true at tokens that count.
            first: number of this process's first row in the whole batch, which decides the folds.
            reduce: sums a tensor over processes.
        """
        device, mask = ids.device, mask.cpu()
        tokens = (ids.cpu() % BUCKETS)[mask]
        fold = ((first + torch.arange(len(mask), device="cpu")) % FOLDS).unsqueeze(1).expand_as(mask)[mask]

        def counted(lam: float) -> Tensor:
            return advantages(lam).cpu()[mask].double()

        def over_processes(*sums: Tensor) -> Tensor:
            return reduce(torch.stack(sums).to(device)).cpu()

        # Effects for each fold, from all but its own completions: means of G − V, less its mean over the batch.
        left = counted(1.0)
        number, total = over_processes(torch.ones_like(left).sum(), left.sum())
        left = left - total / number.clamp(min=1.0)
        own = torch.zeros(2, FOLDS, BUCKETS, dtype=torch.float64, device="cpu")
        own[0].index_put_((fold, tokens), left, accumulate=True)
        own[1].index_put_((fold, tokens), torch.ones_like(left), accumulate=True)
        own = over_processes(*own)
        self.effects = FORGET * self.effects + own.sum(1)
        effects, counts = self.effects.unsqueeze(1) - own
        effect = (effects / (counts + PRIOR))[fold, tokens]
        # Σ A, Σ A² and Σ A · e of each λ, one after the other, so that the advantages of one are in memory.
        rows = [torch.stack([a.sum(), a.square().sum(), a @ effect]) for a in map(counted, LAMS)]
        sums, squares, products = over_processes(*rows).unbind(1)
        mean_effect = over_processes(effect.sum())[0] / number.clamp(min=1.0)
        found = products - sums * mean_effect, squares - sums.square() / number.clamp(min=1.0)
        self.sums = FORGET_AGREEMENT * self.sums + torch.stack(found)
        self.lam = self._best()

    def _best(self) -> float:
        agreement, size = self.sums
        best = int(torch.where(size > 0, agreement / size.sqrt(), 0.0).argmax())
        return LAMS[best] if agreement[best] > 0 else WITHOUT_DATA

    def state_dict(self) -> dict[str, Any]:
        """The state, for `load_state_dict`."""
        seen = self.effects[1].nonzero().squeeze(-1)
        return {"tokens": seen.tolist(), "effects": self.effects[:, seen].tolist(), "sums": self.sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.effects.zero_()
        self.effects[:, state["tokens"]] = torch.tensor(state["effects"], dtype=torch.float64, device="cpu")
        self.sums = torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
        self.lam = self._best()
