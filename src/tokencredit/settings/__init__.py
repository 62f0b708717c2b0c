"""What a run is configured with: dataclasses, their checks, and reading them from YAML and flags."""
