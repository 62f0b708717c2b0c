"""The projection to the vocabulary, a few tokens at a time, with its gradient: what `core.logprobs` stands on.

The logits of a batch, [batch, time, vocabulary], are the largest tensor of language-model training by far, and autograd
would keep several of that size. Here they never exist: the projection is computed for a chunk of tokens and reduced to
a few numbers a token, so that memory is bounded by chunk × vocabulary whatever the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokencredit.core.masked import at_least_float32


class TokenStats(NamedTuple):
    """Log-probability, entropy and exact KL of each token; None for what was not asked for."""

    logprobs: Tensor | None
    entropy: Tensor | None
    kl: Tensor | None


TokenLoss = Callable[[TokenStats, slice], Tensor]
"""From the statistics of some tokens, and where these stand among all, to their part of a loss, a scalar."""

Linear = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [rows, D], weight [vocabulary, D] and bias [vocabulary] of a projection."""


class Shaping(NamedTuple):
    """How a projection y becomes logits: z = cap · tanh(y / cap) / temperature, without the tanh if there is no cap.

    The product is computed in `dtype`, everything else in float32 at least.
    """

    temperature: float
    softcap: float | None
    dtype: torch.dtype

    def cast(self, linear: Linear) -> Linear:
        """The operands in `dtype`."""
        hidden, weight, bias = linear
        return hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def logits(self, linear: Linear, part: slice) -> Tensor:
        """Those of some rows, from operands in `dtype`."""
        hidden, weight, bias = linear
        z = at_least_float32(torch.nn.functional.linear(hidden[part], weight, bias))
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor:
        """dz/dy = (1 − tanh²(y / cap)) / temperature, in the place of z; with a cap only."""
        assert self.softcap is not None
        return z.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0).div_(self.temperature)


class Chunk:
    """The statistics of a few rows, and what their gradient needs. With p = softmax(z):

    ∂ log p(x)/∂z = 1ₓ − p,   ∂H/∂z = −p (log p + H),   ∂KL/∂z = p (log p − log q − KL).
    """

    def __init__(
        self, part: slice, linear: Linear, targets: Tensor | None, ref: Linear | None, shaping: Shaping, entropy: bool
    ) -> None:
        z = shaping.logits(linear, part)
        self.shaping = shaping
        self.log_sum = z.logsumexp(dim=-1, keepdim=True)
        self.log_p = z.sub_(self.log_sum)
        self.targets = None if targets is None else targets[part, None]
        self.log_ratio: Tensor | None = None
        logprobs = entropies = kl = None
        if self.targets is not None:
            logprobs = self.log_p.gather(-1, self.targets).squeeze(-1)
        if entropy or ref is not None:
            p = self.log_p.exp()
        if entropy:
            entropies = -torch.linalg.vecdot(p, self.log_p)
        if ref is not None:
            self.log_ratio = self.log_p - shaping.logits(ref, part).log_softmax(dim=-1)
            kl = torch.linalg.vecdot(p, self.log_ratio)
        self.stats = TokenStats(logprobs, entropies, kl)

    def gradient(self, grads: TokenStats) -> Tensor:
        """The gradient of the projection y, [rows, vocabulary], made in the place of the logits.

        With a, e and k the gradients that arrive at log p(x), H and KL, the three formulas above add up to
        a 1ₓ + p [(k − e) log p − k log q − (a + e H + k KL)].
        """
        shaping = self.shaping
        slope = None if shaping.softcap is None else shaping.slope(self.log_p + self.log_sum)
        constant = torch.zeros_like(self.log_sum)
        bracket = None
        if grads.logprobs is not None:
            constant -= grads.logprobs[:, None]
        if grads.entropy is not None and self.stats.entropy is not None:
            constant -= (grads.entropy * self.stats.entropy)[:, None]
            bracket = self.log_p * -grads.entropy[:, None]
        if grads.kl is not None and self.stats.kl is not None and self.log_ratio is not None:
            constant -= (grads.kl * self.stats.kl)[:, None]
            towards = self.log_ratio.mul_(grads.kl[:, None])
            bracket = towards if bracket is None else bracket.add_(towards)
        p = self.log_p.exp_()
        grad: Tensor = p.mul_(constant) if bracket is None else bracket.add_(constant).mul_(p)
        if grads.logprobs is not None and self.targets is not None:
            grad.scatter_add_(-1, self.targets, grads.logprobs[:, None])
        if slope is not None:
            grad.mul_(slope)
        elif shaping.temperature != 1.0:
            grad.div_(shaping.temperature)
        return grad.to(shaping.dtype)


