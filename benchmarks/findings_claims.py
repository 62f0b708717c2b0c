"""The claims of benchmarks/findings.md, and the verdicts that kept runs give on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from findings_figures import BESIDE_TRL
from findings_measures import (
    Comparison,
    Measure,
    Run,
    Studies,
    Study,
    early,
    end,
    first,
    gained,
    judged,
    lately,
    share,
    unsteadiness,
    updated,
    whole,
)

WITHOUT_CRITIC = ("grpo", "rloo", "dr-grpo", "reinforce++")
"""Variants of the study `reasoning` without a critic, as published."""
RESAMPLED = "grpo-masked,batch_size=80"
"""The variant of the study `reasoning` with as many groups with signal as others have groups."""
LADDER = ("ppo", "value-pretraining", "decoupled", "length-adaptive", "clip-higher", "token-loss", "positive-nll")
LADDER += ("groups",)
"""Rungs of the study `reasoning-ladder`."""
STEPS = {
    "in the write-up's set-up, a lower coefficient with more entropy learns faster": ("base", "kl_ent"),
    'then "really" left out, lower learning rates and a temperature of 1.1 each learn faster': (
        "kl_ent",
        "prefix",
        "prefix-rates",
        "prefix-rates-temperature-1.1",
    ),
    "or a clip of 0.3, a still lower coefficient and lower learning rates each learn faster": (
        "kl_ent",
        "clip-0.3",
        "clip-0.3-lower",
        "clip-0.3-lower-rates",
    ),
    "GAE learns faster than one-step advantages": ("kl_ent-one-step", "kl_ent"),
}
"""Claims on the study `write-up`, each with a path of variants of which each is ahead of the one before."""
PATHS = (
    *STEPS.values(),
    ("base", "orthogonal-head"),
    ("stop-one-step", "stop"),
    ("gentle", "gentle-orthogonal", "gentle-orthogonal-mean", "gentle-orthogonal-mean-adaptive"),
)
"""Paths of that study whose differences are shown."""
SAO = {
    "dis": ("single", "masking by double-sided importance sampling solves more than PPO's clip"),
    "faster-critic": ("dis", "two updates of the critic per update of the policy solve more than one"),
    "frozen-attention": ("faster-critic", "a critic whose attention is frozen solves more"),
    "value-pretraining": ("faster-critic", "a pretrained critic solves more"),
    "length-adaptive": ("value-pretraining", "a λ that adapts to the length solves more, with the critic's at 1"),
    "grpo-dis": ("grpo", "in groups too, masking by double-sided importance sampling solves more than PPO's clip"),
}
"""Variants of the study `sao`: the one that each changes, and its claim."""
LEARNED_OR_NONE = ("learned critic", "group_relative", "leave_one_out")
"""Variants without scores of prefixes that were run in three worlds."""
RETURN = "train/average_return"
LAMBDA_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "λ = 0.95 ends above 0 and 1": (end, [("0.95", "0", RETURN), ("0.95", "1", RETURN)]),
    "0 starts fastest": (early, [("0", "0.95", RETURN), ("0", "1", RETURN)]),
    "1 is least steady": (unsteadiness, [("1", "0", RETURN), ("1", "0.95", RETURN)]),
    "the advantages' deviation grows with λ": (
        whole,
        [("0.95", "0", "advantage_std"), ("1", "0.95", "advantage_std")],
    ),
}
"""Claims on λ: what is measured, and pairs of λ of which the first is above the second if the claim holds."""
CHANGE_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "a lower price of KL learns faster": (whole, [("kl 0.025", "base", "reward")]),
    "more entropy learns faster": (whole, [("entropy 0.01", "base", "reward")]),
    "both learn faster than the lower price alone": (whole, [("kl_ent", "kl 0.025", "reward")]),
    "clip 0.3 speeds up": (whole, [("clip 0.3", "base", "reward")]),
    "clip 0.1 slows down": (whole, [("base", "clip 0.1", "reward")]),
    "temperature 2.0 ruins the text": (lately, [("base", "temperature 2", "ref_logprob")]),
    "gentle steps are steadier": (unsteadiness, [("base", "gentle", "reward")]),
    "temperature 0.5 makes texts formulaic": (lately, [("base", "temperature 0.5", "distinct_2")]),
    "an orthogonal head settles sooner": (whole, [("learned", "learned, orthogonal head", "value_loss")]),
    "value clipping helps": (whole, [("learned", "learned, no value clip", "reward")]),
    "whitening that keeps the mean lets values drift up": (
        lately,
        [("learned, keep mean", "learned, whitened scores", "value_mean")],
    ),
}
"""Claims on changes to the default, for each world, as those on λ."""
RECIPE_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "without a price of KL texts lose variety": (end, [("hacking: kl-0.05", "hacking: no-kl", "distinct_2")]),
    "a price that adapts too late leaves less variety": (
        end,
        [("hacking: kl-adaptive", "hacking: kl-adaptive-late", "distinct_2")],
    ),
    "an adaptive price earns more than a fixed one": (end, [("hacking: kl-adaptive", "hacking: kl-0.05", "reward")]),
    "a reward at every token raises the value loss": (
        end,
        [("spread: every-token", "spread: terminal", "value_loss")],
    ),
    "credit by token beats one credit per text": (
        whole,
        [("estimators-text: estimator=gae", "estimators-text: estimator=uniform", "reward")],
    ),
    "samples four updates old are behind at large steps": (
        updated,
        [("ages-large-steps: age=0", "ages-large-steps: age=4", "14 23")],
    ),
    "clipped importance weights help them": (
        updated,
        [("ages-large-steps: age=4,clip", "ages-large-steps: age=4", "14 23")],
    ),
    "clipping by L∞ learns faster than by L2": (whole, [("claims: max-norm", "claims: l2-norm", "reward")]),
    "in the write-up's set-up, a lower coefficient with more entropy learns faster": (
        whole,
        [("write-up: kl_ent", "write-up: base", "reward")],
    ),
    "GAE learns faster than one-step advantages there": (
        whole,
        [("write-up: kl_ent", "write-up: kl_ent-one-step", "reward")],
    ),
    "an orthogonal head settles sooner than PyTorch's default there": (
        whole,
        [("write-up: base", "write-up: orthogonal-head", "value_loss")],
    ),
    "in episodes of three sentences, credit by token beats credit by turn": (
        whole,
        [("turns-sentences: token-gae", "turns-sentences: turn-gae", "reward")],
    ),
    "credit by turn beats group-relative credit there": (
        whole,
        [("turns-sentences: turn-gae", "turns-sentences: group-relative", "reward")],
    ),
    "credit by token beats group-relative credit and leave-one-out there": (
        whole,
        [
            ("turns-sentences: token-gae", f"turns-sentences: {other}", "reward")
            for other in ("group-relative", "leave-one-out")
        ],
    ),
    "with as many prompts per batch too": (
        whole,
        [
            ("turns-sentences: token-gae-8-per-prompt", f"turns-sentences: {other}", "reward")
            for other in ("group-relative", "leave-one-out")
        ],
    ),
}
"""Claims on variants of other studies, for each world."""
SIZES = ("tiny", "small", "medium", "large")
"""Variants of the study `scaling`."""
SIZE_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "more known words": (end, [("large", "tiny", "known")]),
    "likelier texts under one judge": (end, [("large", "tiny", "reward/fluency")]),
    "lower entropy": (end, [("tiny", "large", "entropy")]),
    "larger KL": (end, [("large", "tiny", "kl")]),
    "less reward": (end, [("tiny", "large", "reward")]),
}
"""Claims on the largest policy beside the smallest, for each world."""
PATH_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "at PPO's KL, PPO earns more of the true reward than DPO and IPO": (
        first,
        [("PPO", f"{loss} at PPO's KL", "reward/gold") for loss in ("DPO", "IPO")],
    ),
    "and more of the reward model's": (
        first,
        [("PPO", f"{loss} at PPO's KL", "reward/proxy") for loss in ("DPO", "IPO")],
    ),
    "its texts are likelier under the SFT model": (
        first,
        [("PPO", f"{loss} at PPO's KL", "reward/fluency") for loss in ("DPO", "IPO")],
    ),
    "and more alike": (first, [(f"{loss} at PPO's KL", "PPO", "distinct_2") for loss in ("DPO", "IPO")]),
    "where IPO goes furthest, the true reward falls": (first, [("IPO, β 0.1", "IPO, β 0.02", "reward/gold")]),
}
"""Claims on preferences, for each world."""
WORLDS = {"builtin": "built-in reviews", "trec": "questions", "subj": "film sentences"}


def by_lambda(studies: Studies) -> dict[str, Study]:
    """The runs of each λ by environment and, beside the plain policy gradient, algorithm."""
    places = {
        ("humanoid", ""): "HumanoidStandup",
        ("pendulum", "algorithm=policy_gradient,"): "the pendulum",
        ("pendulum", "algorithm=ppo,"): "the pendulum with PPO",
        ("cartpole-lambda", ""): "CartPole with PPO",
        ("locomotion-lambda", "id=HalfCheetah-v5,"): "HalfCheetah with PPO",
        ("locomotion-lambda", "id=Humanoid-v5,"): "Humanoid with PPO",
    }
    sorted_: dict[str, dict[str, Mapping[str, Run]]] = {}
    for (name, start), place in places.items():
        for variant, runs in studies.get(name, {}).items():
            if variant.startswith(f"{start}lam="):
                sorted_.setdefault(place, {})[variant.removeprefix(f"{start}lam=")] = runs
    return sorted_


def by_change(study: Mapping[str, Study]) -> dict[str, Study]:
    """The runs of each change, by the title of the world."""
    return {title: study[world] for world, title in WORLDS.items() if world in study}


def recipes_by_world(found: Studies) -> dict[str, Study]:
    """The runs of other studies' variants that were run in more worlds, by the title of the world."""
    others = found.get("recipes", {})
    names = {name for study in others.values() for name in study if name != "limit"}
    own = {f"{study}: {name}": runs for study, variants in found.items() for name, runs in variants.items()}
    built_in = {name: own[name] for name in sorted(names & own.keys())}
    return by_change({"builtin": built_in} | others) if names else {}


