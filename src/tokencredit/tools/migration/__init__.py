"""Configurations of other projects, read without running anything, as a run.yaml."""
