"""Checks of the policy that drew the tokens: an engine that computes otherwise, filters that cut the distribution."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import Evidence, Finding

ROUNDING_KL = 1e-5
"""Largest `behavior_kl` attributed to rounding in float32. Measured: 3e-7."""
ROUNDING_DISTANCE = 1e-7
"""The same of `engine_distance`. Measured with the built-in model: 2e-13, and 8e-7 with an engine in bfloat16."""
ROUNDING_IN_BFLOAT16 = 5e-3
"""The same of both in bfloat16. Measured: 2e-5 with the built-in model, 7e-4 with 24 random layers."""
STALE_KL = 0.1
"""`behavior_kl` above which samples of earlier updates are too old. Measured without correction (docs/findings.md, 12):
at most 0.08 where the reward is up to 0.05 behind that of fresh samples, at least 0.18 where it is 0.26 behind."""
KEPT = 0.98
"""Share of the policy's probability that filters leave, below which they are a finding."""


def filters_of(run: Evidence) -> list[str]:
    """The settings that filter the sampled tokens."""
    on = {
        "rollout.top_k": bool(run.setting("rollout.top_k")),
        "rollout.top_p": (run.setting("rollout.top_p") or 1) < 1,
        "rollout.min_p": bool(run.setting("rollout.min_p")),
        "rollout.min_new_tokens": bool(run.setting("rollout.min_new_tokens")),
    }
    return [key for key, is_on in on.items() if is_on]


def engine_distance(run: Evidence) -> float:
    """KL from the engine to the policy, nats per token: the mean of r − 1 − log r for ratios r of policy to engine.

    No term is below 0, so that rounding shows, which cancels out in `behavior_kl`, the mean of −log r. Filters of the
    engine's own show in that.
    """
    return run.last("behavior_ratio") - 1 + run.last("behavior_kl")


def engine_mismatch(run: Evidence) -> Finding | None:
    """The engine draws tokens from another distribution than the trained model's, and neither the run's filters nor
    sampling ahead explain it."""
    exact = run.setting("model.dtype") == "float32"
    kl, distance = (ROUNDING_KL, ROUNDING_DISTANCE) if exact else (ROUNDING_IN_BFLOAT16, ROUNDING_IN_BFLOAT16)
    apart = run.last("behavior_kl") > kl or engine_distance(run) > distance
    if filters_of(run) or run.setting("rollout.max_age") or not apart:
        return None
    corrected = run.setting("off_policy.correct") not in (None, "none")
    return Finding(
        "engine_mismatch",
        83,
        "the engine does not draw from the trained model",
        f"{run.where('behavior_kl')} nats per token; behavior_ratio − 1 + behavior_kl {engine_distance(run):.2g}; "
        f"rounding explains {kl:g} and {distance:g}",
        "The log-probs with which tokens were drawn differ from those of a full forward pass of the trained model, as "
        "with old weights, another dtype, or filters and a temperature of the engine's own.",
        "look for sampling defaults of the engine (generation_config.json), take the same dtype in both"
        + ("" if corrected else ", or set off_policy.correct: clip if both compute what they should"),
    )


def stale_samples(run: Evidence) -> Finding | None:
    """Samples are so many updates old that the policy has moved away from them."""
    if filters_of(run) or not (run.last("age_max") > 0 and run.last("behavior_kl") > STALE_KL):
        return None
    return Finding(
        "stale_samples",
        82,
        "samples are too old",
        f"{run.where('behavior_kl')} nats per token; {run.where('age_mean')} updates",
        "Between the drawing of a token and its use the policy has changed so much that its samples say little about "
        "the present one.",
        "lower rollout.max_age, optim.lr or ppo.epochs; corrections did not help where this was measured",
    )


def truncated_support(run: Evidence) -> Finding | None:
    """Filters leave out a part of the distribution that the update does not account for."""
    uncorrected = run.setting("off_policy.correct") in (None, "none")
    recomputed = run.setting("off_policy.proximal") in (None, "recomputed")
    filters = filters_of(run)
    if not (filters and uncorrected and recomputed and run.last("behavior_ratio") < KEPT):
        return None
    left = run.last("behavior_ratio")
    return Finding(
        "truncated_support",
        32,
        "filters leave out a part of the policy",
        f"{run.where('behavior_ratio')}: tokens that {' and '.join(filters)} left had {left:.1%} of the probability",
        "Tokens are drawn from a narrower distribution than the one in the loss, so that its gradient is scaled up at "
        "the states where much is left out. Tokens that are left out are never tried.",
        "set off_policy.correct: clip, or use fewer filters in training (eval has its own)",
    )
