"""Memory, time and tokens of a run, computed before anything is loaded."""
