"""Checks of the reward, and of episodes of several turns."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import SETTLED, Checks, Evidence, Finding
from tokencredit.runs.jsonl import is_number
from tokencredit.runs.summary import WINDOW

REPEATED = 2
"""Iterations after which a term without any variance is a finding."""
SMALL = 0.1
"""Spread of a term, after weights, of the largest term's, below which it decides nothing; share of its weight up to
which a term is small on purpose."""
RARE = 0.05
"""Share of turns below which a problem of theirs is no finding."""
ALWAYS = 0.9
"""Share of tool calls, or of turns with calls, from which a problem is the rule."""


def _weights(run: Evidence) -> dict[str, float]:
    """Each reward term's weight by its metric; empty if the configuration lacks some, such as Python's."""
    names = [name for name in run.metrics[-1] if name.startswith("reward_std/")]
    terms = run.setting("reward") or []
    weights = {name: term.get("weight", 1.0) for name, term in zip(names, terms, strict=False)}
    return weights if len(names) == len(terms) else {}


def constant_term(run: Evidence) -> Finding | None:
    """A reward term has been the same for all completions since the start."""
    names = [name for name in run.metrics[-1] if name.startswith("reward_std/")]
    watched = {name for name, weight in _weights(run).items() if weight == 0}  # not paid
    flat = [x for x in names if x not in watched and max(run.values(x, slice(None)), default=1.0) < 1e-8]
    if len(run) < REPEATED or not flat:
        return None
    # An environment's own term comes before the others, of which the configuration may have some.
    played = run.episodic() and flat[0] == names[0]
    own = played and len(names) > len(run.setting("reward") or [])
    name = flat[0].removeprefix("reward_std/")
    return Finding(
        f"the environment {name} always pays the same" if own else f"the reward's term {name} does not vary",
        run.where(flat[0]),
        f"It gives every {'episode' if played else 'completion'} the same score, so nothing can be learned from it.",
        (
            "play an episode by hand, and check that step or get_reward pays for something that the policy can reach "
            "within env.max_turns",
            "raise rollout.batch_size if high rewards are only rare",
            "pay for steps to the goal",
        )
        if played
        else (
            "check its inputs and outputs by hand on a few texts",
            "raise rollout.batch_size if high scores are only rare",
        ),
    )


def dominant_term(run: Evidence) -> Finding | None:
    """One reward term decides alone by its scale, from the start to the end.

    A penalty, and a term of a tenth of its weight, may be small on purpose; one that lost its spread was learned.
    """
    weights = {name: weight for name, weight in _weights(run).items() if weight}
    if len(run) < WINDOW or not weights:
        return None
    sizes = [{name: abs(weight) * at(name) for name, weight in weights.items()} for at in (run.first, run.last)]
    largest = max(weights, key=lambda name: sizes[-1][name])
    meant = [name for name, weight in weights.items() if weight > SMALL * abs(weights[largest]) and name != largest]
    drowned = [name for name in meant if all(size[name] < SMALL * size[largest] for size in sizes)]
    if not drowned:
        return None
    title, *names = (name.removeprefix("reward_std/") for name in (largest, *drowned))
    parts = [f"{run.where(name)}, {sizes[-1][name] / sizes[-1][largest]:.1%} of it after weights" for name in drowned]
    return Finding(
        f"the reward's term {title} drowns {' and '.join(names)}",
        "; ".join([run.where(largest), *parts]),
        "By its scale, it alone decides which completion is better, whatever the others' weights say.",
        ("bring the terms to one scale by their weights", "leave out what shall not decide"),
    )


def flat_reward(run: Evidence) -> Finding | None:
    """The reward has not risen."""
    if not run.ended or len(run) < 2 * SETTLED or not run.gain() < 0.2:
        return None
    # The price of the KL keeps the policy, if it is as large as differences in reward; or small steps do.
    price = run.last("kl_coef") * run.last("kl") > 0.3 * run.last("reward_std")
    first, second = "lower kl.coef", "raise optim.lr"
    return Finding(
        "the reward has not risen",
        run.where(run.reward),
        "It rose by less than a fifth of a single completion's standard deviation.",
        (
            *((first, second) if price else (second, first)),
            "take larger batches (rollout.batch_size)",
            "take larger batches (env.number, steps)",
            "check that the reward separates good from bad",
        ),
    )


def equal_scores(run: Evidence) -> Finding | None:
    """In most iterations, or groups, all scores are equal, so that none has an advantage; the reward does not rise.

    An advantage that is scaled to the deviation of its group of n has a mean square of (n − 1) / n, and 0 where all are
    equal: the share of groups that differ follows from `advantage_std`.
    """
    size = run.setting("rollout.per_prompt")
    scaled = run.setting("advantage.estimator") == "group_relative" and run.setting("advantage.scale") is not False
    groups = scaled and is_number(size) and size > 1
    name = "advantage_std" if groups else run.deviation
    deviations = run.values(name, slice(-SETTLED, None))
    equal = sum(x < 1e-8 for x in deviations) / max(len(deviations), 1)
    if groups and deviations:
        equal = 1 - sum(x * x for x in deviations) / len(deviations) * size / (size - 1)
    if len(run) < SETTLED or not equal >= 0.5 or run.learns():
        return None
    unit = "groups" if groups else "iterations"
    return Finding(
        f"most {unit} have equal scores",
        f"in {equal:.0%} of the last {unit} no score is above another; {run.where(name)}; {run.where(run.reward)}",
        "Nothing is better than anything else there, so nothing is learned from it.",
        (
            "raise rollout.per_prompt" if groups else "raise rollout.batch_size, so that batches hold some rare scores",
            "take larger batches (env.number, steps)",
            "give partial scores on the way to the rare ones",
            "take prompts that are neither too easy nor too hard (prompts.text, prompts.dataset)",
        ),
    )


def evaluation_disagrees(run: Evidence) -> Finding | None:
    """The reward rises in training, and not in evaluations, which end below it."""
    name = run.run_kind.evaluation
    scores = run.values(name, slice(None))
    if len(scores) < 3 or not run.learns():
        return None
    ends = max(1, len(scores) // 4)
    reward = run.run_kind.headline  # evaluations are not shaped
    end, trained, start = sum(scores[-ends:]) / ends, run.last(reward), run.first(reward)
    if not (start < trained > end and end - sum(scores[:ends]) / ends < 0.1 * (trained - start)):
        return None
    own = [f"eval.{key}" for key in ("max_new_tokens", "temperature") if run.setting(f"eval.{key}") is not None]
    return Finding(
        "evaluations do not rise with training",
        f"{run.where(reward)}; {name} {scores[0]:.3g} in the first evaluation, {scores[-1]:.3g} in the last",
        "What the policy learned does not hold on the prompts, or with the sampling, of the evaluation.",
        (
            *[f"leave out {' and '.join(own)}, so that evaluations sample as training does"] * bool(own),
            "train on more prompts, of the kind that is evaluated (prompts.text, prompts.dataset)",
            "evaluate as the agent acts in training (eval.greedy: false)",
            "raise kl.coef",
            "take the policy of the best evaluation, in best/",
        ),
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
        (
            "read the errors at the end of samples.jsonl's episodes (after), and play an episode by hand",
            "raise env.timeout if it is only slow",
        ),
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
        (
            "look at the calls in samples.jsonl, and at the form that tokencredit check-template shows",
            "put an example into the prompt",
            "train on examples first (tokencredit sft)",
            "raise env.turn_tokens if calls are cut off",
        ),
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
        ("raise env.timeout", "call the tools by hand")
        if late > failed
        else (
            "read the errors in samples.jsonl, and mend a tool that raises",
            "show examples in the prompt if calls are of unknown tools or have wrong arguments",
            "train on some first (tokencredit sft)",
        ),
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
        (
            "raise env.max_turns",
            "check that the environment returns done where it should, after a fixed number of turns too",
            "say in the prompt when to answer if the policy always calls a tool",
        ),
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
        ("raise rollout.max_new_tokens", "lower env.observation_tokens, env.turn_tokens or env.max_turns"),
    )


def observations_cut(run: Evidence) -> Finding | None:
    """Most observations are longer than they may be."""
    if len(run) < WINDOW or not run.last("env/cut") > 0.5:
        return None
    return Finding(
        "most observations are cut",
        f"{run.where('env/cut')}, of all turns",
        "They are longer than env.observation_tokens, and the policy reads their beginning alone.",
        (
            "raise env.observation_tokens (and rollout.max_new_tokens)",
            "let tools and environment answer in fewer words",
        ),
    )


REWARD_CHECKS: Checks = (
    (80, constant_term, "docs/rewards.md#in-the-metrics"),
    (35, dominant_term, "docs/rewards.md#in-the-metrics"),
    (61, equal_scores, "docs/algorithms.md#advantages-without-a-critic"),
    (60, flat_reward, "docs/training.md#the-limit-of-a-reward"),
    (59, evaluation_disagrees, "docs/training.md#sampling-and-evaluating-any-model"),
    (82, environment_fails, "docs/turns.md#when-user-code-fails"),
    (78, calls_malformed, "docs/turns.md#chat-templates"),
    (76, tools_fail, "docs/turns.md#when-user-code-fails"),
    (44, never_ended, "docs/turns.md#how-an-episode-ends"),
    (46, no_room, "docs/turns.md#how-an-episode-ends"),
    (33, observations_cut, "docs/turns.md#the-rollout"),
)
