"""Log-probabilities, entropy and exact KL from hidden states and the output projection, a few tokens at a time.

`token_stats` computes a chunk's projection again in the backward pass; `token_loss`, which is told what will be
minimised, forms the gradient at once. See `core.projection` for both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokencredit.core.checks import require_flags, require_positive, require_shape
from tokencredit.core.projection import ChunkedLoss, ChunkedStats, Linear, Shaping, TokenLoss, TokenStats

CHUNK_LOGITS = 2**22
"""Logits that exist at once on a CPU, where chunks that stay near the caches are the fastest: 17 MB in float32."""

CHUNK_LOGITS_ON_ACCELERATORS = 2**27
"""The same on other devices, which need large products to be busy: 537 MB in float32."""

LEAST_CHUNK = 128
"""Tokens a chunk at least, however large the vocabulary: each chunk reads the whole projection once more."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of the distribution it was drawn from if asked for.

    log π(x) = zₓ − log Σᵥ exp zᵥ and H = −Σᵥ π(v) log π(v), in nats, with z = softcap(W h + b) / temperature and
    softcap(y) = cap · tanh(y / cap) (Gemma Team 2024, arXiv 2408.00118, section 2). z and the softmax are in float32 at
    least, under autocast too, where at most W and h are rounded.

    Args:
        hidden: h, the last hidden states, [..., D].
        weight: W, the output projection, [vocabulary, D].
        targets: the tokens, int64 [...].
        bias: b, [vocabulary].
        mask: bool [...]; tokens where it is false cost nothing, give 0, and may hold anything.
        temperature: what the logits are divided by, above 0: the one the tokens were drawn with.
        softcap: the cap of a model that has one.
        chunk: tokens whose logits exist at once, two or three tensors of that size. Default: see `CHUNK_LOGITS`.
        entropy: whether the second result is wanted.

    Returns:
        Log-probabilities [...] and entropies [...] (or None), differentiable in hidden, weight and bias.

    Raises:
        ValueError: shapes do not match; a target outside the vocabulary, on a CPU (on a GPU that is an assertion of the
            kernel's); a temperature, softcap or chunk not above 0.
    """
    stats = token_stats(
        hidden,
        weight,
        targets,
        bias=bias,
        mask=mask,
        temperature=temperature,
        softcap=softcap,
        chunk=chunk,
        entropy=entropy,
    )
    assert stats.logprobs is not None
    return stats.logprobs, stats.entropy


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Exact KL(π ‖ ρ) = Σᵥ π(v) (log π(v) − log ρ(v)) at each token, over the whole vocabulary, in nats.

    Keep the reference's last hidden states (D numbers a token), not its logits (a vocabulary of them): the logits are
    computed here, a chunk at a time. Temperature and softcap apply to both sides.

    Args:
        hidden: the policy's last hidden states, [..., D].
        weight: its output projection, [vocabulary, D].
        ref_hidden: the reference's last hidden states, [..., D_ref].
        ref_weight: its output projection, [vocabulary, D_ref].
        bias: of the policy's projection, [vocabulary].
        ref_bias: of the reference's.
        mask: as in `token_logprobs`.
        temperature: as in `token_logprobs`.
        softcap: as in `token_logprobs`.
        chunk: as in `token_logprobs`.

    Returns:
        [...], differentiable in the policy's hidden states, weight and bias; none reaches the reference.

    Raises:
        ValueError: as `token_logprobs`.
    """
    stats = token_stats(
        hidden,
        weight,
        None,
        bias=bias,
        ref=(ref_hidden, ref_weight, ref_bias),
        mask=mask,
        temperature=temperature,
        softcap=softcap,
        chunk=chunk,
    )
    assert stats.kl is not None
    return stats.kl


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    *,
    bias: Tensor | None = None,
    ref: Linear | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
) -> TokenStats:
    """Log-probability, entropy and exact KL from one projection, for a loss that needs more than one of them.

    Args:
        hidden: as in `token_logprobs`, like all that are not named here.
        weight: see there.
        targets: the tokens; None leaves the log-probabilities out.
        bias: see there.
        ref: (ref_hidden, ref_weight, ref_bias) of `token_kl`; None leaves the KL out.
        mask: see there.
        temperature: see there.
        softcap: see there.
        chunk: see there.
        entropy: whether the entropy is wanted.

    Raises:
        ValueError: as `token_logprobs`.
    """
    shape = hidden.shape[:-1]
    places, inputs = _checked(hidden, weight, targets, bias, ref, mask, temperature, softcap, chunk)
    with _targets_in_range(inputs[3], weight):
        results = ChunkedStats.apply(*inputs, entropy)  # type: ignore[no-untyped-call]
    return TokenStats(*(None if x is None else _unrows(x, places, shape) for x in results))


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: TokenLoss,
    *,
    bias: Tensor | None = None,
    ref: Linear | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    entropy: bool = False,
    additive: bool = True,
) -> tuple[Tensor, TokenStats]:
    """A loss of the statistics of `token_stats`, which forms its gradient where it forms the logits.

    The gradient that a token's statistics receive is known as soon as they are, if the loss is given: a chunk of logits
    is then projected once and not twice, a quarter of all work on the vocabulary (as in Liger Kernel, Hsu et al. 2024,
    arXiv 2410.10989, section 3.2). Without autograd nothing but the loss and the statistics is computed.

    Args:
        hidden: as in `token_logprobs`, like all that are not named here.
        weight: see there.
        targets: see there.
        loss: called with the statistics of some tokens and with where these stand among all that the mask keeps;
            returns their part of the loss, a scalar.
        bias: see there.
        ref: as in `token_stats`.
        mask: see there.
        temperature: see there.
        softcap: see there.
        chunk: see there.
        entropy: whether the loss needs the entropy.
        additive: the loss is a sum over tokens, so chunks may come one after another. If not, `loss` is called once
            with all tokens and may join them in any way, such as a sequence's log-probability in a nonlinear function;
            where they take more than one chunk, each is then projected twice.

    Returns:
        The loss, a scalar, differentiable in hidden, weight and bias; and the statistics, [...], which are not.

    Raises:
        ValueError: as `token_logprobs`.
    """
    shape = hidden.shape[:-1]
    places, inputs = _checked(hidden, weight, targets, bias, ref, mask, temperature, softcap, chunk)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:3])
    with _targets_in_range(inputs[3], weight):
        total, *stats = ChunkedLoss.apply(*inputs, entropy, loss, additive, wanted)  # type: ignore[no-untyped-call]
    return total, TokenStats(*(None if x is None else _unrows(x, places, shape) for x in stats))


