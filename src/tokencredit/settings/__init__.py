"""Settings of a run: dataclasses, their checks, and their reader of dicts and YAML files."""
