"""Checks of the critic and λ, by training's own numbers and by audits.

Those of audits test the bound of an interval, not its middle, so that chance gives no finding.
"""

from __future__ import annotations

from tokencredit.audit.verdict import NOISY
from tokencredit.runs.diagnosis.evidence import SETTLED, Check, Evidence, Finding

FLAT = 0.3
"""Standard deviation of a critic's values relative to the true values, below which it is flat. Measured: `make
doctor`."""
FAR = 2.0
"""Distance of values from rewards, in standard deviations of these, at which the critic lags."""
LARGE_GAP, SWAMPED = 5.0, 10.0
"""Distance of values from rewards, and gradient norm over its limit, above which the value loss drowns the policy's.
Measured at 92 characters as reward: 92 and 138; at rewards of about 1: below 1 and 3."""
NOISE = 0.05
"""Explained variance below 0 that is chance."""
GAIN = 0.05
"""Gain in correlation from another λ, above which a change is worthwhile."""


def _values_known(run: Evidence) -> bool:
    """True if audits have true values without much noise."""
    return run.in_audits("audit/value_noise", lambda share: share < NOISY)


def _gains(run: Evidence, name: str) -> bool:
    """True if audits without much noise agree on a gain."""
    return run.in_audits(name, lambda gain: gain > GAIN) and run.in_audits("audit/noise", lambda share: share < NOISY)


def _lam(run: Evidence) -> float | None:
    """The run's λ, the latest if it follows the critic; None for an estimator without one."""
    name, lam = run.setting("advantage.estimator"), run.setting("advantage.lam")
    if run.setting("advantage.lam_follows"):
        lam = run.last("lam")
    fixed = {"td": 0.0, "monte_carlo": 1.0}
    if name in fixed:
        return fixed[name]
    return lam if name in ("gae", "decoupled_gae") and isinstance(lam, int | float) else None


def _of_gae(run: Evidence) -> str:
    return " with advantage.estimator: gae" if run.setting("advantage.estimator") in ("td", "monte_carlo") else ""


def _value_gap(run: Evidence) -> float:
    """Distance of the critic's mean value from the mean reward of completions; NaN for agents, whose returns differ."""
    return abs(run.last("value_mean") - run.last("reward"))


def _far(run: Evidence) -> bool:
    """True if values are much further from the rewards than these are from each other."""
    return _value_gap(run) > FAR * run.last("reward_std")


def large_rewards(run: Evidence) -> Finding | None:
    """Rewards are so far from the values that the value loss alone moves the trunk that the policy shares."""
    if run.setting("critic.kind") != "shared" or run.setting("critic.detach") or not run.setting("critic.coef"):
        return None
    limit = run.setting("optim.max_grad_norm") or 1.0
    gap, norm = _value_gap(run), run.last("grad_norm")
    if not (gap > LARGE_GAP and norm > SWAMPED * limit) or run.learns():
        return None
    return Finding(
        "the rewards are too large for a critic that shares the policy's trunk",
        "; ".join(map(run.where, ("reward", "value_mean", "grad_norm"))),
        "The value loss grows with the square of the distance between rewards and values, so its gradient drowns the "
        "policy's in the weights that both share.",
        (
            "set score.normalize: running",
            "scale the reward so that it is about 1",
            "set critic.kind: separate",
        ),
    )


def critic_lags(run: Evidence) -> Finding | None:
    """Values are still far from the rewards, and explain nothing of them."""
    if len(run) < SETTLED or not _far(run) or not run.last("explained_variance") < 0.1 or run.learns():
        return None
    faster = ("raise critic.lr" + " and critic.trunk_lr" * (run.setting("critic.kind") == "separate"),)
    smaller = ("set score.normalize: running",)
    return Finding(
        "the critic lags behind the rewards",
        "; ".join(map(run.where, ("reward", "value_mean", "explained_variance"))),
        "Its values are further from the rewards than those are from each other, so every completion looks better, or "
        "every one worse, than expected.",
        (
            *(smaller + faster if _value_gap(run) > LARGE_GAP else faster + smaller),
            "give the critic a head start (critic.pretrain, critic.warmup)",
        ),
    )


