"""Functions of core/ look at values at most once per call, since each look empties a GPU's queue."""

import pytest
import torch

from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.core.estimators import estimate
from tokencredit.core.logprobs import token_loss, token_stats
from tokencredit.core.losses import ratio_stats, reduction_count, token_weights
from tokencredit.core.masked import explained_variance, moments, whiten, whiten_with_divisor
from tokencredit.core.rewards import token_rewards

OPTIONS = {"gamma": 0.9, "lam": 0.8, "n": 3, "lam_returns": 1.0, "alpha": 0.5, "baseline": 0.1, "group_size": 2}
SHAPE = 4, 6
MASK = torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
X, Y = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_waits_once(name, gaps, counts):
    mask = MASK.flip(1) if gaps else MASK
    last = (torch.arange(6) == torch.where(mask, torch.arange(6), -1).amax(1, True)) & mask
    truncated = last & torch.tensor([[True], [False], [True], [False]])
    where = {"mask": mask, "terminated": last & ~truncated, "truncated": truncated, "bootstrap": Y}
    with counts() as counted:
        estimate(name, X, Y, options=OPTIONS, **where)
    assert sum(counted.syncs.values()) == 1, counted.syncs
    with counts() as counted:
        estimate(name, X, Y, options=OPTIONS)
    assert sum(counted.syncs.values()) == 1, counted.syncs


HIDDEN, WEIGHT, TARGETS = torch.randn(*SHAPE, 5), torch.randn(7, 5), torch.randint(7, SHAPE)


@pytest.mark.parametrize(
    ("most", "function"),
    [
        (1, lambda: moments(X, MASK)),
        (1, lambda: whiten(X, MASK)),
        (1, lambda: explained_variance(X, Y, MASK)),
        (1, lambda: token_weights(MASK, "sequence")),
        (1, lambda: token_rewards(X[:, 0], MASK, kl=Y)),
        (1, lambda: ratio_stats(X, Y, MASK).metrics()),
        (1, lambda: token_stats(HIDDEN, WEIGHT, TARGETS, mask=MASK, entropy=True)),
        (1, lambda: token_loss(HIDDEN, WEIGHT, TARGETS, lambda now, at: now.logprobs.sum(), mask=MASK)),
        (0, lambda: moments(X, MASK, count=14)),
        (0, lambda: whiten_with_divisor(X, MASK, count=14)),
        (0, lambda: token_weights(MASK, count=14)),
        (0, lambda: token_weights(MASK, "constant", count=24)),
        (0, lambda: reduction_count(MASK, "constant")),
        (0, lambda: token_stats(HIDDEN, WEIGHT, TARGETS, entropy=True)),
        (0, lambda: token_loss(HIDDEN, WEIGHT, TARGETS, lambda now, at: now.logprobs.sum())),
    ],
)
def test_a_function_waits_once_or_never(most, function, counts):
    with counts() as counted:
        function()
    assert sum(counted.syncs.values()) == most, counted.syncs


def test_a_known_count_gives_the_same_moments():
    torch.testing.assert_close(moments(X, MASK, count=14), moments(X, MASK), atol=0, rtol=0)
    twice = moments(X, MASK, lambda x: 2 * x, count=28)  # two processes with the same numbers
    torch.testing.assert_close(twice, moments(X, MASK, lambda x: 2 * x), atol=0, rtol=0)
    assert torch.equal(whiten_with_divisor(X, MASK, count=14)[0], whiten(X, MASK))
