"""Checks of a run: each compares metrics of the first and the last iterations, and names what to change."""

from __future__ import annotations

from collections.abc import Callable

from tokencredit.runs.diagnosis.audit_checks import critic_flat, critic_worse, lam_high, lam_low
from tokencredit.runs.diagnosis.episode_checks import (
    calls_malformed,
    environment_fails,
    never_ended,
    no_room,
    observations_cut,
    tools_fail,
)
from tokencredit.runs.diagnosis.evidence import SETTLED, Evidence, Finding
from tokencredit.runs.diagnosis.off_policy_checks import engine_mismatch, stale_samples, truncated_support
from tokencredit.runs.diagnosis.reward_checks import constant_term, dominant_term, flat_reward
from tokencredit.runs.history import WINDOW

Check = Callable[[Evidence], Finding | None]

ROUNDING = 1e-3
"""Largest `first_ratio_error` attributed to rounding. Measured in float32: 8e-6."""

ROUNDING_IN_BFLOAT16 = 0.2
"""The same in bfloat16. Measured: 8e-3 with the built-in model, 5e-2 with 24 random layers."""

TRIAL = 3
"""Iterations of a run that only tries things out, whose warm-up is no finding."""

CLIPPED_AWAY = 1000
"""Gradient norm over its limit above which the clipping may cost learning. Measured: 150 on CartPole, where it costs
nothing, and 20,000 on the built-in model, with the same reward as without; at 2,000,000 the policy stands still."""


def _single_step(run: Evidence) -> bool:
    """True if an update is one step, in which every ratio is 1 and none can be clipped."""
    steps = (run.setting("ppo.epochs") or 1) * (run.setting("ppo.minibatches") or 1)
    return steps == 1 or run.setting("algorithm") == "policy_gradient"


def _clips_tokens(run: Evidence) -> bool:
    """True if the loss is PPO's, whose clip fraction shows the size of the steps; others clip more, or mask less."""
    return run.setting("ppo.loss") in (None, "clip")


def mismatch(run: Evidence) -> Finding | None:
    """Sampling and training disagree on the probability of the same tokens."""
    limit = ROUNDING_IN_BFLOAT16 if run.setting("model.dtype") == "bfloat16" else ROUNDING
    behind = run.setting("off_policy.proximal") in ("behavior", "interpolated")
    if behind and run.setting("off_policy.support") != "truncated":  # no first ratio of 1; `engine_mismatch`
        return None
    if not run.last("first_ratio_error") > limit:
        return None
    return Finding(
        "mismatch",
        100,
        "sampling and training disagree",
        f"{run.where('first_ratio_error')}; rounding explains {limit:g}",
        "In the first minibatch of an update the policy is the one that sampled, so each ratio must be 1 up to "
        "rounding. Where it is not, gradients do not follow the reward.",
        "switch dropout off (model.dropout, model.lora.dropout), and look for code that changes the model between "
        "rollout and update",
    )


def negative_kl(run: Evidence) -> Finding | None:
    """The KL estimate is below 0 by more than chance."""
    if not run.last("kl") < -0.5:
        return None
    return Finding(
        "negative_kl",
        90,
        "the KL estimate is negative",
        run.where("kl"),
        "A KL divergence cannot be negative. Tokens were not drawn from the distribution whose log-probabilities were "
        "recorded, as when sampling and training disagree.",
        "look for code that changes the model or the log-probabilities between rollout and update, or take "
        "kl.estimator: full",
    )


def no_step(run: Evidence) -> Finding | None:
    """Every optimizer step was skipped, or every update ended before its first step."""
    steps, skipped = (run.values(name, slice(None)) for name in ("steps", "bad_steps"))
    if steps and run.values("loss", slice(None)) and not (sum(steps) or sum(skipped)):
        return Finding(
            "no_step",
            98,
            "no optimizer step was taken",
            f"steps 0 in {len(steps)} iterations, {run.where('approx_kl_k3')}",
            "Each update ended before its first step, since the KL was above ppo.target_kl there already.",
            "leave out ppo.target_kl, or raise it above the KL that rounding explains",
        )
    if not sum(skipped) or run.values("loss", slice(None)):
        return None
    return Finding(
        "no_step",
        98,
        "no optimizer step was taken",
        f"bad_steps {sum(skipped):.0f} in {len(run)} iterations, no step with a finite loss",
        "A reward, loss or gradient was not finite each time, so the weights are those of the start.",
        "read the reasons in the run's bad_steps/*/about.json; check the reward on those texts, or lower optim.lr",
    )


