"""The projection to the vocabulary, a few tokens at a time, with its gradient: what `core.logprobs` stands on.

The logits of a batch, [batch, time, vocabulary], are the largest tensor of language-model training by far, and autograd
would keep several of that size. Here they never exist: the projection is computed for a chunk of tokens and reduced to
a few numbers a token, so that memory is bounded by chunk × vocabulary whatever the batch.

Logits are in float32 at least. In bfloat16, of 8 bits, a logit of 16 is rounded to the nearest 1/8 and two passes that
round apart disagree by that much; in half precision only the operands of a product may be rounded, not its result.
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
"""Rows of the weight that are in memory in another precision than their own at once, or whose gradient is."""

PROCESS_SETTING = threading.Lock()
"""Held while a setting of the whole process is another than it was."""


class TokenStats(NamedTuple):
    """Log-probability, entropy and exact KL of each token; None for what was not asked for."""

    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None


TokenLoss = Callable[[TokenStats, slice], Tensor]
"""From the statistics of some tokens, and where these stand among all, to their part of a loss, a scalar."""

Linear = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [rows, D], weight [vocabulary, D] and bias [vocabulary] of a projection."""


class Room(NamedTuple):
    """Memory for a chunk, taken once: chunk after chunk of new memory costs time and leaves the heap in pieces."""

    logits: Tensor
    """[rows, vocabulary] in float32 at least."""
    gradient: Tensor | None
    """Their gradient in half precision; None where it takes the place of the logits, or is not wanted."""

    @classmethod
    def take(cls, linear: Linear, size: int, dtype: torch.dtype, gradient: bool = False) -> "Room":
        """For chunks of at most `size` of the rows, of a projection in `dtype`."""
        hidden, weight, _ = linear
        rows, wide = min(size, len(hidden)), torch.promote_types(dtype, torch.float32)
        if in_columns(hidden.device, dtype):
            logits = weight.new_empty(len(weight), rows, dtype=wide).T
        else:
            logits = weight.new_empty(rows, len(weight), dtype=wide)
        return cls(logits, torch.empty_like(logits, dtype=dtype) if gradient and dtype != wide else None)


class Shaping(NamedTuple):
    """How a projection y becomes logits: z = cap · tanh(y / cap) / temperature, without the tanh if there is no cap.

    In half precision, `dtype` is that of the products of gradients; all else is in float32 at least, see `multiply`.
    """

    temperature: float
    softcap: float | None
    dtype: torch.dtype

    def cast(self, linear: Linear) -> Linear:
        """The operands in `dtype`."""
        hidden, weight, bias = linear
        return hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def operands(self, linear: Linear) -> Linear:
        """The operands as `multiply` takes them without a copy of the weight for each chunk."""
        return self.cast(linear) if linear[1].is_cuda or not is_half(self.dtype) else linear

    def logits(self, linear: Linear, part: slice, room: Room) -> Tensor:
        """Those of some rows, from operands of `operands`, in their room."""
        hidden, weight, bias = linear
        hidden = hidden[part]
        z = room.logits[: len(hidden)]
        multiply(hidden, weight, self.dtype, z)
        if bias is not None:
            z.add_(bias)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor:
        """dz/dy = (1 − tanh²(y / cap)) / temperature, in the place of z; with a cap only."""
        assert self.softcap is not None
        return z.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0).div_(self.temperature)