def _checked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    bias: Tensor | None,
    ref: Linear | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk: int | None,
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Where the rows that the mask keeps stand, and with these alone the first arguments of the functions above."""
    require_positive("temperature", temperature)
    if chunk is not None:
        require_positive("chunk", chunk)
    if softcap is not None:
        require_positive("softcap", softcap)
    shape = hidden.shape[:-1]
    _require_projection("", hidden, weight, bias)
    if mask is not None:
        require_flags("mask", mask, shape)
    places = None if mask is None else mask.flatten().nonzero().squeeze(1)
    if targets is not None:
        require_shape("targets", targets, shape)
        if targets.dtype != torch.int64:
            raise ValueError(f"targets has dtype {targets.dtype}; it must be torch.int64")
        targets = _rows(targets.unsqueeze(-1), places).squeeze(-1)
    if ref is not None:
        _require_projection("ref_", *ref)
        require_shape("ref_hidden without its last axis", ref[0][..., 0], shape)
        require_shape("ref_weight without its last axis", ref[1][:, 0], weight.shape[:1])
        ref_bias = None if ref[2] is None else ref[2].detach()
        ref = _rows(ref[0].detach(), places), ref[1].detach(), ref_bias
    shaping = Shaping(float(temperature), None if softcap is None else float(softcap), _dtype(hidden, weight))
    chunk = _default_chunk(weight) if chunk is None else int(chunk)
    return places, (_rows(hidden, places), weight, bias, targets, ref, shaping, chunk)


def _require_projection(prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{prefix}weight has shape {tuple(weight.shape)}; it must be [vocabulary, D]")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{prefix}hidden has shape {tuple(hidden.shape)}; its last axis must be {weight.shape[1]}")
    if bias is not None:
        require_shape(f"{prefix}bias", bias, weight.shape[:1])


def _default_chunk(weight: Tensor) -> int:
    logits = CHUNK_LOGITS if weight.device.type == "cpu" else CHUNK_LOGITS_ON_ACCELERATORS
    return max(logits // max(weight.shape[0], 1), LEAST_CHUNK)


@contextmanager
def _targets_in_range(targets: Tensor | None, weight: Tensor) -> Iterator[None]:
    """Turn a CPU kernel's error about a target outside the vocabulary into a `ValueError`."""
    try:
        yield
    except RuntimeError as error:
        # Kernels check every target anyway. To look before them would empty a GPU's queue; after a GPU's assertion
        # nothing can be looked at.
        if targets is not None and targets.device.type == "cpu" and targets.numel() > 0:
            low, high = (int(x) for x in targets.aminmax())
            if low < 0 or high >= len(weight):
                raise ValueError(f"targets run from {low} to {high}; they must lie in [0, {len(weight)})") from error
        raise


def _rows(x: Tensor, places: Tensor | None) -> Tensor:
    """[..., D] → [rows, D], only those at these places."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if places is None else rows.index_select(0, places)


def _unrows(x: Tensor, places: Tensor | None, shape: torch.Size) -> Tensor:
    """[rows] → the shape it came from, 0 elsewhere."""
    return x.view(shape) if places is None else x.new_zeros(shape.numel()).index_copy(0, places, x).view(shape)


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Autocast's dtype if it is on, or else the wider of the operands'; what is computed in it: see `Shaping`."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)
