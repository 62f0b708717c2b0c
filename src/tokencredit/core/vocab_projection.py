"""The output projection and its gradient, a chunk of tokens at a time: autograd functions behind `core.logprobs`.

The logits of a batch, [batch, time, vocabulary], are the largest tensor of language-model training by far, and autograd
would keep several of that size. They never exist here: each chunk of tokens is projected and reduced to a few numbers
per token, so that memory is bounded by chunk × vocabulary, whatever the batch.

Logits are in float32 at least. In bfloat16, with 8 bits, a logit of 16 is rounded to the nearest 1/8, and two passes
that round differently disagree by that much. In half precision only a product's operands are rounded, not its result.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokencredit.core.masked import at_least_float32

__all__ = ["Linear", "TokenLoss", "TokenStats"]

WEIGHT_ROWS = 4096
"""Rows of the weight, or of its gradient, that are converted to another precision at once."""

LEAST_LOGIT = -1e9
"""Logit of a token outside the support: its probability is 0, and 0 times its finite log-prob is 0."""

PRECISION_LOCK = threading.Lock()
"""Held while the process-wide matmul precision is changed."""


class TokenStats(NamedTuple):
    """Log-probability, entropy and exact KL of each token; None where not requested."""

    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None


TokenLoss = Callable[[TokenStats, slice], Tensor]
"""Maps the statistics of some tokens, and their slice among all tokens, to their part of a loss, a scalar."""

Linear = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [rows, D], weight [vocabulary, D] and bias [vocabulary] of a projection."""


class LogitTransform(NamedTuple):
    """Softcap and temperature: z = cap · tanh(y / cap) / temperature of a projection y; no tanh without a cap.

    In half precision, `dtype` is that of the gradient products; all else is in float32 at least, see `project`.
    """

    temperature: float
    softcap: float | None
    dtype: torch.dtype

    def cast(self, linear: Linear) -> Linear:
        """The operands in `dtype`."""
        hidden, weight, bias = linear
        return hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def operands(self, linear: Linear) -> Linear:
        """Cast the operands where that saves `project` a copy of the weight per chunk."""
        return self.cast(linear) if linear[1].is_cuda or self.dtype.itemsize >= 4 else linear

    def buffer(self, linear: Linear, size: int) -> Tensor:
        """Memory for the logits of at most `size` rows, in float32 at least."""
        hidden, weight, _ = linear
        rows, dtype = min(size, len(hidden)), torch.promote_types(self.dtype, torch.float32)
        if faster_transposed(hidden.device, self.dtype):
            return weight.new_empty(len(weight), rows, dtype=dtype).T
        return weight.new_empty(rows, len(weight), dtype=dtype)

    def logits(self, linear: Linear, part: slice, buffer: Tensor) -> Tensor:
        """Logits of some rows, written to the buffer; `linear` is a result of `operands`."""
        hidden, weight, bias = linear
        hidden = hidden[part]
        z = buffer[: len(hidden)]
        project(hidden, weight, self.dtype, z)
        if bias is not None:
            z.add_(bias)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)


class ProjectionRequest(NamedTuple):
    """What to compute from a projection."""

    targets: Tensor | None
    """`[rows]`; None for no log-probabilities."""
    ref: Linear | None
    """The reference's projection of the same rows; None for no KL."""
    transform: LogitTransform
    size: int
    """Rows per chunk."""
    entropy: bool = False
    support: Tensor | None = None
    """Token ids `[rows, k]`, padded with −1, over which each row is normalised; its target always counts."""


class Projection:
    """Operands of a request, and the memory that all chunks share: allocating per chunk is slow."""

    def __init__(self, linear: Linear, request: ProjectionRequest, gradient: bool = False) -> None:
        """Cast the operands and allocate, also for gradients in half precision if there are to be any."""
        transform = request.transform
        self.request, self.linear = request, transform.operands(linear)
        self.ref = None if request.ref is None else transform.operands(request.ref)
        self.logits = transform.buffer(self.linear, request.size)
        self.gradient: Tensor | None = None
        if gradient and transform.dtype != self.logits.dtype:  # else the gradient overwrites the logits
            self.gradient = torch.empty_like(self.logits, dtype=transform.dtype)

    def parts(self) -> Iterator[slice]:
        """The rows of each chunk."""
        return row_slices(self.linear[0], self.request.size)


