"""Sweeps: plan, runner and status table."""
