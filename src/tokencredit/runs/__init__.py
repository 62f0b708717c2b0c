"""A run's files, screen output, checkpoints and diagnosis."""