class Chunk:
    """The statistics of a few rows, and what their gradient needs, in as few tensors of their logits' size as possible.

    With y = z − max z, S = Σᵥ exp y and p = exp(y) / S:

    log p(x) = y(x) − log S,   H = log S − Σ p y,   KL = Σ p (y − log q) − log S,
    ∂ log p(x)/∂z = 1ₓ − p,   ∂H/∂z = −p (log p + H),   ∂KL/∂z = p (log p − log q − KL).
    """

    def __init__(
        self,
        part: slice,
        linear: Linear,
        targets: Tensor | None,
        ref: Linear | None,
        shaping: Shaping,
        entropy: bool,
        room: Room,
    ) -> None:
        """What stands in `room` is written over."""
        z = shaping.logits(linear, part, room)
        self.shaping, self.room = shaping, room
        self.peak = z.amax(dim=-1, keepdim=True)
        y = z.sub_(self.peak)
        self.targets = None if targets is None else targets[part, None]
        chosen = None if self.targets is None else y.gather(-1, self.targets)
        needs_y = entropy or ref is not None or shaping.softcap is not None
        self.exp_y = y.exp() if needs_y else y.exp_()
        self.y = y if needs_y else None
        self.sum = self.exp_y.sum(dim=-1, keepdim=True)
        log_sum = self.sum.log()
        self.log_ratio: Tensor | None = None
        entropies = kl = None
        if entropy:
            entropies = (log_sum - self._mean(y)).squeeze(-1)
        if ref is not None:
            ref_logits = shaping.logits(ref, part, Room.take(ref, len(z), shaping.dtype))
            self.log_ratio = y - ref_logits.log_softmax(dim=-1)
            kl = (self._mean(self.log_ratio) - log_sum).squeeze(-1)
        self.log_sum = log_sum
        self.stats = TokenStats(None if chosen is None else (chosen - log_sum).squeeze(-1), entropies, kl)

    def _mean(self, x: Tensor) -> Tensor:
        """Σ p x, [rows, 1]."""
        dot: Tensor = torch.linalg.vecdot(self.exp_y, x)
        return dot.unsqueeze(-1) / self.sum

    def gradient(self, grads: TokenStats) -> Tensor:
        """The gradient of the projection, [rows, vocabulary], made in the place of the logits.

        With a, e and k the gradients that arrive at log p(x), H and KL, the formulas above add up to
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
            towards = self.log_ratio.mul_(k / self.sum)
            bracket = towards if bracket is None else bracket.add_(towards)
        constant /= self.sum
        grad: Tensor = self.exp_y.mul_(constant) if bracket is None else bracket.add_(constant).mul_(self.exp_y)
        if grads.logprobs is not None and self.targets is not None:
            grad.scatter_add_(-1, self.targets, grads.logprobs[:, None])
        if self.shaping.softcap is not None and self.y is not None:
            grad.mul_(self.shaping.slope(self.y.add_(self.peak)))
        elif self.shaping.temperature != 1.0:
            grad.div_(self.shaping.temperature)
        return grad if self.room.gradient is None else self.room.gradient[: len(grad)].copy_(grad)


class Gradients:
    """The gradients of hidden states, weight and bias, as far as they are needed, summed over chunks.

    The sums over chunks are in float32, so that many small parts do not vanish in half precision.
    """

    def __init__(self, needed: Sequence[bool], operands: Linear, linear: Linear) -> None:
        """`linear` holds the operands in the dtype of the products."""
        self.operands, self.linear = operands, linear
        self.empty = True
        self.sums = [
            torch.empty_like(x, dtype=at_least_float32(x[:0]).dtype) if need and x is not None else None
            for need, x in zip(needed, operands, strict=False)
        ]

    def add(self, part: slice, grad: Tensor) -> None:
        """Add a chunk's part, from the gradient of its projection."""
        hidden, weight, _ = self.linear
        of_hidden, of_weight, of_bias = self.sums
        if of_hidden is not None and of_hidden.dtype == grad.dtype:
            torch.mm(grad, weight, out=of_hidden[part])
        elif of_hidden is not None:
            of_hidden[part] = grad @ weight
        # Written the first time and not added to zeros: a weight's gradient is as large as the weight.
        first, self.empty = self.empty, False
        if of_weight is not None and of_weight.dtype == grad.dtype:
            torch.addmm(of_weight, grad.T, hidden[part], beta=0.0 if first else 1.0, out=of_weight)
        elif of_weight is not None:
            # Some rows at a time: the whole part, and again in the sum's dtype, would be as large as the weight.
            for rows in parts(of_weight, WEIGHT_ROWS):
                of_rows = grad[:, rows].T @ hidden[part]
                of_weight[rows].copy_(of_rows) if first else of_weight[rows].add_(of_rows)
        if of_bias is not None:
            of_part = grad.sum(dim=0, dtype=of_bias.dtype)
            of_bias.copy_(of_part) if first else of_bias.add_(of_part)

    def results(self) -> tuple[Tensor | None, ...]:
        """The three, each in the dtype of what it belongs to."""
        return tuple(
            None if x is None or own is None else x.to(own.dtype)
            for x, own in zip(self.sums, self.operands, strict=True)
        )


