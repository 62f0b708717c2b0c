"""Full forward passes over a rollout without gradients: policy, critic and reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.masked import extents
from tokencredit.core.rewards import KL_ROUNDING, kl_estimate
from tokencredit.distributed.processes import Processes
from tokencredit.learn.minibatches import length_batches
from tokencredit.settings.training import KLConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.actor_critic import ActorCritic, Inputs, idle_row


class ReferenceOutputs(NamedTuple):
    """Log-probs and KL of a rollout under the reference model; empty where there is none."""

    logprobs: Tensor | None = None
    """`[batch, time]`, nats."""
    kl: Tensor | None = None
    """`[batch, time]`, KL penalised in the tokens' rewards, in nats; None if it is in the loss alone."""
    hidden: Tensor | None = None
    """`[batch, time, width]`, for an exact KL in the loss."""


def read_by_length(
    rollout: Rollout,
    budget: int | None,
    read: Callable[[Inputs], dict[str, Tensor]],
    processes: Processes | None = None,
) -> dict[str, Tensor]:
    """Apply `read` to micro-batches of similar length; returns its outputs `[batch, …]` for all rows.

    Args:
        rollout: the rollout whose `inputs()` are read.
        budget: tokens per micro-batch, padding included; None for no limit.
        read: maps the inputs of some rows to tensors with as many rows.
        processes: those of sharded models, which make equally many passes: those with fewer pass an idle row.
    """
    inputs = rollout.inputs()
    results: dict[str, Tensor] = {}
    batches = length_batches(rollout.lengths(), budget) if len(rollout.mask) else []
    # Before the passes: their collective operations and this one must come in the same order everywhere.
    missing = 0 if processes is None else processes.most(len(batches)) - len(batches)
    for rows in batches:
        for name, part in read({name: tensor[rows] for name, tensor in inputs.items()}).items():
            if name not in results:
                results[name] = part.new_empty(len(rollout.mask), *part.shape[1:])
            results[name][rows] = part
    for _ in range(missing):
        for name, part in read(idle_row(rollout.mask.device)).items():
            results.setdefault(name, part.new_empty(0, rollout.mask.shape[1], *part.shape[2:]))
    return results


def evaluate_rollout(
    policy: ActorCritic,
    rollout: Rollout,
    temperature: float,
    budget: int | None,
    processes: Processes | None = None,
    *,
    entropy: bool = False,
) -> Rollout:
    """The rollout with log-probs by a policy, entropies on request, and values if the critic reads its states.

    `processes` is as in `read_by_length`.
    """
    values = policy.critic is not None and policy.critic.shared

    def read(inputs: Inputs) -> dict[str, Tensor]:
        outputs = policy(inputs, temperature=temperature, entropy=entropy, values=values)
        named = {"logprobs": outputs.logprobs, "values": outputs.values, "entropy": outputs.stats.entropy}
        return {name: x for name, x in named.items() if x is not None}

    return replace(rollout, **read_by_length(rollout, budget, read, processes))


def rollout_logprobs(
    policy: ActorCritic, rollout: Rollout, temperature: float, budget: int | None, processes: Processes | None = None
) -> Tensor:
    """Log-probs `[batch, time]` of a rollout under a policy, without a pass of the critic; as `evaluate_rollout`."""

    def read(inputs: Inputs) -> dict[str, Tensor]:
        return {"logprobs": policy.logprobs(inputs, temperature)[0]}

    return read_by_length(rollout, budget, read, processes)["logprobs"]


def rollout_values(
    policy: ActorCritic, rollout: Rollout, budget: int | None, processes: Processes | None = None
) -> Tensor:
    """Values `[batch, time]` of a rollout, by a pass of the critic only; `processes` is as in `read_by_length`."""

    def read(inputs: Inputs) -> dict[str, Tensor]:
        return {"values": policy.critic_outputs(inputs).values}

    return read_by_length(rollout, budget, read, processes)["values"]


def values_after(
    policy: ActorCritic,
    rollout: Rollout,
    budget: int | None,
    following: Sequence[Sequence[int]] | None = None,
    processes: Processes | None = None,
) -> Tensor:
    """Values `[batch]` of the states after truncated completions; 0 for the others.

    Computed as the value before an extra token of any id, since the last token is never an input. `following` has the
    tokens of an observation after each row, which belong to the state.
    """
    after = torch.zeros(len(rollout.mask), device=rollout.mask.device)
    cut = rollout.truncated
    some = bool(cut.any())
    if not (some if processes is None else processes.any(some)):
        return after
    lengths = extents(rollout.mask[cut]).unsqueeze(1)
    if following is not None:
        rollout = followed(rollout, following)
        lengths += torch.tensor([len(ids) for ids in following], device=cut.device)[cut].unsqueeze(1)
    longer = Rollout(
        prompt_ids=rollout.prompt_ids[cut],
        prompt_mask=rollout.prompt_mask[cut],
        response_ids=pad(rollout.response_ids[cut], (0, 1)),
        mask=pad(rollout.mask[cut], (0, 1)).scatter(1, lengths, True),
        logprobs=pad(rollout.logprobs[cut], (0, 1)),
        truncated=cut[cut],
    )
    # `lengths` counts the extra token, which is not an input, so the budget is one larger.
    values = rollout_values(policy, longer, None if budget is None else budget + 1, processes)
    after[cut] = values.gather(1, lengths).squeeze(1)
    return after


def followed(rollout: Rollout, following: Sequence[Sequence[int]]) -> Rollout:
    """The rollout with tokens written after each row's last one; its mask is false there."""
    longest = max(map(len, following))
    response_ids = pad(rollout.response_ids, (0, longest))
    for row, (ids, length) in enumerate(zip(following, rollout.response_lengths().tolist(), strict=True)):
        response_ids[row, length : length + len(ids)] = torch.tensor(ids, dtype=torch.long, device=response_ids.device)
    mask, logprobs = (pad(x, (0, longest)) for x in (rollout.mask, rollout.logprobs))
    return replace(rollout, response_ids=response_ids, mask=mask, logprobs=logprobs)


def reference_outputs(
    policy: ActorCritic,
    reference: ActorCritic | None,
    rollout: Rollout,
    args: KLConfig,
    temperature: float,
    budget: int | None,
    processes: Processes | None = None,
) -> ReferenceOutputs:
    """Log-probs and KL of a rollout under the reference model, as far as the configuration needs them.

    `reference` is a model of its own, `policy` itself with its adapter switched off, or None.
    """
    if reference is None:
        return ReferenceOutputs()
    full = args.estimator == "full"

    def read(inputs: Inputs) -> dict[str, Tensor]:
        with policy.adapter.reference() if reference is policy and policy.adapter else nullcontext():
            logprobs, hidden = reference.logprobs(inputs, temperature)
            results = {"logprobs": logprobs}
        if full:
            results["ref_hidden"] = hidden
        if args.place == "both":
            kl = policy(inputs | {"ref_hidden": hidden}, temperature, reference=reference, values=False).stats.kl
            assert kl is not None
            results["kl"] = kl
        return results

    outputs = read_by_length(rollout, budget, read, processes)
    logprobs, kl = outputs["logprobs"], outputs.get("kl")
    if kl is not None:
        kl = kl.masked_fill(kl < KL_ROUNDING, 0.0)
    elif args.place == "reward":
        estimates = kl_estimate(args.estimator, rollout.logprobs, logprobs, rollout.mask)
        kl = estimates.masked_fill((rollout.logprobs - logprobs).abs() < KL_ROUNDING, 0.0)
    return ReferenceOutputs(logprobs, kl, outputs.get("ref_hidden"))
