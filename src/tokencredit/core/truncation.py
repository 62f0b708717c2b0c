"""Log-probs on a truncated support: of the distribution that filters such as top_p leave."""

from __future__ import annotations

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_shape, require_tensors
from tokencredit.core.masked import at_least_float32


def truncated_logprobs(logits: Tensor, targets: Tensor, support: Tensor) -> Tensor:
    """Log-probs of tokens under the softmax renormalised over a support S.

    log π_S(x) = z_x − log Σ_{v ∈ S} e^{z_v} for x in S, with the gradient through the renormalised softmax; −∞, without
    a gradient, for x outside.

    A filter such as top_p draws from μ, renormalised over the support that it leaves. If π is taken over the whole
    vocabulary, the expectation of π / μ over the draws is the probability of that support, below 1. If π is filtered
    anew, its support may hold tokens that μ never draws. Over the support of the draws, kept with them, the expectation
    of π_S / μ is exactly 1, on-policy and off-policy: "keep sampling mask", DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        logits: z, `[..., vocabulary]`, divided by the sampling temperature.
        targets: x, int64 `[...]`.
        support: S, bool `[..., vocabulary]`; or its token ids, int64 `[..., k]`, each once, padded with −1.

    Returns:
        `[...]`, in float32 at least.

    Raises:
        ValueError: shapes differ, or the support is neither bool nor int64.
    """
    require_tensors(logits=logits, targets=targets, support=support)
    require_shape("targets", targets, logits.shape[:-1])
    if support.dtype == torch.bool:
        require_shape("support", support, logits.shape)
    elif support.dtype == torch.int64:
        require_shape("support", support, (*targets.shape, support.shape[-1] if support.dim() else 0))
    else:
        raise ValueError(f"support has dtype {support.dtype}; it must be torch.bool, or torch.int64 for token ids")
    logits, x = at_least_float32(logits), targets.unsqueeze(-1)
    own = logits.gather(-1, x)
    if support.dtype == torch.bool:
        inside = support.gather(-1, x)
        kept, chosen = logits, support
    else:
        inside = (support == x).any(-1, keepdim=True)
        kept, chosen = logits.gather(-1, support.clamp(min=0)), support >= 0
    # A token outside joins the support for its own number, which is replaced: an empty sum would have a NaN gradient.
    kept = torch.cat([kept.masked_fill(~chosen, -torch.inf), own.masked_fill(inside, -torch.inf)], dim=-1)
    logprobs = own - kept.logsumexp(-1, keepdim=True)
    return logprobs.masked_fill(~inside, -torch.inf).squeeze(-1)