class Chunk:
    """Statistics of a few rows and what their gradient needs, in as few logit-sized tensors as possible.

    With y = z − max z, S = Σᵥ exp y and p = exp(y) / S:

    log p(x) = y(x) − log S,   H = log S − Σ p y,   KL = Σ p (y − log q) − log S,
    ∂ log p(x)/∂z = 1ₓ − p,   ∂H/∂z = −p (log p + H),   ∂KL/∂z = p (log p − log q − KL).
    """

    def __init__(self, part: slice, projection: Projection) -> None:
        """Compute the statistics; overwrites the shared memory."""
        targets, ref, transform, _, entropy, support = projection.request
        z = transform.logits(projection.linear, part, projection.logits)
        self.transform, self.half_gradient = transform, projection.gradient
        self.targets = None if targets is None else targets[part, None]
        if support is not None and self.targets is not None:
            ids = torch.where(support[part] < 0, self.targets, support[part].long())
            kept = torch.cat([ids, self.targets], dim=-1)
            z.masked_fill_(torch.ones_like(z, dtype=torch.bool).scatter_(-1, kept, False), LEAST_LOGIT)
        self.max_logit = z.amax(dim=-1, keepdim=True)
        y = z.sub_(self.max_logit)
        target_y = None if self.targets is None else y.gather(-1, self.targets)
        needs_y = entropy or ref is not None or transform.softcap is not None
        self.exp_y = y.exp() if needs_y else y.exp_()
        self.y = y if needs_y else None
        self.sum = self.exp_y.sum(dim=-1, keepdim=True)
        self.log_sum = log_sum = self.sum.log()
        self.log_ratio: Tensor | None = None
        entropies = kl = None
        if entropy:
            entropies = (log_sum - self._expectation(y)).squeeze(-1)
        if projection.ref is not None:
            ref_logits = transform.logits(projection.ref, part, transform.buffer(projection.ref, len(z)))
            self.log_ratio = y - ref_logits.log_softmax(dim=-1)
            kl = (self._expectation(self.log_ratio) - log_sum).squeeze(-1)
        self.stats = TokenStats(None if target_y is None else (target_y - log_sum).squeeze(-1), entropies, kl)

    def _expectation(self, x: Tensor) -> Tensor:
        """Σ p x, [rows, 1]."""
        dot: Tensor = torch.linalg.vecdot(self.exp_y, x)
        return dot.unsqueeze(-1) / self.sum

    def gradient(self, grads: TokenStats) -> Tensor:
        """Gradient of the projection, [rows, vocabulary]; overwrites the logits.

        With a, e and k the incoming gradients of log p(x), H and KL, the formulas above add up to
        a 1ₓ + p [k (y − log q) − e y − (a + e H + k KL + (k − e) log S)].
        """
        constant = torch.zeros_like(self.sum)
        bracket = None
        if grads.logprobs is not None:
            constant -= grads.logprobs[:, None]
        if grads.entropy is not None and self.stats.entropy is not None and self.y is not None:
            e = grads.entropy[:, None]
            constant -= e * (self.stats.entropy[:, None] - self.log_sum)
            bracket = self.y * (-e / self.sum)
        if grads.kl is not None and self.stats.kl is not None and self.log_ratio is not None:
            k = grads.kl[:, None]
            constant -= k * (self.stats.kl[:, None] + self.log_sum)
            kl_term = self.log_ratio.mul_(k / self.sum)
            bracket = kl_term if bracket is None else bracket.add_(kl_term)
        constant /= self.sum
        grad: Tensor = self.exp_y.mul_(constant) if bracket is None else bracket.add_(constant).mul_(self.exp_y)
        if grads.logprobs is not None and self.targets is not None:
            grad.scatter_add_(-1, self.targets, grads.logprobs[:, None])
        temperature, softcap, _ = self.transform
        if softcap is not None and self.y is not None:
            # dz/dy = (1 − tanh²(y / cap)) / temperature, and tanh(y / cap) = z · temperature / cap
            tanh = self.y.add_(self.max_logit).mul_(temperature / softcap)
            grad.mul_(tanh.square_().neg_().add_(1.0).div_(temperature))
        elif temperature != 1.0:
            grad.div_(temperature)
        return grad if self.half_gradient is None else self.half_gradient[: len(grad)].copy_(grad)


