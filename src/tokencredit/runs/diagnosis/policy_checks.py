"""Checks of sampling, the update and the policy."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import SETTLED, Checks, Evidence, Finding
from tokencredit.runs.jsonl import is_number
from tokencredit.runs.summary import WINDOW
from tokencredit.settings.run_kind import CONTROL

RATIO_ROUNDING, RATIO_ROUNDING_IN_BFLOAT16 = 1e-3, 0.2
"""Largest `first_ratio_error` attributed to rounding. Measured: 8e-6 in float32; in bfloat16 8e-3 with the built-in
model, 5e-2 with 24 random layers."""
TRIAL = 3
"""Iterations of a run that only tries things out, whose warm-up is no finding."""
CLIPPED_AWAY = 1000
"""Gradient norm over its limit above which the clipping may be why updates are small. Measured: 150 on CartPole, where
it costs nothing, and 20,000 on the built-in model, with the same reward as without; at 2,000,000 the policy stands
still, since AdamW does not mind a scaled gradient until its elements fall below ε."""
ROUNDING_KL = 1e-5
"""Largest `behavior_kl` attributed to rounding in float32. Measured: 3e-7."""
ROUNDING_DISTANCE = 1e-7
"""The same of `engine_distance`. Measured with the built-in model: 2e-13, and 8e-7 with an engine in bfloat16."""
ROUNDING_IN_BFLOAT16 = 5e-3
"""The same of both in bfloat16. Measured: 2e-5 with the built-in model, 7e-4 with 24 random layers."""
STALE_KL = 0.1
"""`behavior_kl` above which samples of earlier updates are too old. Measured without correction (findings.md, 12):
at most 0.08 where the reward is up to 0.05 behind that of fresh samples, at least 0.18 where it is 0.26 behind."""
KL_IN_VAIN = 0.25
"""KL to the reference, in nats per token, that is too much for a reward that hardly rises. Measured: 0.2 where it rose
by 1.5 standard deviations."""
LARGE_UPDATE = 0.3
"""`approx_kl_k3`, in nats per token, of an update that is too large. Measured: 0.1 with ten times the default rate."""
SMALL_UPDATE = 1e-5
"""Mean `approx_kl_k3` of updates that hardly change a policy. Measured: 1e-6 with a tenth of a good rate on CartPole,
3e-5 to 2e-4 with it, although no ratio is clipped."""
DISCOUNTED_AWAY = 0.1
"""Share of a reward at the end that reaches the first step, below which γ may be why nothing is learned."""
KEPT = 0.98
"""Share of the policy's probability that filters leave, below which they are a finding."""


def _single_step(run: Evidence) -> bool:
    """True if an update is one step, in which every ratio is 1 and none can be clipped."""
    steps = (run.setting("ppo.epochs") or 1) * (run.setting("ppo.minibatches") or 1)
    return steps == 1 or run.setting("algorithm") == "policy_gradient"


def _clips_tokens(run: Evidence) -> bool:
    """True if the loss is PPO's, whose clip fraction shows the size of the steps; others clip more, or mask less."""
    return run.setting("ppo.loss") in (None, "clip")


def _filters(run: Evidence) -> list[str]:
    """The settings that filter the sampled tokens."""
    off = {"rollout.top_k": 0, "rollout.top_p": 1, "rollout.min_p": 0, "rollout.min_new_tokens": 0}
    return [key for key, value in off.items() if (run.setting(key) or value) != value]


def _corrected(run: Evidence) -> bool:
    return run.setting("off_policy.correct") not in (None, "none")


def _entropy(run: Evidence) -> str:
    return "entropy_in_update" if run.run_kind is CONTROL else "entropy"


def engine_distance(run: Evidence) -> float:
    """KL from the engine to the policy, nats per token: the mean of r − 1 − log r for ratios r of policy to engine.

    No term is below 0, so that rounding shows, which cancels out in `behavior_kl`, the mean of −log r. Filters of the
    engine's own show in that.
    """
    return run.last("behavior_ratio") - 1 + run.last("behavior_kl")