def explained_variance(run: Evidence) -> Finding | None:
    """The critic is worse than a constant, in a run that does not learn.

    In one that learns, values follow the returns: -0.04 is usual in the first 20 iterations on CartPole, which is then
    solved.
    """
    if len(run) < SETTLED or not run.mean("explained_variance", slice(-SETTLED, None)) < -NOISE or run.learns():
        return None
    return Finding(
        "the critic explains nothing",
        run.where("explained_variance"),
        "Its values are further from the returns than their mean is, so advantages carry more noise than without it.",
        (
            "give the critic more steps (critic.epochs) or a head start (critic.pretrain, critic.warmup)",
            "take larger batches (rollout.batch_size)",
            "take larger batches (env.number, steps)",
            "lower critic.lr if its values jump from batch to batch",
        ),
    )


def pretraining(run: Evidence) -> Finding | None:
    """The critic learned nothing in pretraining."""
    batches, explained = run.first("pretrain/batches"), run.first("pretrain/explained_variance")
    if not (batches > 1 and explained <= 0):
        return None
    return Finding(
        "the critic's pretraining was in vain",
        f"pretrain/explained_variance {explained:.3g} after {batches:.0f} batches",
        "On new batches, its values are no closer to the returns than their mean. It learned too little, or the "
        "texts do not predict their returns before the end.",
        ("raise critic.pretrain, critic.lr or rollout.batch_size", "take critic.kind: separate"),
    )


def value_loss(run: Evidence) -> Finding | None:
    """The value loss keeps growing."""
    if len(run) < SETTLED:
        return None
    last, early = run.last("value_loss"), run.mean("value_loss", slice(0, SETTLED))
    if not (last > 10 * early and run.last("explained_variance") < 0.5):
        return None
    return Finding(
        "the value loss explodes",
        run.where("value_loss"),
        "Returns grow faster than the critic can follow. Rewards on every step that add up can cause this, or a "
        "critic that bootstraps from its own values.",
        (
            "normalize the reward (score.normalize: running)",
            "normalize the rewards (env.normalize_rewards)",
            "pay the reward at the end",
            "lower critic.lr",
            "set critic.clip",
        ),
    )


def critic_worse(run: Evidence) -> Finding | None:
    """The critic's values are further from the truth than their own mean."""
    name = "audit/explained_variance_high"
    if not (run.in_audits(name, lambda high: high < 0) and _values_known(run)):
        return None
    return Finding(
        "the critic is worse than a constant",
        run.audited(name),
        "Its values are further from the true values than a constant would be, and its errors go into the advantages.",
        (
            "give the critic more steps (critic.epochs), a model of its own (critic.kind: separate) or a head start "
            "(critic.warmup)",
            "lower critic.lr if it overshoots",
        ),
    )


def critic_flat(run: Evidence) -> Finding | None:
    """The critic predicts nearly the same value for states whose true values differ."""
    name = "audit/spread_high"
    if not (run.in_audits(name, lambda high: high < FLAT) and _values_known(run)):
        return None
    return Finding(
        "the critic is flat where values are not",
        f"{run.audited(name)}; 1 is the spread of the true values",
        "Its values hardly distinguish states, so no token is credited for what it changed.",
        (
            "raise critic.lr or critic.epochs",
            "give the critic a model of its own (critic.kind: separate) or a head start (critic.warmup)",
            "leave out critic.detach",
        ),
    )


def lam_low(run: Evidence) -> Finding | None:
    """A higher λ would correlate better with the truth."""
    name, lam = "audit/raise_lam", _lam(run)
    if lam is None or not (lam < 1 and _gains(run, name)):
        return None
    return Finding(
        "λ leans on a critic that is wrong: raise it",
        f"{run.audited(name)}, with λ = {lam:g}",
        "With λ = 1, which relies on the critic least, the correlation with the true advantages would rise by at "
        "least that much.",
        (f"raise advantage.lam{_of_gae(run)}", "improve the critic (critic.epochs, critic.kind: separate)"),
    )


def lam_high(run: Evidence) -> Finding | None:
    """A lower λ would correlate better with the truth."""
    name, lam = "audit/lower_lam", _lam(run)
    if lam is None or not (lam > 0 and _gains(run, name)):
        return None
    return Finding(
        "λ leans less than it could on a critic that is right: lower it",
        f"{run.audited(name)}, with λ = {lam:g}",
        "With λ = 0, which relies on the critic alone, the correlation with the true advantages would rise by at "
        "least that much: the critic predicts better than the sampled returns.",
        (f"lower advantage.lam{_of_gae(run)}",),
    )


CRITIC_CHECKS: tuple[tuple[int, Check], ...] = (
    (79, large_rewards),
    (53, critic_lags),
    (50, explained_variance),
    (52, pretraining),
    (65, value_loss),
    (58, critic_worse),
    (56, critic_flat),
    (54, lam_low),
    (28, lam_high),
)
"""Each check and the weight of its finding."""
