"""Passes over whole texts without gradients: policy, critic and reference model on a rollout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.kl import kl_estimate
from tokencredit.learn.experience import like_lengths
from tokencredit.learn.objective import PolicyOutputs
from tokencredit.settings.training import KLConfig
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.models.actor_critic import ActorCritic, Inputs

ROUNDING = 1e-5
"""Largest difference between two log-probs of a token, in nats, that is put down to the rounding of two passes; its KL
is then 0. Where nothing else is paid, Adam, which looks at no scale, would make a step of full size of it."""


class ReferenceOutputs(NamedTuple):
    """Log-probs and KL of a rollout under the reference model; empty where there is none."""

    logprobs: Tensor | None = None
    """`[batch, time]`, nats."""
    kl: Tensor | None = None
    """`[batch, time]`, the nats that each token's reward pays for; None where the loss pays."""
    hidden: Tensor | None = None
    """`[batch, time, width]`, for an exact KL in the loss."""
    exact: bool = False
    """`kl` is the sum over the vocabulary, not an estimate from the sampled token."""


def by_length(rollout: Rollout, budget: int | None, read: Callable[[Inputs], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `read` gives for all rows, each `[batch, …]`, when it is handed rows of like length.

    Args:
        rollout: its `inputs()` are what is read.
        budget: the most tokens at once, padding included; None for no limit.
        read: from the inputs of some rows to tensors with as many rows.
    """
    inputs = rollout.inputs()
    results: dict[str, Tensor] = {}
    for rows in like_lengths(rollout.lengths(), budget):
        for name, part in read({name: tensor[rows] for name, tensor in inputs.items()}).items():
            if name not in results:
                results[name] = part.new_empty(len(rollout.mask), *part.shape[1:])
            results[name][rows] = part
    return results


def evaluate_rollout(policy: ActorCritic, rollout: Rollout, temperature: float, budget: int | None) -> PolicyOutputs:
    """Log-probabilities and values of a rollout under a policy and its critic, without gradients."""

    def read(inputs: Inputs) -> dict[str, Tensor]:
        now = policy(inputs, temperature=temperature)
        return {"logprobs": now.logprobs} | ({} if now.values is None else {"values": now.values})

    outputs = by_length(rollout, budget, read)
    return PolicyOutputs(torch.zeros(()), outputs["logprobs"], outputs.get("values"))


def rollout_logprobs(policy: ActorCritic, rollout: Rollout, temperature: float, budget: int | None) -> Tensor:
    """Log-probabilities `[batch, time]` of a rollout under a policy, without its critic's values."""

    def read(inputs: Inputs) -> dict[str, Tensor]:
        return {"logprobs": policy.logprobs(inputs, temperature)[0]}

    return by_length(rollout, budget, read)["logprobs"]


def rollout_values(policy: ActorCritic, rollout: Rollout, budget: int | None) -> Tensor:
    """Values `[batch, time]` of a rollout, by a pass of the critic alone."""

    def read(inputs: Inputs) -> dict[str, Tensor]:
        return {"values": policy.critic_outputs(inputs).values}

    return by_length(rollout, budget, read)["values"]


def values_after(policy: ActorCritic, rollout: Rollout, budget: int | None) -> Tensor:
    """Values `[batch]` of the states after the last tokens of completions that were cut off; 0 for the others.

    The value before one more token, whose place is filled with anything: no pass reads the last token.
    """
    after = torch.zeros(len(rollout.mask), device=rollout.mask.device)
    cut = rollout.truncated
    if not cut.any():
        return after
    lengths = rollout.mask[cut].sum(1, keepdim=True)
    longer = Rollout(
        prompt_ids=rollout.prompt_ids[cut],
        prompt_mask=rollout.prompt_mask[cut],
        response_ids=pad(rollout.response_ids[cut], (0, 1)),
        mask=pad(rollout.mask[cut], (0, 1)).scatter(1, lengths, True),
        logprobs=pad(rollout.logprobs[cut], (0, 1)),
        values=None,
        truncated=cut[cut],
    )
    # `lengths` counts the token that is not read, so a row that fits the budget is one longer here.
    values = rollout_values(policy, longer, None if budget is None else budget + 1)
    after[cut] = values.gather(1, lengths).squeeze(1)
    return after


def reference_outputs(
    policy: ActorCritic,
    reference: ActorCritic | None,
    rollout: Rollout,
    args: KLConfig,
    temperature: float,
    budget: int | None,
) -> ReferenceOutputs:
    """Log-probs and KL of a rollout under the reference model, as far as the configuration needs them.

    Args:
        policy: for the exact KL in the reward.
        reference: a model of its own, or `policy` itself, whose adapter then makes way; None for none.
        rollout: what was sampled.
        args: where the KL is paid, and how it is estimated.
        temperature: that of the sampling.
        budget: the most tokens at once, padding included; None for no limit.
    """
    if reference is None:
        return ReferenceOutputs()
    full, in_loss = args.estimator == "full", args.place == "loss"

    def read(inputs: Inputs) -> dict[str, Tensor]:
        with policy.adapter.reference() if reference is policy and policy.adapter else nullcontext():
            logprobs, hidden = reference.logprobs(inputs, temperature)
            results = {"logprobs": logprobs}
        if full and in_loss:
            results["ref_hidden"] = hidden
        elif full:
            kl = policy(inputs | {"ref_hidden": hidden}, temperature=temperature, reference=reference).kl
            assert kl is not None
            results["kl"] = kl
        return results

    outputs = by_length(rollout, budget, read)
    logprobs = outputs["logprobs"]
    if in_loss:
        return ReferenceOutputs(logprobs, hidden=outputs.get("ref_hidden"))
    kl = outputs["kl"] if full else kl_estimate(args.estimator, rollout.logprobs, logprobs, rollout.mask)
    agree = kl < ROUNDING / 10 if full else (rollout.logprobs - logprobs).abs() < ROUNDING
    return ReferenceOutputs(logprobs, kl.masked_fill(agree, 0.0), exact=full)