def mismatch(run: Evidence) -> Finding | None:
    """Sampling and training disagree on the probability of the same tokens."""
    limit = RATIO_ROUNDING_IN_BFLOAT16 if run.setting("model.dtype") == "bfloat16" else RATIO_ROUNDING
    behind = run.setting("off_policy.proximal") in ("behavior", "interpolated")
    if behind and run.setting("off_policy.support") != "truncated":  # no first ratio of 1; `engine_mismatch`
        return None
    if not run.last("first_ratio_error") > limit:
        return None
    return Finding(
        "sampling and training disagree",
        f"{run.where('first_ratio_error')}; rounding explains {limit:g}",
        "In the first minibatch of an update the policy is the one that sampled, so each ratio must be 1 up to "
        "rounding. Where it is not, gradients do not follow the reward.",
        (
            "switch dropout off (model.dropout, model.lora.dropout)",
            "look for code that changes the model between rollout and update",
        ),
    )


def engine_mismatch(run: Evidence) -> Finding | None:
    """The engine draws tokens from another distribution than the trained model's, and neither the run's filters nor
    the age of samples explain it."""
    exact = run.setting("model.dtype") == "float32"
    kl, distance = (ROUNDING_KL, ROUNDING_DISTANCE) if exact else (ROUNDING_IN_BFLOAT16, ROUNDING_IN_BFLOAT16)
    apart = run.last("behavior_kl") > kl or engine_distance(run) > distance
    if _filters(run) or run.setting("rollout.max_age") or run.last("age_max") > 0 or not apart:
        return None
    return Finding(
        "the engine does not draw from the trained model",
        f"{run.where('behavior_kl')} nats per token; behavior_ratio − 1 + behavior_kl {engine_distance(run):.2g}; "
        f"rounding explains {kl:g} and {distance:g}",
        "The log-probs with which tokens were drawn differ from those of a full forward pass of the trained model, as "
        "with old weights, another dtype, or filters and a temperature of the engine's own.",
        (
            "look for sampling defaults of the engine (generation_config.json)",
            "take the same dtype in both",
            *([] if _corrected(run) else ["set off_policy.correct: clip if both compute what they should"]),
        ),
    )


def stale_samples(run: Evidence) -> Finding | None:
    """Samples are so many updates old that the policy has moved away from them."""
    if _filters(run) or not (run.last("age_max") > 0 and run.last("behavior_kl") > STALE_KL):
        return None
    sooner = "lower rollout.max_age" if run.setting("rollout.max_age") else "learn from a batch soon, and only once"
    return Finding(
        "samples are too old",
        f"{run.where('behavior_kl')} nats per token; {run.where('age_mean')} updates",
        "Between the drawing of a token and its use the policy has changed so much that its samples say little about "
        "the present one.",
        (f"{sooner}, lower optim.lr or ppo.epochs; corrections did not help where this was measured",),
    )


def no_step(run: Evidence) -> Finding | None:
    """Every optimizer step was skipped, or every update ended before its first step."""
    steps, skipped = (run.values(name, slice(None)) for name in ("steps", "bad_steps"))
    if steps and run.values("loss", slice(None)) and not (sum(steps) or sum(skipped)):
        return Finding(
            "no optimizer step was taken",
            f"steps 0 in {len(steps)} iterations, {run.where('approx_kl_k3')}",
            "Each update ended before its first step, since the KL was above ppo.target_kl there already.",
            ("leave out ppo.target_kl", "raise it above the KL that rounding explains"),
        )
    if not sum(skipped) or run.values("loss", slice(None)):
        return None
    return Finding(
        "no optimizer step was taken",
        f"bad_steps {sum(skipped):.0f} in {len(run)} iterations, no step with a finite loss",
        "A reward, loss or gradient was not finite each time, so the weights are those of the start.",
        (
            "read the reasons in the run's bad_steps/*/about.json, and check the reward there",
            "lower optim.lr if losses or gradients are not finite",
        ),
    )


