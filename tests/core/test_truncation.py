import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tokencredit.core.logprobs import token_loss

LOGITS = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]).log() + torch.tensor([[2.0], [-1.0]])
TARGETS = torch.tensor([1, 2])


def on_support(logits, targets, support):
    """The sum of the log-probs on a support, and each of them."""
    order = support.int().argsort(dim=-1, descending=True, stable=True)
    ids = order.masked_fill(~support.gather(-1, order), -1)
    total, stats = token_loss(
        logits, torch.eye(logits.shape[-1]), targets, lambda now, at: now.logprobs.sum(), support=ids
    )
    return total, stats.logprobs


def test_log_probs_on_a_support_by_hand():
    """0.3 / 0.8 and 0.3 / 0.9; the gradient is that of a softmax over the support alone."""
    logits = LOGITS.clone().requires_grad_()
    support = torch.tensor([[True, True, False], [False, True, True]])
    total, logprobs = on_support(logits, TARGETS, support)
    torch.testing.assert_close(logprobs, torch.tensor([3 / 8, 1 / 3]).log())
    total.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-5 / 8, 5 / 8, 0.0], [0.0, -2 / 3, 2 / 3]]))


def draws(seed, rows=4000, vocabulary=200):
    """Logits at temperature 0.7, tokens drawn with top-k 20 and top-p 0.8, their support, and their log μ."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocabulary, generator=generator) / 0.7
    filtered = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits))
    behavior = filtered.softmax(-1)
    tokens = torch.multinomial(behavior, 1, generator=generator).squeeze(-1)
    return logits, tokens, filtered.isfinite(), behavior


def test_on_policy_the_mean_ratio_is_1_only_on_the_support():
    logits, tokens, support, behavior = draws(0)
    log_mu = behavior.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    assert 1 < support.sum(-1).float().mean() < 20
    ratio = (on_support(logits, tokens, support)[1] - log_mu).exp()
    assert float(ratio.mean()) == pytest.approx(1.0, abs=1e-3)
    whole = torch.ones_like(support)
    below = (on_support(logits, tokens, whole)[1] - log_mu).exp()
    torch.testing.assert_close(below, (logits.softmax(-1) * support).sum(-1), rtol=1e-3, atol=1e-4)
    assert below.mean() < 0.9


@given(st.integers(0, 10_000), st.floats(0.1, 2.0))
def test_off_policy_the_expected_ratio_is_1_on_the_support_of_the_draws(seed, moved):
    """Σ_{x ∈ S} μ(x) π_S(x) / μ(x) for a policy that has moved since the draws, summed exactly."""
    logits, _, support, _ = draws(seed, rows=20, vocabulary=40)
    now = logits + moved * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed + 1))

    def expected_ratio(of):
        everything = torch.arange(40).expand(20, 40)
        pi = on_support(now.unsqueeze(1).expand(20, 40, 40), everything, of.unsqueeze(1).expand(20, 40, 40))[1].exp()
        return (pi * of * support).sum(-1)  # μ cancels, and is 0 outside its support

    torch.testing.assert_close(expected_ratio(support), torch.ones(20))
    assert (expected_ratio(torch.ones_like(support)) < 1 - 1e-4).all()
    anew = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, now)).isfinite()
    lost = expected_ratio(anew)
    assert (lost <= 1 + 1e-5).all()
    assert ((lost < 1 - 1e-5) == (anew & ~support).any(-1)).all()
