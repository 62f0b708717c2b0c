import pytest
import torch

from tokencredit.core.advantages import gae


def test_gae_by_hand():
    rewards, values = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[12.5, 8.3, 5.1]])
    terminated = torch.tensor([[False, False, True]])
    advantages, returns = gae(rewards, values, gamma=0.99, lam=0.95, terminated=terminated)
    # δ = (1 + 0.99·8.3 − 12.5, 1 + 0.99·5.1 − 8.3, 1 − 5.1) = (−3.283, −2.251, −4.1)
    # A₂ = −4.1;  A₁ = −2.251 + 0.9405·(−4.1) = −6.10705;  A₀ = −3.283 + 0.9405·(−6.10705) = −9.0266805
    torch.testing.assert_close(advantages, torch.tensor([[-9.02668, -6.10705, -4.1]]), atol=1e-5, rtol=0)
    assert returns[0, 2] == 1.0
    deltas, _ = gae(rewards, values, gamma=0.99, lam=0.0, terminated=terminated)
    torch.testing.assert_close(deltas, torch.tensor([[-3.283, -2.251, -4.1]]), atol=1e-6, rtol=0)
    advantages, returns = gae(rewards, values, gamma=0.99, lam=1.0, terminated=terminated)
    torch.testing.assert_close(returns, torch.tensor([[2.9701, 1.99, 1.0]]))
    assert torch.equal(advantages, returns - values)


def test_gae_needs_a_bootstrap_where_truncated():
    flags = torch.tensor([[False, True]])
    with pytest.raises(ValueError, match="bootstrap"):
        gae(torch.zeros(1, 2), torch.zeros(1, 2), gamma=1.0, lam=1.0, truncated=flags)
