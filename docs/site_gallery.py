"""The gallery of the site: real runs, each with a page and a picture; `make gallery` trains them in build/gallery."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import NamedTuple

from tokencredit.report.reading import REPORT, read_run
from tokencredit.report.story import story
from tokencredit.runs.diagnosis import diagnose

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "build" / "gallery"
PICTURE = "picture.svg"
SHOWN = ("reward", "average return", "time")
"""Parts of a run's story that its card has."""
JOBS = 2
"""Runs at a time, of one thread each."""


class Card(NamedTuple):
    """A run of the gallery."""

    name: str
    title: str
    sentence: str
    commands: tuple[str, ...]
    """The last one trains, and gets `--run.dir`."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return RUNS / self.name


CARDS = (
    Card(
        "main-job",
        "From praise to blame",
        "A model that praises films learns to blame them; the reward is a classifier's probability of NEGATIVE.",
        ("tokencredit train",),
    ),
    Card(
        "few-words",
        "Few words",
        "A function of Python pays for reviews that end within eight words.",
        ("tokencredit train --config examples/few-words/run.yaml",),
    ),
    Card(
        "json",
        "JSON that parses",
        "The reward grows with the part of the text that Python's parser accepts.",
        ("python examples/json/make_model.py", "tokencredit train --config examples/json/run.yaml"),
    ),
    Card(
        "grid",
        "A grid in turns",
        "The model names a direction per turn and sees only what is near; the environment pays for the goal.",
        ("tokencredit train --config recipes/turns/grid.yaml --run.iterations 40",),
    ),
    Card(
        "calculator",
        "A calculator as a tool",
        "The model learns to call a calculator with the question's numbers.",
        ("tokencredit train --config recipes/turns/calculator.yaml --run.iterations 30",),
    ),
    Card(
        "cartpole",
        "CartPole",
        "The same update balances a pole for all of an episode's 500 steps.",
        ("tokencredit control --config recipes/control/cartpole.yaml --run.iterations 150",),
    ),
    Card(
        "hacked",
        "A hacked reward",
        "Only length is paid, at next to no KL price: the reward rises and the text falls apart.",
        ("tokencredit train --reward '[{function: length}]' --kl.coef 1e-6 --optim.lr 1e-3 --run.iterations 24",),
    ),
)


def gallery_page() -> str:
    """The page in Markdown: a section per card, with picture, outcome and page of a run that is there."""
    text = "Real runs, each trained on two cores by the command beside it; their pages show every token's credit."
    if not any(map(is_trained, CARDS)):
        text += " This build is without them: first `make gallery`, a few minutes, then `make docs`."
    return "\n\n".join(["# Gallery", text, *map(section, CARDS)]) + "\n"


def is_trained(card: Card) -> bool:
    """True if the card's run has its page and its picture."""
    return all((card.run / name).is_file() for name in (REPORT, PICTURE))


def section(card: Card) -> str:
    """A card of the page."""
    parts = [f"## {card.title}", card.sentence]
    if is_trained(card):
        run, page = read_run(card.run), f"../../gallery/{card.name}.html"
        found = diagnose(run.metrics[run.since :], run.config, ended=True, samples=run.samples)
        outcome = [f"{fact.label} {fact.text}" for fact in story(run) if fact.label in SHOWN]
        outcome += [f"diagnosis: {finding.title}" for finding in found]
        parts[1:1] = [f"![{card.title}]({os.path.relpath(card.run / PICTURE, ROOT / 'docs' / 'reference')})"]
        parts += [f"{escape('; '.join(outcome))}.", f'<a href="{page}">The run\'s page</a>']
    return "\n\n".join([*parts, "```sh\n" + "\n".join(card.commands) + "\n```"])


def copy_pages(site: Path) -> None:
    """Copy the pages of the runs into the built site."""
    for card in filter(is_trained, CARDS):
        (site / "gallery").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(card.run / REPORT, site / "gallery" / f"{card.name}.html")


def train(card: Card) -> None:
    """Train a card's run anew, and draw its picture."""
    shutil.rmtree(card.run, ignore_errors=True)
    commands = [*card.commands[:-1], f"{card.commands[-1]} --run.dir {card.run}"]
    # Early credit has both signs.
    draws = "compare" if "control" in card.commands[-1] else "picture --iteration 10 --width 4.5"
    commands.append(f"tokencredit {draws} {card.run} --out {card.run / PICTURE}")
    found = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1"}
    log = RUNS / f"{card.name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-ec", "\n".join(commands)], cwd=ROOT, env=os.environ | found, stdout=output, stderr=output
        )
    if done.returncode:
        raise SystemExit(f"{card.name}: exit code {done.returncode}; see {log}")
    print(f"{card.name}: {card.run / REPORT}", flush=True)


def main(names: Sequence[str]) -> None:
    """Train the runs with these names, or all."""
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(train, [card for card in CARDS if not names or card.name in names]))


if __name__ == "__main__":
    main(sys.argv[1:])
