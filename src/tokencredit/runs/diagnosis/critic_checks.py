"""Checks of the critic and λ, by training's own numbers and by audits.

Those of audits test the bound of an interval, not its middle, so that chance gives no finding.
"""

from __future__ import annotations

from tokencredit.audit.verdict import NOISY
from tokencredit.runs.diagnosis.evidence import SETTLED, Checks, Evidence, Finding
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parts import is_own, label_of
from tokencredit.settings.run_kind import CONTROL

FLAT = 0.3
"""Standard deviation of a critic's values relative to the true values, below which it is flat. Measured: `make
doctor`."""
FAR = 2.0
"""Distance of values from rewards or returns, in standard deviations of these, at which the critic lags."""
OUTGROWN = 0.2
"""Distance of an agent's values from its returns, in the size of the values, below which they do not lag."""
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
    if lam == "auto":
        lam = run.last("lam")
    fixed = {"td": 0.0, "monte_carlo": 1.0}
    if name in fixed:
        return fixed[name]
    return lam if name in ("gae", "decoupled_gae") and isinstance(lam, int | float) else None


def _advice(run: Evidence, *ours: str) -> tuple[str, ...]:
    """Advice on a critic of ours; for one of the user's, that it is theirs."""
    kind = run.setting("critic.kind")
    return (f"change the critic of this run, {visible(label_of(kind))}",) if is_own(kind) else ours


def _of_gae(run: Evidence) -> str:
    return " with advantage.estimator: gae" if run.setting("advantage.estimator") in ("td", "monte_carlo") else ""


def explained_variance(run: Evidence) -> Finding | None:
    """The critic is far from the rewards, or worse than a constant, in a run that does not learn.

    In one that learns, values follow the returns: -0.04 is usual in the first 20 iterations on CartPole, which is then
    solved.
    """
    explained = run.mean("explained_variance", slice(-SETTLED, None))
    far = abs(run.last("value_mean") - run.last(run.reward)) > FAR * run.last(run.deviation)
    far = far and run.setting("score.normalize") in (None, "none")  # else values are not in units of the reward
    lags, wild = far and explained < 0.1 and run.run_kind is not CONTROL, explained < -1
    if len(run) < 2 * SETTLED or run.learns() or not (lags or explained < -NOISE):
        return None
    trunk = run.setting("critic.kind") == "separate" and not run.setting("critic.detach")
    faster = "raise critic.lr" + " and critic.trunk_lr" * trunk
    return Finding(
        "the critic lags behind the rewards" if lags else "the critic explains nothing",
        "; ".join(map(run.where, ("explained_variance", *("value_mean", run.reward) * lags))),
        "Its values are further from the rewards than those are from each other, so every completion looks better, or "
        "every one worse, than expected."
        if lags
        else "Its values vary otherwise than the returns, so advantages carry more noise than without it.",
        _advice(
            run,
            *[faster] * lags,
            *["lower critic.lr"] * (wild and not lags),
            "give the critic more steps (critic.epochs)",
            "give the critic a head start (critic.pretrain)",
            "take larger batches (rollout.batch_size)",
            "take larger batches (env.number, steps)",
        ),
    )


def critic_lags(run: Evidence) -> Finding | None:
    """An agent's values are still far from its returns at the end; a mean advantage, before whitening, is how far.

    In the first iterations returns outgrow any critic.
    """
    names = ("advantage_mean", "advantage_std", "value_mean")  # the last is NaN without a critic, and nothing is above
    distance, spread, value = (abs(run.mean(name, slice(-SETTLED, None))) for name in names)
    far = distance > FAR * spread and distance > OUTGROWN * value
    if run.run_kind is not CONTROL or not run.ended or len(run) < 4 * SETTLED or not far:
        return None
    once = run.setting("algorithm") == "policy_gradient"  # the critic takes one step per batch, without a clip
    clipped = run.setting("critic.clip") is not None and not once
    rate = "raise critic.lr" + ", and set critic.clip: null, which lets an update move values further" * clipped
    steps = "give the critic more steps (critic.epochs)"
    return Finding(
        "the critic lags behind the returns",
        "; ".join(map(run.where, names)),
        "Returns grew faster than its values, so that nearly every action looks better than expected, or worse. The "
        "credit is then little but the sum of the rewards that follow.",
        _advice(run, *((steps, rate) if once else (rate, steps))),
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


def critic_worse(run: Evidence) -> Finding | None:
    """The critic's values are further from the truth than their own mean."""
    name = "audit/explained_variance_high"
    if not (run.in_audits(name, lambda high: high < 0) and _values_known(run)):
        return None
    return Finding(
        "the critic is worse than a constant",
        run.audited(name),
        "Its values are further from the true values than a constant would be, and its errors go into the advantages.",
        _advice(
            run,
            "give the critic more steps (critic.epochs)",
            "give the critic a model of its own (critic.kind: separate)",
            "give the critic a head start (critic.pretrain)",
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
        _advice(
            run,
            "raise critic.lr or critic.epochs",
            "give the critic a model of its own (critic.kind: separate)",
            "give the critic a head start (critic.pretrain)",
            "set critic.detach: false",
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
        (
            f"raise advantage.lam{_of_gae(run)}",
            *_advice(
                run,
                "give the critic more steps (critic.epochs)",
                "give the critic a model of its own (critic.kind: separate)",
            ),
        ),
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


CRITIC_CHECKS: Checks = (
    (50, explained_variance, "docs/algorithms.md#normalisation"),
    (32, critic_lags, "docs/control.md#from-reinforce-to-ppo"),
    (52, pretraining, "docs/algorithms.md#value-pretraining"),
    (58, critic_worse, "docs/audit.md#the-diagnosis"),
    (56, critic_flat, "docs/audit.md#the-diagnosis"),
    (54, lam_low, "docs/audit.md#the-diagnosis"),
    (28, lam_high, "docs/audit.md#the-diagnosis"),
)
