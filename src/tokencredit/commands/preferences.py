"""Commands on preferences: `pairs`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from jsonargparse import Namespace

from tokencredit.commands.models import from_python, which_of
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import check_new_file
from tokencredit.settings.options import PairsOptions
from tokencredit.settings.parsing import Parser, options_parser, to_options
from tokencredit.settings.source import read_source


@cache
def pairs_parser() -> Parser:
    """The parser of `tokencredit pairs`."""
    parser = options_parser(PairsOptions, "Sample completions, rank them by a reward, and write pairs of them.")
    parser.add_argument("model", help="Folder of a run or a model, or a hub id.")
    parser.add_argument("--base", action="store_true", help="Sample from the model that the run started from.")
    parser.add_argument("--best", action="store_true", help="Sample from the policy with the best evaluation.")
    parser.add_argument(
        "--out", metavar="FILE", help="New JSONL file of the pairs; FILE.json gets settings and counts."
    )
    return parser


def pairs(options: Namespace) -> None:
    """Run `tokencredit pairs`."""
    if options.out is None:
        raise ConfigError("--out is missing; give a new file that ends in .jsonl")
    settings = to_options(pairs_parser(), options, PairsOptions)
    source, which = read_source(options.model), which_of(options)
    source = replace(source, config=settings.configure(source, from_python(source), options.no_code))
    reference = None if settings.reference is None else read_source(settings.reference, options.no_code)
    out = check_new_file("--out", options.out, ".jsonl")
    check_new_file("the file of settings beside --out", str(out.with_suffix(".json")), ".json")
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.preferences.pairs import write_pairs

    disable_progress_bar()
    write_pairs(source, which, reference, settings, out)
    print(out)
