"""Checks of episodes of several turns: calls, tools, environments and endings."""

from __future__ import annotations

from tokencredit.runs.diagnosis.evidence import SETTLED, Evidence, Finding
from tokencredit.runs.history import WINDOW

RARE = 0.05
"""Share of turns below which a problem of theirs is no finding."""
ALWAYS = 0.9
"""Share of tool calls, or of turns with calls, from which a problem is the rule."""


def environment_fails(run: Evidence) -> Finding | None:
    """The environment's code fails in most episodes."""
    name = "env/ending/error"
    if len(run) < WINDOW or not run.last(name) > 0.5:
        return None
    return Finding(
        "environment_fails",
        82,
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
        "calls_malformed",
        78,
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
        "tools_fail",
        76,
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
        "never_ended",
        44,
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
        "no_room",
        46,
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
        "observations_cut",
        33,
        "most observations are cut",
        f"{run.where('env/cut')}, of all turns",
        "They are longer than env.observation_tokens, and the policy reads their beginning alone.",
        "raise env.observation_tokens (and rollout.max_new_tokens), or let tools and environment answer in fewer words",
    )
