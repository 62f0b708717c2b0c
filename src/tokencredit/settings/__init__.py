"""Settings of a run: dataclasses, their checks, and their YAML and command-line parsers."""
