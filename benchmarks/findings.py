"""The figures and tables of benchmarks/findings.md, from the metrics in benchmarks/findings-data/ (`make findings`).

benchmarks/study.py runs the studies and stores the metrics there.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from findings_claims import (
    CHANGE_CLAIMS,
    LADDER,
    LAMBDA_CLAIMS,
    PATH_CLAIMS,
    PATHS,
    RECIPE_CLAIMS,
    RESAMPLED,
    RETURN,
    SAO,
    SIZE_CLAIMS,
    by_change,
    by_lambda,
    claim_table,
    claims_by_place,
    map_control,
    recipes_by_world,
    sizes_by_world,
    uniform_verdict,
    verdicts_by_place,
)
from findings_figures import (
    at_equal_tokens,
    draw,
    draw_beside_trl,
    draw_planted,
    draw_turns,
    exact_shares,
    read_by_length,
)
from findings_measures import (
    AUDITED,
    AUDITED_WELL,
    DATA,
    HERE,
    Columns,
    Measure,
    Studies,
    Study,
    at_kl,
    at_ppos_kl,
    audited,
    average,
    by_world,
    early,
    end,
    first,
    fresh,
    gained,
    interval,
    lately,
    number,
    pace,
    peak,
    reached,
    read,
    share,
    table,
    there,
    unsteadiness,
    updated,
    weighted,
    whole,
)

PAGE = HERE / "findings.md"
README_ROWS = {
    "default, built-in reviews": "builtin",
    "default, real questions": "trec",
    "default, real sentences about films": "subj",
    "default, built-in reviews by a causal reward model": "pairs",
}
"""Rows of the README's table of true credit, and their worlds."""


