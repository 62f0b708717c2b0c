"""Checks of completions: their ends, their length, and texts that say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokencredit.runs.diagnosis.evidence import LEARNS, SETTLED, Checks, Evidence, Finding
from tokencredit.runs.summary import WINDOW, shortened
from tokencredit.runs.transcript import phrase_shares

UNLIKE = 1.0
"""Fall of the reference's log-prob, in nats per token, of texts that it would not write."""
SPREAD, RISEN = 0.6, 0.5
"""Share of completions with a phrase from which it is in most, and the rise from which it has spread. Measured: 0.15
and 0.13 at most in healthy runs of the built-in world, 0.4 and 0.3 in those of JSON, 0.9 in hacked ones."""
FEWEST = 20
"""Completions below which such a share is chance."""
REPETITIVE = 8
"""Tokens from which a text can be repetitive."""


def degenerate(run: Evidence) -> Finding | None:
    """The reward rises while texts become unlike the reference's, or repeat themselves, as a game's episodes may."""
    unlike = run.last("ref_logprob") < run.first("ref_logprob") - UNLIKE
    repeats = run.last("repetition") > run.first("repetition") + 0.25 and not run.episodic()
    if len(run) < SETTLED or not run.learns() or not (unlike or repeats):
        return None
    return Finding(
        "the reward rises, and the texts fall apart",
        "; ".join(map(run.where, (run.reward, "ref_logprob", "repetition"))),
        "Reward hacking: the policy has found texts that the reward likes and people would not, repetitive ones or "
        "unlike anything that the reference would write.",
        (
            "raise kl.coef",
            "lower optim.lr",
            "add a reward term that penalizes such texts",
            "stop earlier (stop.kl, stop.reward)",
        ),
    )


def truncated(run: Evidence) -> Finding | None:
    """Most completions run into the length limit, or all in the first iterations, where any could end before it.

    `never_ended` and `no_room` judge episodes.
    """
    at_eos, stops = run.setting("rollout.stop_at_eos") is not False, run.setting("rollout.stop")
    limit = 0.9 if len(run) >= WINDOW else 0.99
    if not (at_eos or stops) or run.episodic() or not run.last("truncated") > limit:
        return None
    handled = run.setting("advantage.bootstrap") or run.setting("ppo.mask_truncated")
    grown = run.last("truncated") > run.first("truncated") + 0.2 and run.learns()
    return Finding(
        "the reward rises with the length" if grown else "most completions are cut off",
        "; ".join(map(run.where, ("truncated", *["reward"] * grown))),
        "The reward scores unfinished texts, and the policy never learns to finish.",
        (
            *["penalize long completions (score.overlong), or divide the score by the length"] * grown,
            *["set rollout.stop_at_eos: true"] * (not at_eos),
            "raise rollout.max_new_tokens",
            *["set score.missing_eos_penalty"] * (not handled),
        ),
    )


def stop_unused(run: Evidence) -> Finding | None:
    """No completion contained a stop string."""
    if len(run) < WINDOW or not run.setting("rollout.stop") or any(run.values("stopped", slice(None))):
        return None
    if not run.values("stopped", slice(None)):  # episodes
        return None
    at_eos = run.setting("rollout.stop_at_eos") is not False
    return Finding(
        "no completion contains a stop string",
        f"{run.where('stopped')}; {run.where('truncated')}",
        "The model never writes any of rollout.stop"
        + ("." if at_eos else ", and rollout.stop_at_eos is false, so every completion is cut off."),
        (
            *["set rollout.stop_at_eos: true"] * (not at_eos),
            "write rollout.stop as the model does (samples.jsonl shows its texts)",
            "leave out rollout.stop",
        ),
    )


def ends_at_once(run: Evidence) -> Finding | None:
    """From the start, completions of plain prompts are empty or one token."""
    short = run.first("length") <= 2 and run.last("length") <= 2
    conversations = any("messages" in sample for sample in run.samples)
    if not short or conversations or run.episodic() or (run.setting("rollout.max_new_tokens") or 24) <= 2:
        return None
    return Finding(
        "completions end at once",
        run.where("length"),
        "The model answers the plain prompts with an end-of-sequence token, or one token before it.",
        (
            "give the prompts as conversations if the model is a chat model ([{role: user, content: …}]), so that its "
            "chat template is used",
            "look at the end of the prompts for an end-of-sequence token or a space",
            "set rollout.min_new_tokens",
        ),
    )


def hollow_score(run: Evidence) -> Finding | None:
    """A completion that is empty or says one thing again and again has a high score."""
    high = run.first("reward") + LEARNS * (run.first("reward_std") or 0.0)
    rated = [sample for sample in run.samples if not run.episodic() and sample["reward"] > high and _hollow(sample)]
    if not rated:
        return None
    best = max(rated, key=lambda sample: sample["reward"])
    text = shortened(best["completion"], 60)
    return Finding(
        "the score is high for a repetitive text" if text else "the score is high for an empty text",
        f"{text!r} has the reward {best['reward']:.3g} in iteration {best['iteration']}; {run.where('reward')}",
        "An opening for reward hacking: the policy learns to write what the score likes, whether or not it says "
        "anything.",
        (
            "give such texts a low score (reward.function repetition with a negative weight)"
            if text
            else "give empty texts a low score",
            *["set rollout.min_new_tokens"] * (not text),
            "raise kl.coef",
        ),
    )


def phrase_spreads(run: Evidence) -> Finding | None:
    """Most of the last completions contain a phrase that few of the first had, and the reward has risen."""
    numbers = list(dict.fromkeys(sample["iteration"] for sample in run.recorded))
    if len(run) < SETTLED or len(numbers) <= WINDOW or run.episodic() or not run.learns():
        return None
    first, last = ([x for x in run.recorded if x["iteration"] in part] for part in (numbers[:1], numbers[-WINDOW:]))
    then, now = phrase_shares(first), phrase_shares(last)
    spread = [(share, x) for x, share in now.items() if share >= max(SPREAD, then.get(x, 0.0) + RISEN)]
    if len(last) < FEWEST or not spread:
        return None
    share, phrase = max(spread)
    return Finding(
        "most completions have come to contain one phrase",
        f"{shortened(phrase, 60)!r} is in {then.get(phrase, 0.0):.0%} of the samples of iteration {numbers[0]}, and in "
        f"{share:.0%} of those of {numbers[-WINDOW]}–{numbers[-1]}; {run.where(run.reward)}",
        "Possible reward hacking: the policy may have found words that the reward pays for, whatever else the text "
        "says. It is none if these words are the task, such as a format.",
        (
            "read the completions with the phrase, and raise kl.coef if the reward should not pay for them",
            "add a reward term that penalizes the phrase",
            "stop earlier (stop.kl, stop.reward)",
        ),
    )


def _hollow(sample: Mapping[str, Any]) -> bool:
    """True if a sample's text is empty, or each of its tokens stands in it three times or more, on average."""
    tokens = sample["tokens"]
    return not sample["completion"].strip() or (len(tokens) >= REPETITIVE and len(set(tokens)) <= len(tokens) / 3)


TEXT_CHECKS: Checks = (
    (86, hollow_score, "docs/report.md#reward-hacking"),
    (85, degenerate, "docs/report.md#reward-hacking"),
    (57, phrase_spreads, "docs/report.md#reward-hacking"),
    (84, ends_at_once, "docs/prompts.md#formats"),
    (41, stop_unused, "docs/training.md#settings"),
    (40, truncated, "docs/algorithms.md#rewards"),
)