def not_moved(run: Evidence) -> Finding | None:
    """The policy still equals its reference, up to rounding."""
    later = slice(1, None)
    # Filtered and older samples give no KL, but a log-ratio, which is 0 too for equal policies.
    name = "kl" if run.values("kl", later) else "log_ratio"
    moved = run.values(name, later)
    if len(moved) < SETTLED or not max(map(abs, moved)) < 1e-6 * run.last("length"):
        return None
    return Finding(
        "the policy has not moved",
        run.where(name),
        "Its KL to the reference is 0 up to rounding: no parameter is trained, or the gradient is 0.",
        ("raise optim.lr", "check whether the metrics steps and grad_norm are 0 and which parameters are frozen"),
    )


def all_masked(run: Evidence) -> Finding | None:
    """No completion is left in the loss."""
    if not run.last("masked") > 0.99:
        return None
    return Finding(
        "no completion is left in the loss",
        run.where("masked"),
        "All were truncated, and ppo.mask_truncated masks those out: no step is taken.",
        ("raise rollout.max_new_tokens", "leave out ppo.mask_truncated"),
    )


def kl_runaway(run: Evidence) -> Finding | None:
    """The policy is far from the reference and moving away, or moves away from it without any gain."""
    if len(run) < SETTLED or not run.last("length") > 0:
        return None
    per_token, half = run.last("kl") / run.last("length"), len(run) // 2
    grows = per_token > 1.0 and run.last("kl") > 1.5 * run.mean("kl", slice(half - WINDOW, half))
    if not (grows or (per_token > KL_IN_VAIN and not run.learns())):
        return None
    return Finding(
        "the KL to the reference runs away",
        f"{run.where('kl')}, {per_token:.2f} nats per token; {run.where(run.reward)}",
        "The policy no longer writes like the model it came from, and reward models are unreliable on such texts, "
        "which invites reward hacking."
        if run.learns()
        else "The policy moves away from the model it came from, and the reward rises by less than half its standard "
        "deviation over completions: much of the way may follow noise.",
        ("raise kl.coef", "set kl.target", "lower optim.lr", "stop earlier (stop.kl)"),
    )


def entropy_collapse(run: Evidence) -> Finding | None:
    """Sampling has become nearly deterministic, as it may for an agent that has learned its task."""
    name = _entropy(run)
    first, last = run.first(name), run.last(name)
    if len(run) < SETTLED or not (first > 0.05 and last < 0.1 * first) or (run.run_kind is CONTROL and run.learns()):
        return None
    return Finding(
        "the entropy has collapsed",
        run.where(name),
        "The policy does nearly the same each time, so it no longer explores.",
        ("lower optim.lr", "raise kl.coef", "raise ppo.entropy_coef"),
    )


def entropy_explodes(run: Evidence) -> Finding | None:
    """Tokens have become far more random than at the start."""
    name = _entropy(run)
    first, last = run.first(name), run.last(name)
    if len(run) < SETTLED or not last > max(2 * first, first + 1):
        return None
    bonus = run.setting("ppo.entropy_coef")
    return Finding(
        "the entropy explodes",
        run.where(name),
        "The policy acts ever more at random: texts lose their sense, and agents their aim.",
        (*["lower ppo.entropy_coef, or leave it out"] * bool(bonus), "lower optim.lr", "raise kl.coef"),
    )


def clip_high(run: Evidence) -> Finding | None:
    """Updates take the policy far from the samples: most tokens leave the clip range, or the KL is large."""
    clipped = _clips_tokens(run) and run.last("clip_fraction") > 0.4
    large = max(run.first("approx_kl_k3"), run.last("approx_kl_k3")) > LARGE_UPDATE
    if len(run) < WINDOW or not (clipped or large) or run.learns():
        return None
    return Finding(
        "most of an update is clipped" if clipped else "updates take the policy too far",
        f"{run.where('clip_fraction')}; {run.where('approx_kl_k3')}",
        "Within a few steps the policy leaves the range in which the surrogate objective is valid.",
        ("lower optim.lr", *["lower ppo.epochs or ppo.minibatches"] * (not _single_step(run)), "set ppo.target_kl"),
    )