def sizes_by_world(recipes: Mapping[str, Study]) -> dict[str, Study]:
    """The runs of each size of the policy, of `recipes_by_world`."""
    names = {f"scaling: {size}": size for size in SIZES}
    found = {
        place: {size: study[name] for name, size in names.items() if name in study} for place, study in recipes.items()
    }
    return {place: study for place, study in found.items() if study}


def claims_by_place(places: Mapping[str, Study], claims: Mapping[str, tuple[Measure, Sequence[Comparison]]]) -> str:
    """A line per claim: its verdict and differences in each environment or world."""
    lines = ["| claim | " + " | ".join(places) + " |", "|" + "---|" * (len(places) + 1)]
    for text, claim in claims.items():
        found = (judged(study, *claim) for study in places.values())
        cells = [f"{words}: {'; '.join(shown)}" if shown else "" for words, shown in found]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts_by_place(
    places: Mapping[str, Study], claims: Mapping[str, tuple[Measure, Sequence[Comparison]]], names: Sequence[str]
) -> str:
    """The verdicts on some of the claims in a line, in places where their figures were measured."""
    texts = []
    for name in names:
        found = {place: judged(study, *claims[name]) for place, study in places.items()}
        texts.append(f"{name}: " + ", ".join(f"{words} on {place}" for place, (words, shown) in found.items() if shown))
    return "; ".join(texts)


