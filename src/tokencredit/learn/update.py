"""One PPO update: epochs of minibatches of the clipped surrogate, the same for tokens and for environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tokencredit.core.losses import (
    Clip,
    RatioStats,
    clipped_surrogate,
    ratio_stats,
    reduction_count,
    token_weights,
    total_loss,
    value_loss,
    weighted_sum,
)
from tokencredit.core.masked import whiten
from tokencredit.core.projection import TokenLoss, TokenStats
from tokencredit.learn.experience import Experience, like_lengths, together
from tokencredit.learn.optim import clip_gradients
from tokencredit.learn.stopping import past_target_kl


class Evaluation(NamedTuple):
    """What policy and critic say of an experience now; None for what is not needed."""

    policy_loss: Tensor
    """A scalar, with the policy's gradient."""
    values: Tensor
    """`[batch, time]`, with the critic's gradient."""
    logprobs: Tensor
    """`[batch, time]`, without a gradient, as the next two."""
    entropy: Tensor | None = None
    kl: Tensor | None = None


Evaluate = Callable[[dict[str, Tensor], TokenLoss], Evaluation]
"""From an experience's inputs, and the policy's loss on its acted tokens one after another, to their evaluation.

The loss is handed in so that a projection to a large vocabulary can form its gradient a chunk of tokens at a time;
where there is none, `policy_loss(TokenStats(logprobs[mask], …), slice(None))` is all there is to do.
"""