class Gradients:
    """The gradients of hidden states, weight and bias, as far as they are needed, summed over chunks.

    The sums over chunks are in float32, so that many small parts do not vanish in half precision.
    """

    def __init__(self, needed: Sequence[bool], operands: Linear, linear: Linear) -> None:
        """`linear` holds the operands as the projection takes them, cast."""
        self.operands, self.linear = operands, linear
        self.sums = [
            torch.zeros_like(x, dtype=at_least_float32(x[:0]).dtype) if need and x is not None else None
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
        if of_weight is not None and of_weight.dtype == grad.dtype:
            of_weight.addmm_(grad.T, hidden[part])
        elif of_weight is not None:
            of_weight += grad.T @ hidden[part]
        if of_bias is not None:
            of_bias += grad.sum(dim=0, dtype=of_bias.dtype)

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
            linear = shaping.cast((hidden, weight, bias))
            cast_ref = None if ref is None else shaping.cast(ref)
            chunks = [Chunk(p, linear, targets, cast_ref, shaping, entropy).stats for p in parts(hidden, size)]
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
            linear = shaping.cast((hidden, weight, bias))
            cast_ref = None if ref[0] is None else shaping.cast(ref)
            gradients = Gradients(ctx.needs_input_grad, (hidden, weight, bias), linear)
            for part in parts(hidden, ctx.size):
                chunk = Chunk(part, linear, targets, cast_ref, shaping, ctx.entropy)
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
        wanted: bool,
    ) -> tuple[Tensor | None, ...]:
        """The loss and the statistics; `wanted` says whether gradients are."""
        total = at_least_float32(hidden.new_zeros(()))
        chunks = []
        with torch.autocast(hidden.device.type, enabled=False):
            linear = shaping.cast((hidden, weight, bias))
            cast_ref = None if ref is None else shaping.cast(ref)
            gradients = Gradients(ctx.needs_input_grad, (hidden, weight, bias), linear)
            for part in parts(hidden, size):
                chunk = Chunk(part, linear, targets, cast_ref, shaping, entropy)
                chunks.append(chunk.stats)
                with torch.set_grad_enabled(wanted):
                    leaves = TokenStats(
                        *(None if x is None else x.detach().requires_grad_(wanted) for x in chunk.stats)
                    )
                    share = loss(leaves, part)
                total += share.detach()
                if wanted:
                    gradients.add(part, chunk.gradient(slopes(share, leaves)))
        stats = together(chunks)
        ctx.mark_non_differentiable(*(x for x in stats if x is not None))
        ctx.gradients = gradients.results() if wanted else None
        return total, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients that wait since the forward pass, times that of the loss."""
        if ctx.gradients is None:
            raise RuntimeError("the gradient of token_loss can be taken once; call it again for another")
        # Scaled in place and handed over: a weight's gradient is as large as the weight.
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(grad) for x in gradients), None, None, None, None, None, None, None, None


def slopes(loss: Tensor, leaves: TokenStats) -> TokenStats:
    """The gradient of a loss at each statistic."""
    given = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad(loss, given, allow_unused=True))
    return TokenStats(*(None if x is None else next(found) for x in leaves))


def parts(hidden: Tensor, size: int) -> Iterator[slice]:
    """The rows of `hidden`, `size` at a time; without rows, one empty part."""
    for start in range(0, max(len(hidden), 1), size):
        yield slice(start, start + size)


def together(chunks: Sequence[TokenStats]) -> tuple[Tensor | None, ...]:
    """The statistics of all chunks in their order."""
    return tuple(None if column[0] is None else torch.cat(column) for column in zip(*chunks, strict=True))