def not_moved(run: Evidence) -> Finding | None:
    """The policy still equals its reference, up to rounding."""
    later = slice(1 + (run.setting("critic.warmup") or 0), None)
    # Filtered and older samples give no KL, but a log-ratio, which is 0 too for equal policies.
    name = "kl" if run.values("kl", later) else "log_ratio"
    moved = run.values(name, later)
    if len(moved) < SETTLED or not max(map(abs, moved)) < 1e-6 * run.last("length"):
        return None
    return Finding(
        "not_moved",
        95,
        "the policy has not moved",
        run.where(name),
        "Its KL to the reference is 0 up to rounding: no parameter is trained, or the gradient is 0.",
        "raise optim.lr, and check whether the metrics steps and grad_norm are 0 and which parameters are frozen",
    )


def all_masked(run: Evidence) -> Finding | None:
    """No completion is left in the loss."""
    if not run.last("masked") > 0.99:
        return None
    return Finding(
        "all_masked",
        95,
        "no completion is left in the loss",
        run.where("masked"),
        "All were truncated, and ppo.mask_truncated masks those out: no step is taken.",
        "raise rollout.max_new_tokens, or leave out ppo.mask_truncated",
    )


def degenerate(run: Evidence) -> Finding | None:
    """The reward rises while the texts degenerate.

    Who has learned a game plays short and similar episodes, so these are judged by the reference alone.
    """
    if len(run) < SETTLED or not run.gain() > 0.2:
        return None
    signs = {
        "distinct": run.last("distinct") < 0.5 * run.first("distinct"),
        "distinct_2": run.last("distinct_2") < 0.4 * run.first("distinct_2"),
        "repetition": run.last("repetition") > run.first("repetition") + 0.25,
        "length": run.last("length") < 0.4 * run.first("length"),
        "ref_logprob": run.last("ref_logprob") < run.first("ref_logprob") - 2.0,
    }
    degraded = [name for name, is_bad in signs.items() if is_bad and not (run.episodic() and name != "ref_logprob")]
    if not degraded:
        return None
    return Finding(
        "degenerate",
        85,
        "the reward rises, and the texts fall apart",
        "; ".join(map(run.where, [run.reward, *degraded])),
        "The policy has found texts that the reward likes and people would not: repetitive, short, or unlike "
        "anything that the reference would write.",
        "raise kl.coef or ppo.entropy_coef, lower optim.lr, add a reward term that penalizes such texts, or stop "
        "earlier (stop.kl, stop.reward)",
    )


def kl_runaway(run: Evidence) -> Finding | None:
    """The policy is far from the reference and moving away."""
    if len(run) < SETTLED or not run.last("length") > 0:
        return None
    per_token, half = run.last("kl") / run.last("length"), len(run) // 2
    if not (per_token > 1.0 and run.last("kl") > 1.5 * run.mean("kl", slice(half - WINDOW, half))):
        return None
    return Finding(
        "kl_runaway",
        75,
        "the KL to the reference runs away",
        f"{run.where('kl')}, {per_token:.2f} nats per token",
        "The policy no longer writes like the model it came from, and reward models are unreliable on such texts.",
        "raise kl.coef, set kl.target, lower optim.lr, or stop earlier (stop.kl)",
    )


def entropy_collapse(run: Evidence) -> Finding | None:
    """Sampling has become nearly deterministic."""
    first, last = run.first("entropy"), run.last("entropy")
    if len(run) < SETTLED or not (first > 0.05 and last < 0.1 * first):
        return None
    return Finding(
        "entropy_collapse",
        70,
        "the entropy has collapsed",
        run.where("entropy"),
        "The policy writes nearly the same text each time, so it no longer explores.",
        "raise ppo.entropy_coef or kl.coef, or lower optim.lr",
    )


def clip_high(run: Evidence) -> Finding | None:
    """Most tokens leave the clip range."""
    if len(run) < WINDOW or not _clips_tokens(run) or not run.last("clip_fraction") > 0.4:
        return None
    return Finding(
        "clip_high",
        55,
        "most of an update is clipped",
        run.where("clip_fraction"),
        "Within a few steps the policy leaves the range in which the surrogate objective is valid.",
        "lower optim.lr, ppo.epochs or ppo.minibatches, or set ppo.target_kl",
    )


def clip_low(run: Evidence) -> Finding | None:
    """No ratio reaches the clip range."""
    if len(run) < SETTLED or _single_step(run) or not _clips_tokens(run):
        return None
    if not run.mean("clip_fraction", slice(None)) < 1e-4:
        return None
    return Finding(
        "clip_low",
        30,
        "updates hardly change the policy",
        run.where("clip_fraction"),
        "No ratio reaches the clip range: the steps are much smaller than PPO allows.",
        "raise optim.lr or ppo.epochs",
    )