@dataclass(frozen=True)
class Objective:
    """What an update minimises; see `core.losses` for each part. `kl_coef` is the price of `Evaluation.kl`."""

    clip: Clip = 0.2
    dual_clip: float | None = None
    value_clip: float | None = None
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    reduction: str = "token"

    def policy_loss(self, now: TokenStats, old_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
        """The policy's part: Σ weight · (L_policy − c_ent · H + β · KL)."""
        assert now.logprobs is not None
        surrogate = clipped_surrogate(now.logprobs, old_logprobs, advantages, clip=self.clip, dual_clip=self.dual_clip)
        loss = total_loss(surrogate, None, now.entropy, weights, entropy_coef=self.entropy_coef)
        return loss if now.kl is None else loss + self.kl_coef * weighted_sum(now.kl, weights)

    def critic_loss(self, values: Tensor, part: Experience, weights: Tensor) -> Tensor:
        """The critic's part: c_vf · Σ weight · L_vf."""
        losses = value_loss(values, part.values, part.returns, part.mask, clip=self.value_clip)
        return self.value_coef * weighted_sum(losses, weights)

    @torch.no_grad()
    def token_losses(self, part: Experience, now: Evaluation) -> dict[str, Tensor]:
        """Each part of the loss at each token, before its coefficient, by its name in the metrics."""
        parts = {
            "policy_loss": clipped_surrogate(
                now.logprobs, part.logprobs, part.advantages, part.mask, clip=self.clip, dual_clip=self.dual_clip
            ),
            "value_loss": value_loss(now.values, part.values, part.returns, part.mask, clip=self.value_clip),
            "entropy_in_update": now.entropy,
            "kl_in_update": now.kl,
        }
        return {name: losses for name, losses in parts.items() if losses is not None}


class NonFiniteUpdate(ArithmeticError):
    """A loss or gradient that is NaN or infinite; the optimiser step was not taken.

    `row` is the first row of the experience at which `term` is not finite, or None when only the gradient is not.
    """

    def __init__(self, term: str, row: int | None):
        super().__init__(f"{term} is not finite")
        self.term, self.row = term, row


OnStep = Callable[[Experience, NonFiniteUpdate | None], None]
"""Is told of each minibatch whether its optimiser step was taken (None), or why it could not be."""


def raise_non_finite(minibatch: Experience, error: NonFiniteUpdate | None) -> None:
    """Let a step that could not be taken end the update."""
    if error is not None:
        raise error


class Seen(NamedTuple):
    """One micro-batch and what policy and critic said of it, without gradients: what the metrics are made of."""

    part: Experience
    """Without its inputs."""
    weights: Tensor
    now: Evaluation
    loss: Tensor


@dataclass(frozen=True)
class UpdateStats:
    """What optimiser steps saw, in a form that adds up over processes.

    `losses` holds the sum over steps of the loss and of each of its parts.
    """

    losses: dict[str, Tensor]
    ratios: RatioStats

    def over_processes(self, accelerator: Accelerator) -> UpdateStats:
        """The same for all processes together."""
        ratios = RatioStats(
            accelerator.reduce(self.ratios.sums, "sum"),
            accelerator.gather(self.ratios.extremes.unsqueeze(0)).amax(0),
        )
        return UpdateStats(accelerator.reduce(self.losses, "sum"), ratios)


def ppo_update(
    experience: Experience,
    evaluate: Evaluate,
    objective: Objective,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    generator: torch.Generator,
    *,
    epochs: int,
    minibatches: int,
    micro_batch_tokens: int | None = None,
    whiten_minibatches: bool = False,
    target_kl: float | None = None,
    max_grad_norm: float | None = None,
    grad_norm_type: float = 2.0,
    frozen: Iterable[Tensor] = (),
    on_step: OnStep = raise_non_finite,
) -> dict[str, float]:
    """Take `epochs` × `minibatches` optimiser steps on one rollout.

    Schulman et al. 2017 (arXiv 1707.06347), algorithm 1.

    Args:
        experience: one rollout with its credit; this process's share of it.
        evaluate: the policy and its critic on an experience's inputs.
        objective: what is minimised.
        model: what `evaluate` runs, prepared by `accelerator`.
        optimizer: of the model's parameters, prepared likewise.
        accelerator: of this process.
        generator: shuffles the rows.
        epochs: passes over the experience.
        minibatches: optimiser steps a pass.
        micro_batch_tokens: the most tokens in memory at once, padding included; None for no limit. However a minibatch
            is cut, its gradient is the same.
        whiten_minibatches: bring each minibatch's advantages to mean 0 and deviation 1 (Huang et al. 2022, "The 37
            implementation details of PPO", core detail 7).
        target_kl: end the update before a step whose minibatch is further than this from the sampling policy, in nats
            a token by k3; None never does.
        max_grad_norm: largest norm of the gradient; None for no limit.
        grad_norm_type: 2 for the L2 norm, inf for the largest element.
        frozen: parameters of the optimizer that this update leaves alone.
        on_step: told of each step, and may raise. A step with a loss or gradient that is not finite is not taken, and
            counts in no metric but `bad_steps`.

    Returns:
        `loss`, its parts and `grad_norm` as means over minibatches, the ratio metrics of all tokens seen,
        `first_ratio_error`, and the numbers of `steps` taken and of `bad_steps` left out.

    Raises:
        NonFiniteUpdate: a loss or gradient was not finite, and `on_step` passes it on.
    """
    frozen, alone = list(frozen), accelerator.num_processes == 1
    total = None if alone else partial(accelerator.reduce, reduction="sum")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    seen: list[Seen] = []  # measured together at the end, since each small operation has its price
    minibatches_seen = bad_steps = 0
    first_error = math.nan
    grad_norms: list[float] = []
    for rows in (rows for _ in range(epochs) for rows in experience.minibatches(minibatches, generator)):
        drop_gradients(parameters)
        minibatch = experience.select(rows)
        if whiten_minibatches:
            advantages = whiten(minibatch.advantages, minibatch.mask, reduce=total)
            minibatch = replace(minibatch, advantages=advantages)
        step = backward(minibatch, evaluate, objective, model, accelerator, micro_batch_tokens)
        drop_gradients(frozen)
        if max_grad_norm is None or alone:
            grad_norm = float(clip_gradients(parameters, max_grad_norm, grad_norm_type))
        else:
            grad_norm = float(accelerator.clip_grad_norm_(parameters, max_grad_norm, norm_type=grad_norm_type))
        if not everywhere(math.isfinite(sum(float(micro.loss) for micro in step) + grad_norm), accelerator):
            bad_steps += 1
            on_step(minibatch, blame(experience, rows, evaluate, objective))
            continue
        seen += step
        if not minibatches_seen:
            first_error = ratio_error(step, accelerator)
        minibatches_seen += 1
        if target_kl is not None:
            kl = measure(step, objective).over_processes(accelerator).ratios.metrics()["approx_kl_k3"]
            if past_target_kl(kl, target_kl):
                break
        optimizer.step()
        grad_norms.append(grad_norm)
        on_step(minibatch, None)
    drop_gradients(parameters)  # they are as large as the weights, and sampling needs the room
    if not seen:
        return {"steps": 0, "bad_steps": bad_steps}
    stats = measure(seen, objective).over_processes(accelerator)
    return {
        **{name: float(loss) / minibatches_seen for name, loss in stats.losses.items()},
        **stats.ratios.metrics(),
        "first_ratio_error": first_error,
        "grad_norm": sum(grad_norms) / max(len(grad_norms), 1),
        "steps": len(grad_norms),
        "bad_steps": bad_steps,
    }


def everywhere(true: bool, accelerator: Accelerator) -> bool:
    """Whether something holds in all processes."""
    if accelerator.num_processes == 1:
        return true
    return bool(accelerator.gather(torch.tensor([true], device=accelerator.device)).all())


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Free the memory of gradients; Accelerate's own way costs an inspection of a signature each time."""
    for parameter in parameters:
        parameter.grad = None


def backward(
    minibatch: Experience,
    evaluate: Evaluate,
    objective: Objective,
    model: nn.Module,
    accelerator: Accelerator,
    micro_batch_tokens: int | None,
) -> list[Seen]:
    """Add a minibatch's gradient to the parameters, a micro-batch of like lengths at a time.

    Every mean over tokens divides by the token count of the whole minibatch on all processes, so that micro-batches
    and processes add up to the same gradient however they are cut. Processes exchange gradients once, with the last
    micro-batch, so that each may have a number of its own.
    """
    count = reduction_count(minibatch.mask, objective.reduction)
    if accelerator.num_processes > 1:
        count = accelerator.reduce(count, "sum")
    seen = []
    batches = like_lengths(minibatch.lengths, micro_batch_tokens)
    for rows in batches:
        part = minibatch if len(batches) == 1 else minibatch.select(rows)
        weights = token_weights(part.mask, by=objective.reduction, count=count)
        with nullcontext() if rows is batches[-1] else accelerator.no_sync(model):
            now = evaluate(part.inputs, policy_loss(objective, part, weights))
            loss = now.policy_loss + objective.critic_loss(now.values, part, weights)
            # Accelerate averages over processes; ours must add up.
            accelerator.backward(loss if accelerator.num_processes == 1 else loss * accelerator.num_processes)
        now = now._replace(policy_loss=loss.detach(), values=now.values.detach())
        seen.append(Seen(replace(part, inputs={}), weights, now, loss.detach()))
    return seen


def measure(seen: list[Seen], objective: Objective) -> UpdateStats:
    """The statistics of micro-batches."""
    if len(seen) == 1:
        part, weights, now, loss = seen[0]
    else:
        part = together([micro.part for micro in seen])
        weights = torch.cat([micro.weights for micro in seen])
        loss = torch.stack([micro.loss for micro in seen]).sum()
        values, logprobs, entropy, kl = zip(*(micro.now[1:] for micro in seen), strict=True)
        entropy, kl = (None if column[0] is None else torch.cat(column) for column in (entropy, kl))
        now = Evaluation(loss, torch.cat(values), torch.cat(logprobs), entropy, kl)
    losses = {name: weighted_sum(x, weights) for name, x in objective.token_losses(part, now).items()}
    ratios = ratio_stats(now.logprobs, part.logprobs, part.mask, clip=objective.clip)
    return UpdateStats({"loss": loss} | losses, ratios)


def ratio_error(step: list[Seen], accelerator: Accelerator) -> float:
    """How far the ratio is from 1 at the worst token of a minibatch, e^|log r| − 1.

    In an update's first minibatch the policy is still the one that sampled, so anything but 0 is a bug somewhere.
    """
    apart = [(now.logprobs - part.logprobs).masked_fill(~part.mask, 0.0).abs().max() for part, _, now, _ in step]
    return float(accelerator.gather(torch.stack(apart).amax(0, keepdim=True)).max().expm1())


def policy_loss(objective: Objective, part: Experience, weights: Tensor) -> TokenLoss:
    """The policy's part of the objective, as a function of statistics of the acted tokens, one after another."""
    acted = part.mask.flatten().nonzero().squeeze(1)
    old_logprobs, advantages, weights = (x.flatten()[acted] for x in (part.logprobs, part.advantages, weights))
    return lambda now, at: objective.policy_loss(now, old_logprobs[at], advantages[at], weights[at])


@torch.no_grad()
def blame(experience: Experience, rows: Tensor, evaluate: Evaluate, objective: Objective) -> NonFiniteUpdate:
    """Find which row's which loss is not finite, by looking at the rows of a failed minibatch one by one."""
    for row in rows:
        part = experience.select(row.unsqueeze(0))
        now = evaluate(part.inputs, policy_loss(objective, part, part.mask.float()))
        for name, losses in objective.token_losses(part, now).items():
            if not losses[part.mask].isfinite().all():
                return NonFiniteUpdate(name.removesuffix("_in_update").replace("_", " "), int(row))
    return NonFiniteUpdate("gradient", None)
