"""Passes over whole texts that train nothing: what the policy, its critic and the reference say of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.core.kl import kl_estimate
from tokencredit.learn.experience import like_lengths
from tokencredit.learn.update import Evaluation
from tokencredit.settings.training import KLConfig
from tokencredit.text.engines.sampling import Rollout
from tokencredit.text.models.actor_critic import ActorCritic


class Reference(NamedTuple):
    """What the reference says of a rollout; None and nothing without one."""

    logprobs: Tensor | None
    kl: Tensor | None
    """What each token's reward pays for, nats; None where the loss pays."""
    inputs: dict[str, Tensor]
    """What the update needs to price the KL in the loss."""


def by_length(
    rollout: Rollout, budget: int | None, read: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
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


def evaluate_rollout(policy: ActorCritic, rollout: Rollout, temperature: float, budget: int | None) -> Evaluation:
    """Log-probabilities and values of a rollout under a policy and its critic, without gradients."""

    def read(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        now = policy(**inputs, temperature=temperature)
        return {"logprobs": now.logprobs, "values": now.values}

    return Evaluation(torch.zeros(()), **by_length(rollout, budget, read))


def rollout_logprobs(policy: ActorCritic, rollout: Rollout, temperature: float, budget: int | None) -> Tensor:
    """Log-probabilities `[batch, time]` of a rollout under a policy, whose critic is not asked."""

    def read(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = policy.response_hidden(**inputs)
        return {"logprobs": policy.logprobs(hidden, inputs["response_ids"], inputs["mask"], temperature)}

    return by_length(rollout, budget, read)["logprobs"]


def critic_values(policy: ActorCritic, rollout: Rollout, budget: int | None) -> Tensor:
    """Values `[batch, time]` from a critic with a trunk of its own, whose states no sampling pass has computed."""

    def read(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"values": policy.values(policy.critic_hidden(**inputs))}

    return by_length(rollout, budget, read)["values"].masked_fill(~rollout.mask, 0.0)


def refer(
    policy: ActorCritic,
    reference: ActorCritic | None,
    rollout: Rollout,
    args: KLConfig,
    temperature: float,
    budget: int | None,
) -> Reference:
    """What the reference says of a rollout, as far as the configuration needs it.

    Args:
        policy: for the exact KL in the reward; its adapter, if it has one, is off while the reference speaks.
        reference: a model of its own, or `policy` itself where that has an adapter; None for none.
        rollout: what was sampled.
        args: where the KL is paid, and how it is estimated.
        temperature: that of the sampling.
        budget: the most tokens at once, padding included; None for no limit.
    """
    if reference is None:
        return Reference(None, None, {})
    full, in_loss = args.estimator == "full", args.place == "loss"

    def read(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with nullcontext() if policy.adapter is None else policy.adapter.disable_adapter():
            hidden = reference.response_hidden(**inputs)
            results = {"logprobs": reference.logprobs(hidden, inputs["response_ids"], inputs["mask"], temperature)}
        if full and in_loss:
            results["ref_hidden"] = hidden
        elif full:
            now = policy(**inputs, temperature=temperature, reference=reference, ref_hidden=hidden)
            results["kl"] = now.kl
        return results

    found = by_length(rollout, budget, read)
    logprobs = found["logprobs"]
    if in_loss:
        return Reference(logprobs, None, {"ref_hidden": found["ref_hidden"]} if full else {"ref_logprobs": logprobs})
    kl = found["kl"] if full else kl_estimate(args.estimator, rollout.logprobs, logprobs, rollout.mask)
    return Reference(logprobs, kl, {})
