"""Sweeps: the runs of a file, started here, on Ray or on Slurm, and compared."""