class ChunkedStats(torch.autograd.Function):
    """The statistics of all rows, projected again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor | None,
        ref: Linear | None,
        shaping: Shaping,
        size: int,
        entropy: bool,
    ) -> tuple[Tensor | None, ...]:
        """The statistics, each `[rows]` or None."""
        with torch.autocast(hidden.device.type, enabled=False):
            linear = shaping.operands((hidden, weight, bias))
            linear_ref = None if ref is None else shaping.operands(ref)
            room = Room.take(linear, size, shaping.dtype)
            chunks = [
                Chunk(part, linear, targets, linear_ref, shaping, entropy, room).stats for part in parts(hidden, size)
            ]
        ctx.save_for_backward(hidden, weight, bias, targets, *(ref or (None, None, None)))
        ctx.shaping, ctx.size, ctx.entropy = shaping, size, entropy
        return together(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """From the gradients at the statistics to those of hidden, weight and bias."""
        hidden, weight, bias, targets, *ref = ctx.saved_tensors
        shaping = ctx.shaping
        with torch.autocast(hidden.device.type, enabled=False):
            linear = shaping.operands((hidden, weight, bias))
            linear_ref = None if ref[0] is None else shaping.operands(ref)
            gradients = Gradients(ctx.needs_input_grad, (hidden, weight, bias), shaping.cast(linear))
            room = Room.take(linear, ctx.size, shaping.dtype, gradient=True)
            for part in parts(hidden, ctx.size):
                chunk = Chunk(part, linear, targets, linear_ref, shaping, ctx.entropy, room)
                gradients.add(part, chunk.gradient(TokenStats(*(None if g is None else g[part] for g in grads))))
        return *gradients.results(), None, None, None, None, None


class ChunkedLoss(torch.autograd.Function):
    """A loss of the statistics and the statistics, with the gradient of the loss formed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ref: Linear | None,
        shaping: Shaping,
        size: int,
        entropy: bool,
        loss: TokenLoss,
        additive: bool,
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        """The loss and the statistics; `wanted` says whether gradients are."""
        with torch.autocast(hidden.device.type, enabled=False):
            linear = shaping.operands((hidden, weight, bias))
            linear_ref = None if ref is None else shaping.operands(ref)
            cast = shaping.cast(linear) if wanted else linear
            gradients = Gradients(ctx.needs_input_grad, (hidden, weight, bias), cast)
            room = Room.take(linear, size, shaping.dtype, gradient=wanted)

            def project(part: slice) -> Chunk:
                """The statistics of some rows."""
                return Chunk(part, linear, targets, linear_ref, shaping, entropy, room)

            if additive or len(hidden) <= size:
                total, stats = one_pass(project, parts(hidden, size), loss, gradients, wanted)
            else:
                total, stats = two_passes(project, list(parts(hidden, size)), loss, gradients, wanted)
        ctx.mark_non_differentiable(*(x for x in stats if x is not None))
        ctx.gradients = gradients.results() if wanted else None
        return total, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients that wait since the forward pass, times that of the loss."""
        if ctx.gradients is None:
            raise RuntimeError("the gradient of token_loss can be taken once; call it again for another")
        # Handed over as they are, or scaled in place, since a weight's gradient is as large as the weight. To look
        # whether there is anything to scale costs nothing on a processor, where it saves a pass over it.
        gradients, ctx.gradients = ctx.gradients, None
        if not (grad.device.type == "cpu" and grad == 1):
            gradients = tuple(None if x is None else x.mul_(grad) for x in gradients)
        return *gradients, *[None] * 8


def one_pass(
    project: Callable[[slice], Chunk], chunks: Iterator[slice], loss: TokenLoss, gradients: Gradients, wanted: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """A loss that is a sum over tokens, and their statistics: each chunk's gradient is formed while it is there."""
    total, seen = None, []
    for part in chunks:
        chunk = project(part)
        seen.append(chunk.stats)
        share, slopes = differentiate(loss, chunk.stats, part, wanted)
        total = share if total is None else total + share
        if slopes is not None:
            gradients.add(part, chunk.gradient(slopes))
    assert total is not None
    return total, together(seen)