def clip_low(run: Evidence) -> Finding | None:
    """No ratio reaches the clip range, after the warm-up."""
    warm = slice(run.setting("optim.warmup") or 0, None)
    clipped, kl = run.mean("clip_fraction", warm), run.mean("approx_kl_k3", warm)
    if len(run.values("clip_fraction", warm)) < SETTLED or _single_step(run) or not _clips_tokens(run):
        return None
    if not clipped < 1e-4 or kl > SMALL_UPDATE or run.learns(1.0):
        return None
    limit, norms = run.setting("optim.max_grad_norm"), run.values("grad_norm", warm)
    scaled = limit is not None and bool(norms) and min(norms) > CLIPPED_AWAY * limit
    return Finding(
        "updates hardly change the policy",
        "; ".join(map(run.where, ("clip_fraction", "approx_kl_k3", *["grad_norm"] * scaled))),
        "No ratio reaches the clip range: the steps are much smaller than PPO allows.",
        (*["raise optim.max_grad_norm, or set it to null"] * scaled, "raise optim.lr", "raise ppo.epochs"),
    )


def discounted(run: Evidence) -> Finding | None:
    """γ leaves almost nothing of a text's reward at its first tokens, and the reward has not risen.

    Agents may have a reward on every step, and a γ of 0.9 with long episodes.
    """
    gamma, length = run.setting("advantage.gamma"), run.last("length")
    if len(run) < SETTLED or not is_number(gamma) or run.setting("advantage.unit") == "turn" or run.learns(0.2):
        return None
    if run.run_kind is CONTROL or not (0 <= gamma < 1 and gamma**length < DISCOUNTED_AWAY):
        return None
    return Finding(
        "γ discounts the reward away",
        f"advantage.gamma {gamma:g}; {run.where('length')}; {run.where(run.reward)}",
        f"Its horizon is 1 / (1 − γ) = {1 / (1 - gamma):.0f} tokens: of a reward at the end, a share of {gamma:g}^"
        f"{length:.0f} = {gamma**length:.1g} reaches the first step, so early steps learn nothing from it.",
        ("leave out advantage.gamma",),
    )


def truncated_support(run: Evidence) -> Finding | None:
    """Filters leave out a part of the distribution that the update does not account for."""
    recomputed = run.setting("off_policy.proximal") in (None, "recomputed")
    filters, left = _filters(run), run.last("behavior_ratio")
    if not (filters and recomputed and left < KEPT) or _corrected(run):
        return None
    return Finding(
        "filters leave out a part of the policy",
        f"{run.where('behavior_ratio')}: tokens that {' and '.join(filters)} left had {left:.1%} of the probability",
        "Tokens are drawn from a narrower distribution than the one in the loss, so that its gradient is scaled up at "
        "the states where much is left out. Tokens that are left out are never tried.",
        ("set off_policy.correct: clip", "use fewer filters"),
    )


def still_warming(run: Evidence) -> Finding | None:
    """The learning-rate warm-up outlasted a run that was not cut short, longer than a trial, and took steps."""
    warmup, iterations = run.setting("optim.warmup") or 0, run.setting("run.iterations") or 0
    if not run.ended or not warmup >= len(run) >= iterations or len(run) <= TRIAL or no_step(run):
        return None
    return Finding(
        "the learning rate was still warming up at the end",
        f"optim.warmup {warmup}, iterations {len(run)}",
        "The run never reached its learning rate.",
        ("shorten optim.warmup", "run longer"),
    )


POLICY_CHECKS: Checks = (
    (100, mismatch, "docs/algorithms.md#rounding"),
    (83, engine_mismatch, "docs/algorithms.md#corrections-in-a-run"),
    (82, stale_samples, "docs/engines.md#training-while-sampling"),
    (98, no_step, "docs/resuming.md#nan-and-infinity"),
    (95, not_moved, "docs/algorithms.md#kl-divergence"),
    (95, all_masked, "docs/algorithms.md#rewards"),
    (75, kl_runaway, "docs/algorithms.md#kl-divergence"),
    (87, entropy_explodes, "docs/algorithms.md#entropy-and-weights"),
    (70, entropy_collapse, "docs/algorithms.md#entropy-and-weights"),
    (68, discounted, "docs/algorithms.md#the-setting"),
    (55, clip_high, "docs/algorithms.md#losses"),
    (64, clip_low, "docs/algorithms.md#losses"),
    (32, truncated_support, "docs/algorithms.md#corrections-in-a-run"),
    (45, still_warming, "docs/algorithms.md#steering-a-run"),
)