class Gradients:
    """Accumulates the gradients of hidden states, weight and bias over chunks, as far as they are needed.

    Accumulation is in float32, so that many small parts do not vanish in half precision.
    """

    def __init__(self, needed: Sequence[bool], operands: Linear, projection: Projection) -> None:
        """Allocate the accumulators, and cast the operands to the dtype of the products."""
        self.operands, self.linear = operands, projection.request.transform.cast(projection.linear)
        self.empty = True
        self.sums = [
            torch.empty_like(x, dtype=at_least_float32(x[:0]).dtype) if need and x is not None else None
            for need, x in zip(needed, operands, strict=False)
        ]

    def add(self, part: slice, grad: Tensor) -> None:
        """Accumulate a chunk, from the gradient of its projection."""
        hidden, weight, _ = self.linear
        hidden_grad, weight_grad, bias_grad = self.sums
        if hidden_grad is not None and hidden_grad.dtype == grad.dtype:
            torch.mm(grad, weight, out=hidden_grad[part])
        elif hidden_grad is not None:
            hidden_grad[part] = grad @ weight
        # The first chunk is written, not added to zeros: a weight's gradient is as large as the weight.
        first, self.empty = self.empty, False
        if weight_grad is not None and weight_grad.dtype == grad.dtype:
            torch.addmm(weight_grad, grad.T, hidden[part], beta=0.0 if first else 1.0, out=weight_grad)
        elif weight_grad is not None:
            # In blocks of rows: the chunk's gradient, and its copy in the sum's dtype, would be as large as the weight.
            for rows in row_slices(weight_grad, WEIGHT_ROWS):
                rows_grad = grad[:, rows].T @ hidden[part]
                weight_grad[rows].copy_(rows_grad) if first else weight_grad[rows].add_(rows_grad)
        if bias_grad is not None:
            chunk_grad = grad.sum(dim=0, dtype=bias_grad.dtype)
            bias_grad.copy_(chunk_grad) if first else bias_grad.add_(chunk_grad)

    def results(self) -> tuple[Tensor | None, ...]:
        """The three gradients, each in the dtype of its operand."""
        return tuple(
            None if x is None or operand is None else x.to(operand.dtype)
            for x, operand in zip(self.sums, self.operands, strict=True)
        )


class ChunkedStats(torch.autograd.Function):
    """Statistics of all rows, with the logits recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: ProjectionRequest
    ) -> tuple[Tensor | None, ...]:
        """The statistics, each `[rows]` or None."""
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection((hidden, weight, bias), request)
            chunks = [Chunk(part, projection).stats for part in projection.parts()]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.request = request
        return concatenated(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias from those of the statistics."""
        operands = ctx.saved_tensors
        with torch.autocast(operands[0].device.type, enabled=False):
            projection = Projection(operands, ctx.request, gradient=True)
            gradients = Gradients(ctx.needs_input_grad, operands, projection)
            for part in projection.parts():
                stats_grad = TokenStats(*(None if g is None else g[part] for g in grads))
                gradients.add(part, Chunk(part, projection).gradient(stats_grad))
        return *gradients.results(), None


class ChunkedLoss(torch.autograd.Function):
    """A loss of the statistics, and the statistics, with the gradient of the loss formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        request: ProjectionRequest,
        loss: TokenLoss,
        additive: bool,
        needs_grad: bool,
    ) -> tuple[Tensor | None, ...]:
        """The loss and the statistics; forms the gradients too if `needs_grad`."""
        operands = hidden, weight, bias
        with torch.autocast(hidden.device.type, enabled=False):
            projection = Projection(operands, request, gradient=needs_grad)
            gradients = Gradients(ctx.needs_input_grad, operands, projection) if needs_grad else None
            passes = one_pass if additive or len(hidden) <= request.size else two_passes
            total, stats = passes(projection, loss, gradients)
        ctx.mark_non_differentiable(*(x for x in stats if x is not None))
        ctx.gradients = None if gradients is None else gradients.results()
        return total, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass, times that of the loss."""
        if ctx.gradients is None:
            raise RuntimeError("the gradient of token_loss can be taken once; call it again for another")
        # Returned as they are or scaled in place, since a weight's gradient is as large as the weight. Reading the
        # factor is free on a CPU, where a factor of 1 saves a pass over the gradients.
        gradients, ctx.gradients = ctx.gradients, None
        if not (grad.device.type == "cpu" and grad == 1):
            gradients = tuple(None if x is None else x.mul_(grad) for x in gradients)
        return *gradients, None, None, None, None


