"""Log-probabilities, entropy and exact KL from hidden states and the output projection, a chunk of tokens at a time.

`token_stats` recomputes a chunk's logits in the backward pass. `token_loss` takes the loss as an argument and forms the
gradient in the forward pass. `core.vocab_projection` implements both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_flags, require_positive, require_shape, require_tensors
from tokencredit.core.vocab_projection import (
    ChunkedLoss,
    ChunkedStats,
    Linear,
    LogitTransform,
    ProjectionRequest,
    TokenLoss,
    TokenStats,
)

CHUNK_LOGITS = 2**22
"""Logits per chunk on a CPU, where chunks that fit the caches are fastest: 17 MB in float32."""

CHUNK_LOGITS_ON_ACCELERATORS = 2**27
"""Logits per chunk on other devices, which large products keep busy: 537 MB in float32."""

MIN_CHUNK = 128
"""Fewest tokens per chunk, however large the vocabulary: each chunk reads the whole projection once more."""


class _ProjectionOptions(TypedDict, total=False):
    """How the functions below form logits, and at which tokens; described in `token_stats`."""

    bias: Tensor | None
    mask: Tensor | None
    temperature: float
    softcap: float | None
    chunk: int | None


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    ref: Linear | None = None,
    entropy: bool = False,
    **projection: Unpack[_ProjectionOptions],
) -> TokenStats:
    """Log-probability, entropy and exact KL of each token, from one projection.

    log π(x) = zₓ − log Σᵥ exp zᵥ, H = −Σᵥ π(v) log π(v) and KL(π ‖ ρ) = Σᵥ π(v) (log π(v) − log ρ(v)), in nats, with
    z = softcap(W h + b) / temperature and softcap(y) = cap · tanh(y / cap) (Gemma Team 2024, arXiv 2408.00118, section
    2). z and the softmax are in float32 at least, also under autocast, which rounds at most W and h.

    For the KL keep the reference's last hidden states (D numbers per token), not its logits (a vocabulary of them): the
    logits are computed here, a chunk at a time.

    Args:
        hidden: h, the last hidden states, [..., D].
        weight: W, the output projection, [vocabulary, D].
        targets: the tokens, int64 [...]; None for no log-probabilities.
        bias: b, [vocabulary].
        mask: bool [...]; positions where it is false are skipped and give 0, whatever they hold.
        temperature: divisor of the logits, above 0: the sampling temperature. It applies to both models.
        softcap: cap of the logits, for models that have one.
        chunk: tokens per chunk; memory holds two or three tensors of chunk × vocabulary. Default: see `CHUNK_LOGITS`.
        ref: (ref_hidden, ref_weight, ref_bias) of the reference ρ, which gets no gradient; None for no KL.
        entropy: compute the entropies.

    Returns:
        The statistics, [...] each, differentiable in hidden, weight and bias.

    Raises:
        ValueError: shapes do not match; a target outside the vocabulary, on a CPU (on a GPU the kernel asserts); a
            temperature, softcap or chunk not above 0.
    """
    kept, linear, request = _kernel_inputs(hidden, weight, targets, ref, entropy, **projection)
    with _targets_in_range(request.targets, weight):
        results = ChunkedStats.apply(*linear, request)  # type: ignore[no-untyped-call]
    return TokenStats(*(None if x is None else _scatter(x, kept, hidden.shape[:-1]) for x in results))


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: TokenLoss,
    *,
    ref: Linear | None = None,
    entropy: bool = False,
    additive: bool = True,
    support: Tensor | None = None,
    **projection: Unpack[_ProjectionOptions],
) -> tuple[Tensor, TokenStats]:
    """A loss of the statistics of `token_stats`, with its gradient formed in the forward pass.

    Knowing the loss, the gradient of a token's statistics is available as soon as they are. A chunk of logits is then
    projected once instead of twice, which saves a quarter of all work on the vocabulary (as in Liger Kernel, Hsu et al.
    2024, arXiv 2410.10989, section 3.2). Without autograd only the loss and the statistics are computed.

    Args:
        hidden: as in `token_stats`, like `weight`, `targets` and the options.
        loss: called with the statistics of some tokens and their slice among all tokens that the mask keeps; returns
            their part of the loss, a scalar.
        ref: as in `token_stats`.
        entropy: the loss needs the entropy.
        additive: the loss is a sum over tokens, so that chunks are independent. If false, `loss` is called once with
            all tokens and may combine them in any way, such as a nonlinear function of a sequence's log-probability;
            if there are several chunks, each is then projected twice.
        support: token ids [..., k], int32 or int64, padded with −1, over which π and all its statistics are
            normalised; the target always counts as one of them. None for the whole vocabulary. With the support that
            a filter such as top_p left of the draws from μ, the expectation of π / μ is exactly 1, on-policy and
            off-policy ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556); over the whole vocabulary it is the
            support's probability.

    Returns:
        The loss, a scalar, differentiable in hidden, weight and bias; and the statistics, [...], without gradient.

    Raises:
        ValueError: as `token_stats`.
    """
    kept, linear, request = _kernel_inputs(hidden, weight, targets, ref, entropy, **projection)
    shape = hidden.shape[:-1]
    if support is not None:
        require_tensors(support=support)
        require_shape("support", support, (*shape, support.shape[-1] if support.dim() else 0))
        if support.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"support has dtype {support.dtype}; it must be torch.int32 or torch.int64, token ids")
        request = request._replace(support=_gather(support, kept))
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in linear)
    with _targets_in_range(request.targets, weight):
        total, *stats = ChunkedLoss.apply(*linear, request, loss, additive, needs_grad)  # type: ignore[no-untyped-call]
    return total, TokenStats(*(None if x is None else _scatter(x, kept, shape) for x in stats))


def _kernel_inputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    ref: Linear | None,
    entropy: bool,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor | None, Linear, ProjectionRequest]:
    """Check the arguments; returns the indices of the rows that the mask keeps, and the request for those rows."""
    require_positive("temperature", temperature)
    if chunk is not None:
        require_positive("chunk", chunk)
    if softcap is not None:
        require_positive("softcap", softcap)
    _require_projection("", hidden, weight, bias)
    shape = hidden.shape[:-1]
    if mask is not None:
        require_flags("mask", mask, shape)
    kept = None if mask is None else mask.flatten().nonzero().squeeze(1)
    if targets is not None:
        require_shape("targets", targets, shape)
        if targets.dtype != torch.int64:
            raise ValueError(f"targets has dtype {targets.dtype}; it must be torch.int64")
        targets = _gather(targets.unsqueeze(-1), kept).squeeze(-1)
    if ref is not None:
        _require_projection("ref_", *ref)
        require_shape("ref_hidden without its last axis", ref[0][..., 0], shape)
        require_shape("ref_weight without its last axis", ref[1][:, 0], weight.shape[:1])
        ref_bias = None if ref[2] is None else ref[2].detach()
        ref = _gather(ref[0].detach(), kept), ref[1].detach(), ref_bias
    transform = LogitTransform(float(temperature), None if softcap is None else float(softcap), _dtype(hidden, weight))
    if chunk is None:
        logits = CHUNK_LOGITS if weight.device.type == "cpu" else CHUNK_LOGITS_ON_ACCELERATORS
        chunk = max(logits // max(weight.shape[0], 1), MIN_CHUNK)
    return kept, (_gather(hidden, kept), weight, bias), ProjectionRequest(targets, ref, transform, int(chunk), entropy)


def _require_projection(prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require_tensors(**{f"{prefix}hidden": hidden, f"{prefix}weight": weight})
    if weight.dim() != 2:
        raise ValueError(f"{prefix}weight has shape {tuple(weight.shape)}; it must be [vocabulary, D]")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{prefix}hidden has shape {tuple(hidden.shape)}; its last axis must be {weight.shape[1]}")
    if bias is not None:
        require_shape(f"{prefix}bias", bias, weight.shape[:1])


@contextmanager
def _targets_in_range(targets: Tensor | None, weight: Tensor) -> Iterator[None]:
    """Turn a CPU kernel's error about a target outside the vocabulary into a `ValueError`."""
    try:
        yield
    except RuntimeError as error:
        # Kernels check every target anyway. A check before them would stall a GPU's queue, and after a GPU's assertion
        # the device is unusable.
        if targets is not None and targets.device.type == "cpu" and targets.numel() > 0:
            low, high = (int(x) for x in targets.aminmax())
            if low < 0 or high >= len(weight):
                raise ValueError(f"targets run from {low} to {high}; they must lie in [0, {len(weight)})") from error
        raise


def _gather(x: Tensor, kept: Tensor | None) -> Tensor:
    """[..., D] → [rows, D], the rows at these indices."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if kept is None else rows.index_select(0, kept)


def _scatter(x: Tensor, kept: Tensor | None, shape: torch.Size) -> Tensor:
    """[rows] → `shape`, 0 at all other positions."""
    return x.view(shape) if kept is None else x.new_zeros(shape.numel()).index_copy(0, kept, x).view(shape)


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype if it is on, else the wider of the operands'; see `LogitTransform` for its use."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)
