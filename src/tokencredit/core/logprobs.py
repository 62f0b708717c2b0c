"""Log-probabilities, entropy and exact KL from hidden states and the output projection, a few tokens at a time.

The logits of a batch, [batch, time, vocabulary], are the largest tensor of language-model training by far, and autograd
would keep several of that size. Here they never exist: the projection is computed for a chunk of tokens, reduced to a
few numbers a token, and computed again in the backward pass. The price is one more projection; the memory is bounded
by chunk × vocabulary whatever the batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokencredit.core.checks import require_flags, require_positive, require_shape
from tokencredit.core.masked import at_least_float32

CHUNK_LOGITS = 2**22
"""Logits that exist at once on a CPU, where chunks that stay near the caches are the fastest: 17 MB in float32."""

CHUNK_LOGITS_ON_ACCELERATORS = 2**27
"""The same on other devices, which need large products to be busy: 537 MB in float32."""

LEAST_CHUNK = 128
"""Tokens a chunk at least, however large the vocabulary: each chunk reads the whole projection once more."""


class TokenStats(NamedTuple):
    """What `token_stats` gives for each token; None for what was not asked for."""

    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None


class _Scaling(NamedTuple):
    """How a projection becomes logits: z = cap · tanh(y / cap) / temperature, without the tanh if there is no cap."""

    temperature: float
    softcap: float | None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        z = at_least_float32(torch.nn.functional.linear(hidden, weight, bias))
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | float | None:
        """dz/dy = (1 − tanh²(y / cap)) / temperature; None stands for 1."""
        if self.softcap is not None:
            tanh = z * (self.temperature / self.softcap)
            return tanh.square_().neg_().add_(1.0).div_(self.temperature)
        return None if self.temperature == 1.0 else 1 / self.temperature


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
    softcap(y) = cap · tanh(y / cap) (Gemma Team 2024, arXiv 2408.00118, section 2). The softmax is in float32 at least.

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
        ValueError: shapes do not match; a target outside the vocabulary; a temperature, softcap or chunk not above 0.
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
    ref: tuple[Tensor, Tensor, Tensor | None] | None = None,
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
    require_positive("temperature", temperature)
    if chunk is not None:
        require_positive("chunk", chunk)
    if softcap is not None:
        require_positive("softcap", softcap)
    shape = hidden.shape[:-1]
    _require_projection("", hidden, weight, bias)
    if mask is not None:
        require_flags("mask", mask, shape)
    hidden = _rows(hidden, mask)
    if targets is not None:
        require_shape("targets", targets, shape)
        targets = _require_targets(_rows(targets.unsqueeze(-1), mask).squeeze(-1), weight.shape[0])
    if ref is not None:
        _require_projection("ref_", *ref)
        require_shape("ref_hidden without its last axis", ref[0][..., 0], shape)
        require_shape("ref_weight without its last axis", ref[1][:, 0], weight.shape[:1])
        ref_bias = None if ref[2] is None else ref[2].detach()
        ref = (_rows(ref[0].detach(), mask), ref[1].detach(), ref_bias)
        ref = _same_dtype(*ref)
    hidden, weight, bias = _same_dtype(hidden, weight, bias)
    scaling = _Scaling(float(temperature), None if softcap is None else float(softcap))
    chunk = _default_chunk(weight) if chunk is None else int(chunk)
    results = _ChunkedStats.apply(hidden, weight, bias, targets, ref, scaling, chunk, entropy)  # type: ignore[no-untyped-call]
    return TokenStats(*(None if x is None else _unrows(x, mask, shape) for x in results))


class _ChunkedStats(torch.autograd.Function):
    """(log-probabilities, entropy, KL) of rows of hidden states. With p = softmax(z):

    ∂ log p(x)/∂z = 1ₓ − p,   ∂H/∂z = −p (log p + H),   ∂KL/∂z = p (log p − log q − KL).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor | None,
        ref: tuple[Tensor, Tensor, Tensor | None] | None,
        scaling: _Scaling,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows = hidden.shape[0]
        log_sums = at_least_float32(hidden.new_empty(0)).new_empty(rows)
        logprobs = torch.empty_like(log_sums) if targets is not None else None
        entropy = torch.empty_like(log_sums) if with_entropy else None
        kl = torch.empty_like(log_sums) if ref is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, rows, chunk):
                part = slice(start, start + chunk)
                z = scaling.logits(hidden[part], weight, bias)
                log_sums[part] = z.logsumexp(dim=-1)
                log_p = z.sub_(log_sums[part, None])
                if logprobs is not None and targets is not None:
                    logprobs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
                if entropy is not None or kl is not None:
                    p = log_p.exp()
                if entropy is not None:
                    entropy[part] = -torch.linalg.vecdot(p, log_p)
                if kl is not None and ref is not None:
                    log_q = scaling.logits(ref[0][part], ref[1], ref[2]).log_softmax(dim=-1)
                    kl[part] = torch.linalg.vecdot(p, log_p.sub_(log_q))
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, kl, *(ref or (None, None, None)))
        ctx.scaling, ctx.chunk = scaling, chunk
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are kept in float32, so that many small parts do not vanish in half precision.
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=at_least_float32(weight[:0]).dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=at_least_float32(bias[:0]).dtype) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], ctx.chunk):
                part = slice(start, start + ctx.chunk)
                grad = _projection_gradient(ctx, part, *grads)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[part])
                if grad_weight is not None and grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, hidden[part])
                elif grad_weight is not None:
                    grad_weight += grad.T @ hidden[part]
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0, dtype=grad_bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _projection_gradient(
    ctx: Any, part: slice, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_kl: Tensor | None
) -> Tensor:
    """The gradient of a chunk's projection W h + b, computed again from the hidden states, [chunk, vocabulary].

    With a, e and k the gradients that arrive at log p(x), H and KL, the three formulas above add up to
    a 1ₓ + p [(k − e) log p − k log q − (a + e H + k KL)].
    """
    hidden, weight, bias, targets, log_sums, entropy, kl, *ref = ctx.saved_tensors
    z = ctx.scaling.logits(hidden[part], weight, bias)
    slope = ctx.scaling.slope(z)
    log_p = z.sub_(log_sums[part, None])
    constant = torch.zeros_like(log_sums[part, None])
    if grad_logprobs is not None:
        constant -= grad_logprobs[part, None]
    bracket = None
    if grad_entropy is not None:
        constant -= grad_entropy[part, None] * entropy[part, None]
        bracket = log_p * -grad_entropy[part, None]
    if grad_kl is not None:
        constant -= grad_kl[part, None] * kl[part, None]
        log_q = ctx.scaling.logits(ref[0][part], ref[1], ref[2]).log_softmax(dim=-1)
        towards = (log_p - log_q).mul_(grad_kl[part, None])
        bracket = towards if bracket is None else bracket.add_(towards)
    p = log_p.exp_()
    grad: Tensor = p.mul_(constant) if bracket is None else bracket.add_(constant).mul_(p)
    if grad_logprobs is not None:
        grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
    grad = grad if slope is None else grad.mul_(slope)
    return grad.to(weight.dtype)


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


def _require_targets(targets: Tensor, vocabulary: int) -> Tensor:
    if targets.dtype != torch.int64:
        raise ValueError(f"targets has dtype {targets.dtype}; it must be torch.int64")
    if targets.numel() > 0:
        low, high = (int(x) for x in targets.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"targets run from {low} to {high}; they must lie in [0, {vocabulary})")
    return targets


def _rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """[..., D] → [rows, D], only the rows that the mask keeps."""
    return x.reshape(-1, x.shape[-1]) if mask is None else x[mask]


def _unrows(x: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
    """[rows] → the shape it came from, 0 where the mask is false."""
    return x.view(shape) if mask is None else x.new_zeros(shape).masked_scatter(mask, x)


def _same_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bring the operands of a projection to the dtype autocast would use, or else to the widest of theirs."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
