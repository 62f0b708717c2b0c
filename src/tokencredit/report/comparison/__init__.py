"""Comparison of runs: statistics, verdict, a page, figures and tables."""
