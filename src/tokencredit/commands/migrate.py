"""The command `migrate`."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

from tokencredit.commands.command_line import POSITIVE_INT, Options, command, option, positional
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import check_new_file


@command(
    "Make a run.yaml of a configuration of TRL, LLaMA-Factory, ms-swift, verl or OpenRLHF.",
    positional(
        "file",
        "FILE, a YAML, JSON, Python or shell file",
        nargs="*",
        help="YAML, JSON, Python or shell file; it is read, never run. Settings of later files override earlier ones.",
    ),
    option("--rows", type=POSITIVE_INT, help="Number of prompts, if the file counts epochs."),
    option("--out", metavar="FILE", help="New .yaml file; by default the standard output."),
    runs_code=False,
)
def migrate(options: Options) -> None:
    """Run `tokencredit migrate`."""
    out = None if options.out is None else check_new_file("--out", options.out, ".yaml")
    from tokencredit.tools.migration.reading import read
    from tokencredit.tools.migration.writing import migrated

    files = [Path(name) for name in options.file]
    sources = [read(file) for file in files]
    projects = {source.project.title: source.project for source in sources if source.project is not None}
    names = ", ".join(map(str, files))
    if len(projects) != 1:
        kinds = (
            f"of several projects, {', '.join(projects)}; migrate" if projects else "of no project that is known; give"
        )
        raise ConfigError(f"{names}: {kinds} one at a time")
    given = {name: value for source in sources for name, value in source.given.items()}
    project, notes = next(iter(projects.values())), [note for source in sources for note in source.notes]
    made = migrated(project, given, notes)
    if options.rows is not None:
        counted = migrated(project, given | {"rows": options.rows}, notes)
        if counted.settings == made.settings:
            raise ConfigError(
                f"--rows is {options.rows}, and {names} counts no epochs, so it has no effect; leave it out"
            )
        made = counted
    text = made.text(names)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
    print(made.summary(names), file=sys.stderr)
    if out is not None:
        print(f"{out}; train with it: tokencredit train --config {quote(str(out))}", file=sys.stderr)