def readme_table(worlds: Mapping[str, Any]) -> list[str]:
    """The README's table of true credit, means over seeds; a world without runs has no row.

    Correlations of the default are from the runs of 20 iterations, whose audits are larger. An audit counts by the part
    of its truth's variance that is not noise, and one that cannot tell does not.
    """
    lines = [
        "| correlation of shown with true advantages | seeds | after 5 iterations | after 10 | after 20 "
        "| share of the attainable after 15 | after 60 |",
        "|---|---|---|---|---|---|---|",
    ]
    kept = by_world(worlds)
    rows = {
        title: (
            list(kept.get(f"{world}, {AUDITED_WELL}", {}).values()),
            list(kept.get(f"{world}, default", {}).values()),
        )
        for title, world in README_ROWS.items()
    }
    learned = list(kept.get("builtin, learned critic", {}).values())
    rows["a learned critic alone, built-in reviews"] = (learned, learned)
    for title, (audits, sixty) in rows.items():
        if not audits:
            continue
        means = [weighted(audits, at) for at in AUDITED]
        means += [average([share(run, at) for run in sixty]) for at in ("15", "60")]
        cells = [f"{mean:.2f}" if math.isfinite(mean) else "" for mean in means]
        lines.append(" | ".join(["| " + title, str(len(audits)), *cells]) + " |")
    return lines


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Insert each table, or text within a line, between its two comments in the page."""
    for name, text in tables.items():
        pattern = re.compile(rf"(<!-- table {name} -->(\n?)).*?(<!-- end -->)", re.DOTALL)
        page, places = pattern.subn(lambda found, text=text: f"{found[1]}{text}{found[2]}{found[3]}", page)
        if places != 1:
            raise SystemExit(f"{PAGE} has {places} places for the table {name}")
    return page


def length_table(study: Study, measure: Measure, metric: str, exact: str | None = None) -> str:
    """A measure of each method, a column per length of the texts; `exact` is the title of a first row, of the truth."""
    methods, truth = read_by_length(study), exact_shares(study)
    rows = {exact: truth} if exact else {}
    for method, lengths in methods.items():
        rows[method] = {length: [measure(run, metric) for run in runs.values()] for length, runs in lengths.items()}
    lines = ["| method | " + " | ".join(f"{length} tokens" for length in truth) + " |", "|" + "---|" * (len(truth) + 1)]
    for method, lengths in rows.items():
        cells = [estimate(lengths[length]) if length in lengths else "" for length in truth]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def estimate(values: Sequence[float]) -> str:
    """A mean, with half the width of its 95 % interval where there are several runs."""
    mean, half = interval(values)
    return number(mean) + (f" ± {number(half, 2)}" if math.isfinite(half) else "")


def studies() -> Studies:
    """All stored studies; `by-world` has the runs of `worlds`."""
    found = {path.stem: read(path.stem) for path in DATA.glob("*.json")}
    limits = {
        world: {"limit": found["worlds"][world]["limit"]} if world in found["worlds"] else {}
        for world in found["beside-trl"]
    }
    return found | {
        "by-world": by_world(found["worlds"]),
        "beside-trl": by_world({world: found["beside-trl"][world] | limits[world] for world in limits}),
    }


CRITICS = ("learned critic", "true-credit")
"""Variants of three worlds without scores of prefixes, but with a critic."""
NOT_RUN = "No runs of this study are kept yet."


def table_if_run(
    found: Studies, name: str, columns: Columns, pairs: Sequence[tuple[str, str]], base: str = "base"
) -> str:
    """The table of a study beside its base, if that was run, with those pairs that were; `NOT_RUN` without metrics."""
    if name not in found:
        return NOT_RUN
    study = found[name]
    return table(study, columns, base=base if base in study else None, pairs=there(study, pairs))


CHANGED = {
    "temperature 0.5": "base",
    "learned, orthogonal head": "learned",
    "learned, no value clip": "learned",
    "learned, whitened scores": "learned",
    "learned, keep mean": "learned, whitened scores",
}
"""Changes in three worlds whose critic and distinct pairs were measured, and what each changes."""


def change_table(worlds: Mapping[str, Study], columns: Columns, last: bool) -> str:
    """The changes in each world: those of `CHANGED`, with what they change and the differences to it, or the others."""
    names = {"learned", *CHANGED}
    study = by_world(
        {
            world: {x: runs for x, runs in found.items() if x == "base" or (x in names) == last}
            for world, found in worlds.items()
        }
    )
    pairs = [(f"{world}, {one}", f"{world}, {other}") for world in worlds for one, other in CHANGED.items()]
    return table(study, columns, pairs=there(study, pairs))


def corrected(study: Study) -> list[tuple[str, str]]:
    """Each variant with a correction, such as `age=2,clip`, and the variant of that age without one."""
    return [(variant, variant.split(",")[0]) for variant in study if "," in variant]


def tables(found: Studies) -> dict[str, str]:
    """The tables of the page, by their names in it."""
    sentiment, learning = found["negative-sentiment"], found["at-kl-0.5"]
    rewards = {
        "reward, mean of all iterations": (whole, "reward"),
        "reward at the end": (end, "reward"),
        "KL at the end, nats per sequence": (end, "kl"),
        "unsteadiness of the reward": (unsteadiness, "reward"),
    }
    language = {
        "known words": (end, "known"),
        "log-probability under the reference, nats per token": (end, "ref_logprob"),
        "entropy, nats per token": (end, "entropy"),
        "length, tokens": (end, "length"),
        "distinct pairs of tokens": (end, "distinct_2"),
    }
    critic = {
        "value loss, mean of all iterations": (whole, "value_loss"),
        "explained variance, mean of all iterations": (whole, "explained_variance"),
        "value at the end": (end, "value"),
    }
    returns = {
        "return, mean of all iterations": (whole, RETURN),
        "return at the end": (end, RETURN),
        "return, mean of the first quarter": (early, RETURN),
        "unsteadiness of the return": (unsteadiness, RETURN),
        "deviation of the advantages": (whole, "advantage_std"),
    }
    explained = returns | {"explained variance, mean of all iterations": (whole, "explained_variance")}
    worlds = {f"correlation after {at}": (audited, f"{at} shown") for at in AUDITED} | {
        "share of the attainable after 15": (share, "15"),
        "after 60": (share, "60"),
        "reward at 1 nat of KL": (at_kl, "1"),
        "at 2 nats": (at_kl, "2"),
        "at 4 nats": (at_kl, "4"),
        "reward at the end": (lately, "reward"),
        "KL at the end": (lately, "kl"),
    }
    critics = {f"explained variance after {at}": (audited, f"{at} explained_variance") for at in AUDITED} | {
        f"λ = {name}": (audited, f"10 {label}")
        for name, label in {
            "0": "td (gae, λ = 0)",
            "0.5": "gae, λ = 0.5",
            "0.9": "gae, λ = 0.9",
            "0.95": "gae, λ = 0.95",
            "1": "monte_carlo (gae, λ = 1)",
        }.items()
    }
    by_critic = {name: runs for name, runs in found["by-world"].items() if name.partition(", ")[2] in CRITICS}
    heads = {name: learning[name] for name in ("base", "orthogonal-head", "keep-mean")}
    solved = {
        "solved, mean of all iterations": (whole, "reward"),
        "solved at the end": (end, "reward"),
        "iterations to 0.9 solved": (reached, "0.9"),
        "turns per episode at the end": (end, "env/turns"),
        "entropy at the end, nats per token": (end, "entropy"),
    }
    aged = {
        "reward after 14 to 23 updates": (updated, "14 23"),
        "reward after 0 to 23 updates": (updated, "0 23"),
        "reward of the samples, mean of all iterations": (whole, "reward"),
        "behavior_kl, nats per token": (whole, "behavior_kl"),
        "clip_fraction": (whole, "clip_fraction"),
    }
    verified = {
        "solved greedily at the end": (end, "eval/reward"),
        "solved, mean of all iterations": (whole, "reward"),
        "solved at the end": (end, "reward"),
        "entropy at the end, nats per token": (end, "entropy"),
        "explained variance": (whole, "explained_variance"),
    }
    changed = {
        "reward, mean of all iterations": (whole, "reward"),
        "reward at 1 nat of KL": (at_kl, "1"),
        "at 2 nats": (at_kl, "2"),
        "reward at the end": (lately, "reward"),
        "KL at the end": (lately, "kl"),
        "log-probability under the reference, nats per token": (lately, "ref_logprob"),
        "entropy": (lately, "entropy"),
        "unsteadiness of the reward": (unsteadiness, "reward"),
    }
    valued = {
        "reward, mean of all iterations": (whole, "reward"),
        "reward at the end": (lately, "reward"),
        "KL at the end": (lately, "kl"),
        "distinct pairs of tokens at the end": (lately, "distinct_2"),
        "value loss": (whole, "value_loss"),
        "explained variance": (whole, "explained_variance"),
        "value at the end": (lately, "value_mean"),
    }
    steps = [pair[::-1] for path in PATHS for pair in pairwise(path)]
    lambdas_run, changes, recipes = by_lambda(found), found.get("changes", {}), recipes_by_world(found)
    sizes = sizes_by_world(recipes)
    other_than_sizes = {name: runs for name, runs in by_world(recipes).items() if ", scaling: " not in name}
    paths = by_change({world: at_ppos_kl(study) for world, study in found.get("whole-path", {}).items()})
    path_columns = {
        "true reward": (first, "reward/gold"),
        "reward model": (first, "reward/proxy"),
        "fluency": (first, "reward/fluency"),
        "KL to SFT, nats": (first, "kl"),
        "distinct texts": (first, "distinct"),
        "distinct pairs of tokens": (first, "distinct_2"),
        "length": (first, "length"),
        "accuracy": (first, "accuracy"),
    }
    in_recipes = {
        "reward, mean of all iterations": (whole, "reward"),
        "reward at the end": (end, "reward"),
        "KL at the end": (end, "kl"),
        "largest KL": (peak, "kl"),
        "distinct pairs of tokens at the end": (end, "distinct_2"),
        "length, tokens": (end, "length"),
        "value loss, first iteration": (first, "value_loss"),
        "value loss at the end": (end, "value_loss"),
    }
    price = ("kl_ent", "kl-1.0", "entropy-0.02", "kl-0.5", "kl-0.5-entropy-0.02", "gae", "gae-1.5")
    return {
        "verdicts": claim_table(found),
        "claims": table_if_run(
            found,
            "claims",
            rewards
            | {
                "share of the way to 1": (gained, "reward"),
                "NEGATIVE at the end": (end, "reward/NEGATIVE"),
                "story at the end": (end, "reward/story"),
                "distinct pairs of tokens": (end, "distinct_2"),
                "value loss": (whole, "value_loss"),
            },
            [("positive", "base"), ("both", "base"), ("both", "story"), ("max-norm", "l2-norm")],
        ),
        "write-up": table_if_run(found, "write-up", rewards | language | critic, steps),
        "worlds": table(found["by-world"], worlds),
        "critics": table(by_critic, critics),
        "beside-trl": table(
            found["beside-trl"],
            {f"share of the attainable after {at}": (share, at) for at in ("10", "15", "40")}
            | {"reward at 1 nat of KL": (at_kl, "1"), "at 2 nats": (at_kl, "2")}
            | {"reward at the end": (fresh, "reward"), "KL at the end": (fresh, "kl")}
            | {"seconds per iteration": (pace, "clock"), "CPU seconds": (pace, "cpu")},
        ),
        "kl": table(
            sentiment,
            rewards,
            base="base",
            pairs=[*((name, "base") for name in price), ("kl_ent", "kl-1.0"), ("kl-0.5-entropy-0.02", "kl-0.5")],
        ),
        "reward": table(learning, rewards, base="base", pairs=[("gentle", "base")]),
        "language": table(learning, language, base="base", pairs=[("gentle", "base"), ("temperature-2", "base")]),
        "critic": table(heads, critic, pairs=[("orthogonal-head", "base"), ("keep-mean", "base")]),
        "spread": table(
            found["spread"],
            {"value loss at the end": (end, "value_loss"), "KL at the end": (end, "kl"), "length": (end, "length")},
            base="terminal",
        ),
        "hacking": table(
            found["hacking"],
            {
                "the classifier's score at the end": (end, "reward/NEGATIVE"),
                "known words": (end, "known"),
                "log-probability under the reference": (end, "ref_logprob"),
                "KL at the end": (end, "kl"),
                "largest KL": (peak, "kl"),
                "its price at the end": (end, "kl_coef"),
                "distinct texts": (end, "distinct"),
                "distinct pairs of tokens": (end, "distinct_2"),
                "length, tokens": (end, "length"),
            },
        ),
        "texts": texts(found["hacking"]),
        "estimators": table(
            found["estimators-text"],
            rewards | {"deviation of the advantages": (whole, "advantage_std")},
            base="estimator=gae",
        ),
        "cartpole": table(found["estimators-cartpole"], returns, base="estimator=gae"),
        "verdict-7a": uniform_verdict(found["estimators-text"], found["estimators-cartpole"]),
        "humanoid": table(found["humanoid"], explained),
        "lambda": table(found["pendulum"], explained),
        "cartpole-lambda": table_if_run(found, "cartpole-lambda", explained, []),
        "locomotion-lambda": table_if_run(found, "locomotion-lambda", explained, []),
        "claims-lambda": claims_by_place(lambdas_run, LAMBDA_CLAIMS),
        "verdict-7b": verdicts_by_place(lambdas_run, LAMBDA_CLAIMS, list(LAMBDA_CLAIMS)[:3]),
        "verdict-9": verdicts_by_place(lambdas_run, LAMBDA_CLAIMS, list(LAMBDA_CLAIMS)[3:]),
        "changes": change_table(changes, changed, last=False),
        "changes-valued": change_table(changes, valued, last=True),
        "claims-changes": claims_by_place(by_change(changes), CHANGE_CLAIMS) if changes else NOT_RUN,
        "recipes": table(other_than_sizes, in_recipes) if recipes else NOT_RUN,
        "claims-recipes": claims_by_place(recipes, RECIPE_CLAIMS) if recipes else NOT_RUN,
        "verdict-10": verdicts_by_place(paths, PATH_CLAIMS, list(PATH_CLAIMS)) if paths else NOT_RUN,
        "claims-whole-path": claims_by_place(paths, PATH_CLAIMS) if paths else NOT_RUN,
        "whole-path": table(by_world(paths), path_columns) if paths else NOT_RUN,
        "verdict-8": verdicts_by_place(sizes, SIZE_CLAIMS, list(SIZE_CLAIMS)) if sizes else NOT_RUN,
        "claims-scaling": claims_by_place(sizes, SIZE_CLAIMS) if sizes else NOT_RUN,
        "scaling": table(
            by_world(sizes),
            {
                "reward at the end": (end, "reward"),
                "reward, first iteration": (first, "reward"),
                "known words at the end": (end, "known"),
                "known words, first iteration": (first, "known"),
                "log-probability under one judge at the end, nats per token": (end, "reward/fluency"),
                "the same, first iteration": (first, "reward/fluency"),
                "under the reference at the end": (end, "ref_logprob"),
                "entropy at the end, nats per token": (end, "entropy"),
                "entropy, first iteration": (first, "entropy"),
                "KL at the end, nats per sequence": (end, "kl"),
            },
        ),
        "turns": table(at_equal_tokens(found["turns"]), solved, base="token-gae"),
        "map-control": map_control(at_equal_tokens(found["turns"])),
        "ages": table(found["ages"], aged, base="age=0", pairs=corrected(found["ages"])),
        "ages-large-steps": table(
            found["ages-large-steps"], aged, base="age=0", pairs=corrected(found["ages-large-steps"])
        ),
        "reasoning": table_if_run(
            found, "reasoning", verified, [("rloo", "grpo"), ("grpo-masked", "grpo"), (RESAMPLED, "grpo")], base="ppo"
        ),
        "reasoning-ladder": table_if_run(
            found, "reasoning-ladder", verified, [pair[::-1] for pair in pairwise(LADDER)], base="ppo"
        ),
        "sao": table_if_run(
            found,
            "sao",
            verified
            | {"age of a token, updates": (end, "age_mean"), "clipped or masked tokens": (whole, "clip_fraction")},
            [(rung, below) for rung, (below, _) in SAO.items()],
            base="grpo",
        ),
        "planted": length_table(found["planted-credit"], first, "shown", exact="exact answer"),
        "planted-squared": length_table(found["planted-credit"], first, "shown_squared"),
        "planted-reward": length_table(found["planted-credit"], whole, "reward"),
        "planted-kinds": table(
            found["planted-kinds"],
            {
                "share of the credit": (first, "shown"),
                "exact answer": (first, "true"),
                "reward, mean of all iterations": (whole, "reward"),
            },
        ),
    }


def main() -> int:
    """Draw all figures and fill in all tables."""
    found = studies()
    draw_beside_trl(found["beside-trl"])
    draw(found["negative-sentiment"], "reward", "kl", "base", "reward (grey: mean of base)")
    draw(found["at-kl-0.5"], "reward", "reward", "base", "reward at a price of KL of 0.5 (grey: mean of base)")
    draw(found["spread"], "value_loss", "spread", None, "value loss", log=True)
    draw(found["hacking"], "known", "hacking", "kl-0.05", "known words (grey: mean of kl-0.05)")
    draw(found["estimators-text"], "reward", "estimators", "estimator=gae", "reward (grey: mean of gae)")
    draw(
        found["estimators-cartpole"],
        RETURN,
        "cartpole",
        "estimator=gae",
        "return of CartPole-v1 (grey: mean of gae)",
    )
    draw(found["humanoid"], RETURN, "humanoid", None, "return of HumanoidStandup-v5")
    draw(found["pendulum"], RETURN, "lambda", None, "return of InvertedPendulum-v5")
    draw(found["scaling"], "reward", "scaling", None, "reward of each size")
    draw_planted(found["planted-credit"])
    draw_turns(found["turns"])
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), tables(found)), encoding="utf-8")
    return 0


def texts(study: Study) -> str:
    """The last stored completion of each run; as code, since nobody has checked them."""
    rows = ["| variant | the last completion of each seed |", "|---|---|"]
    for variant, runs in study.items():
        last = [run["last_text"] for run in runs.values()]
        shown = [text.replace("`", "'").replace("|", "/").replace("\n", " ") for text in last]
        rows.append(f"| {variant} | " + "<br>".join(f"`{text}`" for text in shown) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