def one_pass(projection: Projection, loss: TokenLoss, gradients: Gradients | None) -> tuple[Tensor, TokenStats]:
    """An additive loss and the statistics; forms each chunk's gradient while its logits are in memory."""
    total, stats = None, []
    for part in projection.parts():
        chunk = Chunk(part, projection)
        stats.append(chunk.stats)
        chunk_loss, stats_grad = differentiate(loss, chunk.stats, part, gradients is not None)
        total = chunk_loss if total is None else total + chunk_loss
        if gradients is not None and stats_grad is not None:
            gradients.add(part, chunk.gradient(stats_grad))
    assert total is not None
    return total, concatenated(stats)


def two_passes(projection: Projection, loss: TokenLoss, gradients: Gradients | None) -> tuple[Tensor, TokenStats]:
    """A loss of all tokens jointly, and the statistics; projects every chunk again for its gradient."""
    stats = concatenated([Chunk(part, projection).stats for part in projection.parts()])
    total, stats_grad = differentiate(loss, stats, slice(None), gradients is not None)
    if gradients is not None and stats_grad is not None:
        for part in projection.parts():
            chunk_grad = TokenStats(*(None if x is None else x[part] for x in stats_grad))
            gradients.add(part, Chunk(part, projection).gradient(chunk_grad))
    return total, stats


def differentiate(loss: TokenLoss, stats: TokenStats, at: slice, needs_grad: bool) -> tuple[Tensor, TokenStats | None]:
    """A loss of some tokens' statistics, in float32 at least, and its gradient if `needs_grad`."""
    with torch.set_grad_enabled(needs_grad):
        leaves = TokenStats(*(None if x is None else x.detach().requires_grad_(needs_grad) for x in stats))
        value = loss(leaves, at)
    if not needs_grad:
        return at_least_float32(value.detach()), None
    inputs = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(value, inputs, allow_unused=True))
    return at_least_float32(value.detach()), TokenStats(*(None if x is None else next(grads) for x in leaves))


def project(hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """Write hidden @ weight.T, [rows, vocabulary] in float32 at least, to `out`, for a projection in `dtype`.

    In half precision CUDA multiplies rounded operands into float32. PyTorch has no such product on CPUs: there the
    float32 product may round its operands internally, see `operands_rounded`.
    """
    if dtype.itemsize >= 4:
        torch.mm(hidden, weight.T, out=out)
    elif out.is_cuda:
        torch.mm(hidden.to(dtype), weight.to(dtype).T, out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        # A half-precision weight is converted to float32 in blocks, never as a whole.
        size = len(weight) if weight.dtype == out.dtype else WEIGHT_ROWS
        for rows in row_slices(weight, size):
            with operands_rounded(dtype):
                torch.mm(hidden, weight[rows].to(out.dtype).T, out=out[:, rows])


@contextmanager
def operands_rounded(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN round the operands of float32 products on a CPU to `dtype`, if that is bfloat16 and faster.

    On an AMD EPYC without AMX instructions oneDNN keeps float32, and is 2.4 times as fast as MKL, which computes these
    products otherwise. The setting is process-wide, so one thread at a time holds it, for one product.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module with dynamic attributes
    with PRECISION_LOCK:
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
        try:
            yield
        finally:
            matmul.fp32_precision = before


def faster_transposed(device: torch.device, dtype: torch.dtype) -> bool:
    """True where logits of a projection in `dtype` are faster in column-major layout, one token per column.

    For few tokens, float32 products on a CPU are 1.5 times as fast as weight times states than as states times weight
    (MKL 2024.2 on an AMD EPYC, 8 to 128 tokens).
    """
    return device.type == "cpu" and dtype == torch.float32


def row_slices(x: Tensor, size: int) -> Iterator[slice]:
    """Slices of `size` rows that cover `x`; one empty slice if it has no rows."""
    for start in range(0, max(len(x), 1), size):
        yield slice(start, start + size)


def concatenated(chunks: Sequence[TokenStats]) -> TokenStats:
    """The statistics of all chunks, concatenated in order."""
    return TokenStats(*(None if column[0] is None else torch.cat(column) for column in zip(*chunks, strict=True)))
