"""Checks of the reward, the texts, and episodes of several turns."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import SETTLED, Check, Evidence, Finding
from tokencredit.runs.summary import WINDOW

REPEATED = 2
"""Iterations after which a term without any variance is a finding; all of them count, up to `WINDOW`."""
RARE = 0.05
"""Share of turns below which a problem of theirs is no finding."""
ALWAYS = 0.9
"""Share of tool calls, or of turns with calls, from which a problem is the rule."""


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
        f"the reward's term {largest.removeprefix('reward_std/')} drowns the others",
        f"{share:.0%} of the terms' weighted standard deviations; {run.where(largest)}",
        "The other terms hardly affect which completion is better.",
        "lower its weight, or raise the others'",
    )


def flat_reward(run: Evidence) -> Finding | None:
    """The reward has not risen."""
    if not run.ended or len(run) < 2 * SETTLED or not run.gain() < 0.2:
        return None
    return Finding(
        "the reward has not risen",
        run.where(run.reward),
        "It rose by less than a fifth of a single completion's standard deviation.",
        "raise optim.lr, lower kl.coef, take larger batches, and check that the reward separates good from bad",
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
        "the reward rises, and the texts fall apart",
        "; ".join(map(run.where, [run.reward, *degraded])),
        "The policy has found texts that the reward likes and people would not: repetitive, short, or unlike "
        "anything that the reference would write.",
        "raise kl.coef or ppo.entropy_coef, lower optim.lr, add a reward term that penalizes such texts, or stop "
        "earlier (stop.kl, stop.reward)",
    )


def truncated(run: Evidence) -> Finding | None:
    """Most completions run into the length limit; `never_ended` and `no_room` judge episodes."""
    if run.setting("rollout.stop_at_eos") is False or run.episodic() or not run.last("truncated") > 0.8:
        return None
    handled = run.setting("advantage.bootstrap") or run.setting("ppo.mask_truncated")
    return Finding(
        "most completions are cut off",
        run.where("truncated"),
        "The reward scores unfinished texts, and the policy never learns to finish.",
        "raise rollout.max_new_tokens" + ("" if handled else ", or set score.missing_eos_penalty"),
    )


def environment_fails(run: Evidence) -> Finding | None:
    """The environment's code fails in most episodes."""
    name = "env/ending/error"
    if len(run) < WINDOW or not run.last(name) > 0.5:
        return None
    return Finding(
        "the environment fails",
        run.where(name),
        "Its code raises, returns something that is no observation, or exceeds its timeout, which truncates the "
        "episode.",
        "read the errors at the end of samples.jsonl's episodes (after), play an episode by hand, and raise "
        "env.timeout if it is only slow",
    )


def calls_malformed(run: Evidence) -> Finding | None:
    """Tool calls hardly ever parse."""
    malformed = run.last("env/malformed") * run.last("env/turns")
    if len(run) < SETTLED or not run.last("env/malformed") > RARE:
        return None
    if not malformed > ALWAYS * (malformed + run.last("env/calls")):
        return None
    return Finding(
        "tool calls cannot be parsed",
        f"{run.where('env/malformed')}, of all turns; {run.where('env/calls')}, per episode",
        "The policy writes calls in another form than its chat template's, so no tool is called.",
        "look at the calls in samples.jsonl, and at the form that tokencredit check-template shows; put an example "
        "into the prompt, train on examples first (tokencredit sft), and raise env.turn_tokens if calls are cut off",
    )


def tools_fail(run: Evidence) -> Finding | None:
    """Nearly all turns with parsed tool calls have one that fails or times out."""
    failed, late = run.last("env/failed"), run.last("env/timeout")
    if len(run) < SETTLED or not run.last("env/calls") > 0:
        return None
    # An answer is a turn without a call, and the last of its episode.
    calling = 1 - run.last("env/ending/answer") / run.last("env/turns") - run.last("env/malformed")
    if not calling > RARE or not failed + late > ALWAYS * calling:
        return None
    return Finding(
        "tools time out" if late > failed else "tools fail",
        f"{run.where('env/failed')}; {run.where('env/timeout')}; {run.where('env/turns')}",
        "Nearly all turns with tool calls have one that failed, so the policy learns nothing from the results.",
        "raise env.timeout, and call the tools by hand"
        if late > failed
        else "read the errors in samples.jsonl; mend a tool that raises, and for calls of unknown tools or with wrong "
        "arguments show examples in the prompt, or train on some first (tokencredit sft)",
    )


def never_ended(run: Evidence) -> Finding | None:
    """Nearly all episodes are truncated, most by the limit of turns."""
    turns, tokens = run.last("env/ending/max_turns"), run.last("env/ending/length")
    if len(run) < SETTLED or not (turns + tokens > 0.95 and turns > 0.5):
        return None
    return Finding(
        "episodes never end by themselves",
        run.where("env/ending/max_turns"),
        "Nearly all are truncated, most at env.max_turns: the policy never reaches the environment's end, or never "
        "answers without a tool call.",
        "raise env.max_turns, and check that the environment returns done where it should, after a fixed number of "
        "turns too; if the policy always calls a tool, say in the prompt when to answer",
    )


def no_room(run: Evidence) -> Finding | None:
    """Most episodes run out of tokens."""
    name = "env/ending/length"
    if len(run) < WINDOW or not run.last(name) > 0.5:
        return None
    return Finding(
        "episodes run out of tokens",
        run.where(name),
        "Turns and observations together do not fit into rollout.max_new_tokens, which truncates the episode.",
        "raise rollout.max_new_tokens, or lower env.observation_tokens, env.turn_tokens or env.max_turns",
    )


def observations_cut(run: Evidence) -> Finding | None:
    """Most observations are longer than they may be."""
    if len(run) < WINDOW or not run.last("env/cut") > 0.5:
        return None
    return Finding(
        "most observations are cut",
        f"{run.where('env/cut')}, of all turns",
        "They are longer than env.observation_tokens, and the policy reads their beginning alone.",
        "raise env.observation_tokens (and rollout.max_new_tokens), or let tools and environment answer in fewer words",
    )


REWARD_CHECKS: tuple[tuple[int, Check], ...] = (
    (80, constant_term),
    (35, dominant_term),
    (60, flat_reward),
    (85, degenerate),
    (40, truncated),
    (82, environment_fails),
    (78, calls_malformed),
    (76, tools_fail),
    (44, never_ended),
    (46, no_room),
    (33, observations_cut),
)
"""Each check and the weight of its finding."""
