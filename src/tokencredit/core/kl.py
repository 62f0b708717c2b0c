"""Kullback-Leibler divergence of the policy from the reference: KL(π ‖ ρ) = E_{x∼π}[log π(x) − log ρ(x)], in nats.

The first argument is always the distribution that the tokens were sampled from. Averages of k1 and k3 over such tokens
are unbiased estimates of the divergence. Formulas: J. Schulman, "Approximating KL divergence" (2020),
http://joschu.net/blog/kl-approx.html. A low-noise estimate need not give a good gradient when it is differentiated as a
loss; each docstring states the gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_choice, require_shape, require_tensors
from tokencredit.core.masked import at_least_float32, zero_outside


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """log π(x) − log ρ(x) per token: unbiased, and noisy (a single token's estimate is often negative).

    Its expected gradient as a loss is 0, so it belongs in the reward and not in the loss.

    Args:
        logprobs: log π of tokens sampled from π; any shape.
        ref_logprobs: log ρ of the same tokens; the same shape.
        mask: bool, the same shape; the result is 0 where it is false.

    Returns:
        Nats per token, the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    require_tensors(logprobs=logprobs)
    require_shape("ref_logprobs", ref_logprobs, logprobs.shape)
    return zero_outside(at_least_float32(logprobs) - at_least_float32(ref_logprobs), mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """½ (log π(x) − log ρ(x))² per token: slightly biased while π is near ρ; low variance, never negative.

    Its gradient as a loss, unlike its value, is unbiased: E[k1 · ∇log π] = ∇KL(π ‖ ρ).

    Arguments, result and errors as in `k1`.
    """
    return 0.5 * k1(logprobs, ref_logprobs, mask).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """r − 1 − log r with r = ρ(x)/π(x), per token: unbiased, low variance while π is near ρ, never negative.

    Its variance is unbounded where ρ has mass that π has lost, since r is large there. Its gradient as a loss is that
    of the reverse divergence, ∇KL(ρ ‖ π), which agrees with ∇KL(π ‖ ρ) only near π = ρ.

    Arguments, result and errors as in `k1`.
    """
    log_ratio = -k1(logprobs, ref_logprobs, mask)
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators that need only the log-probabilities of the sampled tokens."""


def kl_estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Apply the estimator `name` (k1, k2 or k3); arguments and result as there.

    Raises:
        ValueError: unknown estimator, or the shapes differ.
    """
    require_choice("kl estimator", name, KL_ESTIMATORS)
    return KL_ESTIMATORS[name](logprobs, ref_logprobs, mask)


def exact_kl(log_policy: Tensor, log_reference: Tensor) -> Tensor:
    """KL(π ‖ ρ) = Σᵥ π(v) (log π(v) − log ρ(v)), over the last axis: no sampling noise, never negative.

    A token with π(v) = 0 adds 0; a token with ρ(v) = 0 and π(v) > 0 makes the divergence infinite. For a language
    model's vocabulary use `logprobs.token_kl`, which never holds all logits at once.

    Args:
        log_policy: log π, normalised over the last axis, [..., vocabulary].
        log_reference: log ρ, the same shape.

    Returns:
        Nats, [...].

    Raises:
        ValueError: the shapes differ.
    """
    require_tensors(log_policy=log_policy)
    require_shape("log_reference", log_reference, log_policy.shape)
    log_policy, log_reference = at_least_float32(log_policy), at_least_float32(log_reference)
    impossible = log_policy == -torch.inf
    log_policy, log_reference = log_policy.masked_fill(impossible, 0.0), log_reference.masked_fill(impossible, 0.0)
    terms = log_policy.exp() * (log_policy - log_reference)
    return terms.masked_fill(impossible, 0.0).sum(dim=-1)