def explained_variance(run: Evidence) -> Finding | None:
    """The critic is worse than a constant."""
    if len(run) < SETTLED or not run.mean("explained_variance", slice(-SETTLED, None)) < 0:
        return None
    return Finding(
        "explained_variance",
        50,
        "the critic explains nothing",
        run.where("explained_variance"),
        "Its values are further from the returns than their mean is, so advantages carry more noise than without it.",
        "raise critic.lr or critic.coef, give the critic a head start (critic.warmup; critic.pretrain for texts), or "
        "normalize the score (score.normalize)",
    )


def pretraining(run: Evidence) -> Finding | None:
    """The critic learned nothing in pretraining."""
    batches, explained = run.first("pretrain/batches"), run.first("pretrain/explained_variance")
    if not (batches > 1 and explained <= 0):
        return None
    return Finding(
        "pretraining",
        52,
        "the critic's pretraining was in vain",
        f"pretrain/explained_variance {explained:.3g} after {batches:.0f} batches",
        "On new batches, its values are no closer to the returns than their mean. It learned too little, or the "
        "texts do not predict their returns before the end.",
        "raise critic.pretrain, critic.lr or rollout.batch_size, or take critic.kind: separate",
    )


def value_loss(run: Evidence) -> Finding | None:
    """The value loss keeps growing."""
    if len(run) < SETTLED:
        return None
    last, early = run.last("value_loss"), run.mean("value_loss", slice(0, SETTLED))
    if not (last > 10 * early and run.last("explained_variance") < 0.5):
        return None
    return Finding(
        "value_loss",
        65,
        "the value loss explodes",
        run.where("value_loss"),
        "Returns grow faster than the critic can follow. Rewards on every step that add up can cause this, or a "
        "critic that bootstraps from its own values.",
        "pay the reward at the end, normalize it (score.normalize), lower critic.lr, or set critic.clip",
    )


def truncated(run: Evidence) -> Finding | None:
    """Most completions run into the length limit; `never_ended` and `no_room` judge episodes."""
    if run.setting("rollout.stop_at_eos") is False or run.episodic() or not run.last("truncated") > 0.8:
        return None
    handled = run.setting("advantage.bootstrap") or run.setting("ppo.mask_truncated")
    return Finding(
        "truncated",
        40,
        "most completions are cut off",
        run.where("truncated"),
        "The reward scores unfinished texts, and the policy never learns to finish.",
        "raise rollout.max_new_tokens" + ("" if handled else ", or set score.missing_eos_penalty"),
    )


def always_clipped(run: Evidence) -> Finding | None:
    """Clipping scales the gradient so far down that the policy hardly moves."""
    limit = run.setting("optim.max_grad_norm")
    norms = run.values("grad_norm", slice(-2 * SETTLED, None))
    if limit is None or len(norms) < 2 * SETTLED or not min(norms) > CLIPPED_AWAY * limit:
        return None
    if _single_step(run) or not _clips_tokens(run) or not run.mean("clip_fraction", slice(None)) < 0.01:
        return None
    return Finding(
        "always_clipped",
        65,
        "clipping leaves almost nothing of the gradient",
        f"{run.where('grad_norm')}, at least {min(norms) / limit:,.0f} times optim.max_grad_norm, {limit:g}; "
        f"{run.where('clip_fraction')}",
        "AdamW does not mind a scaled gradient until its elements fall below ε (optim.eps); then its steps shrink.",
        "raise optim.max_grad_norm, or set it to null",
    )


def still_warming(run: Evidence) -> Finding | None:
    """The learning-rate warm-up outlasted a run that was not cut short, longer than a trial, and took steps."""
    warmup, iterations = run.setting("optim.warmup") or 0, run.setting("run.iterations") or 0
    if not warmup >= len(run) >= iterations or len(run) <= TRIAL or no_step(run):
        return None
    return Finding(
        "still_warming",
        45,
        "the learning rate was still warming up at the end",
        f"optim.warmup {warmup}, iterations {len(run)}",
        "The run never reached its learning rate.",
        "shorten optim.warmup, or run longer",
    )


CHECKS: tuple[Check, ...] = (
    mismatch,
    engine_mismatch,
    stale_samples,
    negative_kl,
    no_step,
    not_moved,
    all_masked,
    degenerate,
    kl_runaway,
    entropy_collapse,
    clip_high,
    explained_variance,
    pretraining,
    critic_worse,
    critic_flat,
    lam_low,
    lam_high,
    value_loss,
    truncated,
    constant_term,
    dominant_term,
    always_clipped,
    truncated_support,
    environment_fails,
    calls_malformed,
    tools_fail,
    never_ended,
    no_room,
    observations_cut,
)
FINAL_CHECKS: tuple[Check, ...] = (clip_low, flat_reward, still_warming)