def two_passes(
    project: Callable[[slice], Chunk], chunks: Sequence[slice], loss: TokenLoss, gradients: Gradients, wanted: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """A loss of all tokens together, and their statistics: chunks are projected again for their gradients."""
    stats = together([project(part).stats for part in chunks])
    total, slopes = differentiate(loss, TokenStats(*stats), slice(None), wanted)
    if slopes is not None:
        for part in chunks:
            gradients.add(part, project(part).gradient(TokenStats(*(None if x is None else x[part] for x in slopes))))
    return total, stats


def differentiate(loss: TokenLoss, stats: TokenStats, at: slice, wanted: bool) -> tuple[Tensor, TokenStats | None]:
    """A loss of some tokens' statistics, in float32 at least, and if it is wanted its gradient at each of them."""
    with torch.set_grad_enabled(wanted):
        leaves = TokenStats(*(None if x is None else x.detach().requires_grad_(wanted) for x in stats))
        share = loss(leaves, at)
    if not wanted:
        return at_least_float32(share.detach()), None
    given = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(share, given, allow_unused=True))
    slopes = TokenStats(*(None if x is None else next(found) for x in leaves))
    return at_least_float32(share.detach()), slopes


def multiply(hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    """hidden @ weight.T into `out`, [rows, vocabulary] in float32 at least, for a projection in `dtype`.

    In half precision CUDA multiplies rounded operands into float32. Processors have no such product in PyTorch: they
    multiply float32, in which the weight is there already, with leave to round the operands inside.
    """
    if not is_half(dtype):
        torch.mm(hidden, weight.T, out=out)
    elif out.is_cuda:
        torch.mm(hidden.to(dtype), weight.to(dtype).T, out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        # A weight that is in half precision itself is never there in float32 as a whole.
        size = len(weight) if weight.dtype == out.dtype else WEIGHT_ROWS
        for rows in parts(weight, size):
            with operands_rounded(dtype):
                torch.mm(hidden, weight[rows].to(out.dtype).T, out=out[:, rows])


@contextmanager
def operands_rounded(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN round the operands of float32 products on processors to `dtype`, if that is bfloat16 and faster.

    On an AMD EPYC without AMX instructions it keeps float32, and is 2.4 times as fast as MKL, which has these products
    otherwise. The setting belongs to the whole process, so one thread at a time has it, for one product.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # a module that makes its attributes itself
    with PROCESS_SETTING:
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
        try:
            yield
        finally:
            matmul.fp32_precision = before


def is_half(dtype: torch.dtype) -> bool:
    """True for bfloat16 and float16."""
    return dtype.itemsize < 4


def in_columns(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether logits of a projection in `dtype` are better laid out a token a column.

    For few tokens the library that multiplies float32 on processors is 1.5 times as fast at weight times states as at
    states times weight (MKL 2024.2 on an AMD EPYC, 8 to 128 tokens).
    """
    return device.type == "cpu" and dtype == torch.float32


def parts(hidden: Tensor, size: int) -> Iterator[slice]:
    """The rows of `hidden`, `size` at a time; without rows, one empty part."""
    for start in range(0, max(len(hidden), 1), size):
        yield slice(start, start + size)


def together(chunks: Sequence[TokenStats]) -> tuple[Tensor | None, ...]:
    """The statistics of all chunks in their order."""
    return tuple(None if column[0] is None else torch.cat(column) for column in zip(*chunks, strict=True))