def uniform_verdict(text: Study, cartpole: Study) -> str:
    """The verdict on credit by token against one credit per text, or on CartPole per episode."""
    words, texts = judged(text, whole, [("estimator=gae", "estimator=uniform", "reward")])
    games, episodes = judged(cartpole, whole, [("estimator=gae", "estimator=total_return,critic=none", RETURN)])
    return (
        f"on texts of at most 24 tokens: {words}, {'; '.join(texts)} of mean reward. On CartPole, beside one "
        f"credit for all steps of an episode: {games}, {'; '.join(episodes)} of mean return"
    ).replace("estimator=", "")


CONTROL_BY_MAP = "token-gae-8-per-map"


def map_control(study: Study) -> str:
    """How much of the critic's lead is that it sees more maps."""
    others = ("group-relative", "leave-one-out")
    words, shown = judged(study, whole, [(CONTROL_BY_MAP, other, "reward") for other in others])
    return f"That a critic is ahead of both with eight episodes per map too: {words}, {'; '.join(shown)}."


class Claim(NamedTuple):
    """A claim on a study, for `judged`."""

    number: str
    text: str
    study: str
    figure: str
    measure: Measure
    comparisons: Sequence[Comparison]


MEAN_REWARD = ("reward, mean of all iterations", whole)
VALUE_LOSS = ("value loss, mean of all iterations", whole)
GAINED = ("share of the way to 1, mean of all iterations", gained)
SOLVED = ("solved greedily at the end", end)
"""Figures of several claims, with their measures."""
SINGLE = ("base", "prefix", "temperature-2", "clip-0.3", "clip-0.1", "kl-0.5", "kl-0.75", "kl-0.8", "kl-1.0", "gae")
SINGLE += ("kl-adaptive", "entropy-0.02", "max_grad_norm-0.5", "lr-8e-6", "orthogonal-head", "keep-mean")
"""Variants of the study `negative-sentiment` with one change, or none."""


