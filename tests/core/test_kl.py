import math

import pytest
import torch

from tokencredit.core.kl import exact_kl, kl_estimate


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", math.log(2)), ("k2", 0.5 * math.log(2) ** 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_estimators_by_hand(name, expected):
    policy, reference = torch.tensor([0.5, 0.0]).log(), torch.tensor([0.25, 0.5]).log()
    kl = kl_estimate(name, policy, reference, torch.tensor([True, False]))
    torch.testing.assert_close(kl, torch.tensor([expected, 0.0]))


def test_exact_by_hand():
    policy, reference = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    torch.testing.assert_close(exact_kl(policy, reference), torch.tensor(math.log(2)))
