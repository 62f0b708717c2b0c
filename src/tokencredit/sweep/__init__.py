"""Sweeps: the runs a file stands for, running them, and their status."""