def in_worlds(number: str, text: str, study: str, one: str, others: Sequence[str]) -> Iterator[Claim]:
    """Claims that a variant is ahead of others, one in each of three worlds after 15 and after 40 iterations."""
    for letter, (world, after) in zip("abcdef", product(("builtin", "subj", "trec"), ("15", "40")), strict=True):
        yield Claim(
            f"{number}{letter}",
            f"in the world {world} {text} after {after} iterations",
            study,
            f"share of the attainable after {after}",
            share,
            [(f"{world}, {one}", f"{world}, {other}", after) for other in others],
        )


CLAIMS = (
    Claim(
        "1",
        "a lower coefficient with more entropy learns faster than any single change",
        "negative-sentiment",
        *MEAN_REWARD,
        [("kl_ent", other, "reward") for other in SINGLE],
    ),
    Claim("2a", 'removing "really" hinders', "at-kl-0.5", *MEAN_REWARD, [("base", "prefix", "reward")]),
    Claim(
        "2b",
        "temperature 2.0 ruins coherence",
        "at-kl-0.5",
        "at the end",
        end,
        [("base", "temperature-2", "known"), ("base", "temperature-2", "ref_logprob")],
    ),
    Claim(
        "2c",
        "clip 0.3 speeds up, 0.1 slows down",
        "at-kl-0.5",
        *MEAN_REWARD,
        [("clip-0.3", "base", "reward"), ("base", "clip-0.1", "reward")],
    ),
    Claim(
        "3",
        "gentle steps are steadier",
        "at-kl-0.5",
        "unsteadiness of the reward",
        unsteadiness,
        [("base", "gentle", "reward")],
    ),
    Claim(
        "4a",
        "an orthogonal head settles sooner than zeros",
        "at-kl-0.5",
        *VALUE_LOSS,
        [("base", "orthogonal-head", "value_loss")],
    ),
    Claim(
        "4a'",
        "an orthogonal head settles sooner than PyTorch's default",
        "write-up",
        *VALUE_LOSS,
        [("base", "orthogonal-head", "value_loss")],
    ),
    Claim(
        "4b",
        "scores that keep their mean let values drift up",
        "at-kl-0.5",
        "value at the end",
        end,
        [("keep-mean", "base", "value")],
    ),
    Claim("13a", "positive is learned sooner than negative", "claims", *GAINED, [("positive", "base", "reward")]),
    Claim(
        "13b",
        "several objectives at once do not learn: each gains less than alone",
        "claims",
        *GAINED,
        [("base", "both", "reward/NEGATIVE"), ("story", "both", "reward/story")],
    ),
    Claim(
        "13c",
        "a lower temperature makes texts formulaic",
        "claims",
        "distinct pairs of tokens at the end",
        end,
        [("base", "temperature-0.5", "distinct_2")],
    ),
    Claim("13d", "value clipping helps", "claims", *MEAN_REWARD, [("base", "no-value-clip", "reward")]),
    Claim(
        "13e",
        "clipping gradients by L∞ learns faster than by L2",
        "claims",
        *MEAN_REWARD,
        [("max-norm", "l2-norm", "reward")],
    ),
    *(
        Claim(f"14{letter}", text, "write-up", *MEAN_REWARD, [(b, a, "reward") for a, b in pairwise(path)])
        for letter, (text, path) in zip("abcd", STEPS.items(), strict=True)
    ),
    Claim(
        "15a",
        "with a verifier, PPO with its default critic solves more than each estimator without one",
        "reasoning",
        *SOLVED,
        [("ppo", other, "eval/reward") for other in WITHOUT_CRITIC],
    ),
    Claim(
        "15b",
        "the same of PPO with a critic of its own",
        "reasoning",
        *SOLVED,
        [("ppo-separate", other, "eval/reward") for other in WITHOUT_CRITIC],
    ),
    Claim(
        "15c",
        "the same of PPO with a critic of its own and one completion per problem",
        "reasoning",
        *SOLVED,
        [
            ("ppo-separate,per_prompt=1", other, "eval/reward")
            for other in (*WITHOUT_CRITIC, "reinforce++,per_prompt=1")
        ],
    ),
    Claim(
        "15d",
        "VAPO's changes together, groups aside, solve more than its PPO",
        "reasoning-ladder",
        *SOLVED,
        [("positive-nll", "ppo", "eval/reward")],
    ),
    Claim(
        "15f",
        "groups of eight for an eighth of the problems, VAPO's last change, solve more",
        "reasoning-ladder",
        *SOLVED,
        [("groups", "positive-nll", "eval/reward")],
    ),
    Claim(
        "15e",
        "dynamic sampling, as masked groups of a larger batch, solves more than GRPO",
        "reasoning",
        *SOLVED,
        [(RESAMPLED, "grpo", "eval/reward")],
    ),
    Claim(
        "16a",
        "with samples of old policies, single rollouts with a critic solve more than groups",
        "sao",
        *SOLVED,
        [("single", "grpo", "eval/reward")],
    ),
    *(
        Claim(f"16{letter}", claim, "sao", *SOLVED, [(rung, below, "eval/reward")])
        for letter, (rung, (below, claim)) in zip("bcdefg", SAO.items(), strict=True)
    ),
    Claim(
        "16h",
        "SAO's changes together solve more than GRPO",
        "sao",
        *SOLVED,
        [("length-adaptive", "grpo", "eval/reward")],
    ),
    *in_worlds(
        "17",
        "the default is ahead of TRL's PPO, GRPO and RLOO",
        "beside-trl",
        "ours",
        [method for method in BESIDE_TRL if method != "ours"],
    ),
    *in_worlds("18", "scores of prefixes beat a learned critic and none,", "by-world", "default", LEARNED_OR_NONE),
)
"""Claims whose verdict is that of `judged`."""


def judgements(found: Studies) -> Iterator[tuple[Claim, str, str]]:
    """Each claim whose runs are kept, with its verdict and its least comparison."""
    for claim in CLAIMS:
        words, shown = judged(found.get(claim.study, {}), claim.measure, claim.comparisons)
        if shown:
            yield claim, words, min(shown, key=lambda text: shown[text][0])


def verdicts(found: Studies) -> dict[str, str]:
    """The verdict on each claim whose runs are kept, by its number."""
    return {claim.number: words for claim, words, _ in judgements(found)}


def claim_table(found: Studies) -> str:
    """The claims whose runs are kept, each with its least comparison and its verdict."""
    lines = ["| | claim | figure | least comparison | verdict |", "|---|---|---|---|---|"]
    for claim, words, least in judgements(found):
        lines.append(f"| {claim.number} | {claim.text} | {claim.figure} | {least} | {words} |")
    return "\n".join(lines)
