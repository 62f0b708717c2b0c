"""Commands on preferences: `pairs` and `label`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokencredit.commands.command_line import SEED, Options, command, option, positional
from tokencredit.commands.use_model import MODEL, source_of
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import check_new_file
from tokencredit.settings.reader import build
from tokencredit.settings.run_kind import read_source
from tokencredit.tools.scoring_options import PairsOptions


@command(
    "Sample completions, rank them by a reward, and write pairs of them.",
    *MODEL,
    option("--out", metavar="FILE", help="New .jsonl file of the pairs; a .json beside it has settings and counts."),
    kind=PairsOptions,
)
def pairs(options: Options) -> None:
    """Run `tokencredit pairs`."""
    if options.out is None:
        raise ConfigError("--out is missing; give a new file that ends in .jsonl")
    settings = build(PairsOptions, options.settings)
    source, which = source_of(options)
    source = replace(source, config=settings.configure(source, options.no_code))
    reference = None if settings.reference is None else read_source(settings.reference, options.no_code)
    out = check_new_file("--out", options.out, ".jsonl")
    check_new_file("the file of settings beside --out", str(out.with_suffix(".json")), ".json")

    from tokencredit.tools.preferences.pairs import write_pairs

    write_pairs(source, which, reference, settings, out)
    print(out)


@command(
    "Label pairs of completions by hand: which one is better?",
    positional("pairs", "FILE, a JSONL file of pairs", help="JSONL file of pairs, as `tokencredit pairs` writes it."),
    option("--out", metavar="FILE", help="File of labels, continued; by default labels.jsonl."),
    option("--seed", type=SEED, default=1, help="Seed of the order of A and B."),
    option("--export", metavar="FILE", help="Write preferences of the labels to this new file."),
    runs_code=False,
)
def label(options: Options) -> None:
    """Run `tokencredit label`."""
    options.refuse_empty("out")
    if options.export is not None and options.seed != 1:
        raise ConfigError("--export labels nothing, so --seed has no effect; leave it out")
    from rich.console import Console

    from tokencredit.tools.preferences.labels import Labels, Session, export, read_pairs
    from tokencredit.tools.preferences.terminal import key_reader, label_in_terminal

    pairs = read_pairs(Path(options.pairs), options.seed)
    file = Path(options.pairs).with_name("labels.jsonl") if options.out is None else Path(options.out)
    labels = Labels.open(file)
    if options.export is not None:
        out = check_new_file("--export", options.export, ".jsonl")
        print(f"{export(labels, pairs, out)} preferences in {out}")
        return
    session = Session(pairs, labels)
    label_in_terminal(session, Console(highlight=False), key_reader())
    print(", ".join(f"{name} {number}" for name, number in session.counts().items()), f"in {file}")
