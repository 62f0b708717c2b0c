"""Checks of the reward: terms that do not vary or drown the others, and a reward that does not rise."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import SETTLED, Evidence, Finding
from tokencredit.runs.history import WINDOW

REPEATED = 2
"""Iterations after which a term without any variance is a finding; all of them count, up to `WINDOW`."""


def constant_term(run: Evidence) -> Finding | None:
    """A reward term is constant."""
    names = [name for name in run.metrics[-1] if name.startswith("reward_std/")]
    flat = [name for name in names if len(run) >= REPEATED and run.last(name) < 1e-8]
    if not flat:
        return None
    # An environment's own term comes before the others, of which the configuration may have some.
    played = run.episodic() and flat[0] == names[0]
    own = played and len(names) > len(run.setting("reward") or [])
    name = flat[0].removeprefix("reward_std/")
    return Finding(
        "constant_term",
        80,
        f"the environment {name} always pays the same" if own else f"the reward's term {name} does not vary",
        run.where(flat[0]),
        f"It gives every {'episode' if played else 'completion'} the same score, so nothing can be learned from it.",
        "play an episode by hand, and check that step or get_reward pays for something that the policy can reach "
        "within env.max_turns; if high rewards are only rare, raise rollout.batch_size, or pay for steps to the goal"
        if played
        else "check its inputs and outputs by hand on a few texts; if high scores are only rare, raise "
        "rollout.batch_size",
    )


def dominant_term(run: Evidence) -> Finding | None:
    """One of several reward terms decides alone."""
    terms = run.setting("reward") or []
    names = [name for name in run.metrics[-1] if name.startswith("reward_std/")]
    if len(run) < WINDOW or len(names) < 2 or len(names) != len(terms):
        return None
    shares = {name: abs(term.get("weight", 1.0)) * run.last(name) for name, term in zip(names, terms, strict=True)}
    largest = max(shares, key=lambda name: shares[name])
    if not shares[largest] > 0.9 * sum(shares.values()):
        return None
    share = shares[largest] / sum(shares.values())
    return Finding(
        "dominant_term",
        35,
        f"the reward's term {largest.removeprefix('reward_std/')} drowns the others",
        f"{share:.0%} of the terms' weighted standard deviations; {run.where(largest)}",
        "The other terms hardly affect which completion is better.",
        "lower its weight, or raise the others'",
    )


def flat_reward(run: Evidence) -> Finding | None:
    """The reward has not risen."""
    if len(run) < 2 * SETTLED or not run.gain() < 0.2:
        return None
    return Finding(
        "flat_reward",
        60,
        "the reward has not risen",
        run.where(run.reward),
        "It rose by less than a fifth of a single completion's standard deviation.",
        "raise optim.lr, lower kl.coef, take larger batches, and check that the reward separates good from bad",
    )
