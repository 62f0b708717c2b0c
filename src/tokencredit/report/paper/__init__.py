"""Texts about a run for elsewhere: its model card, and what a paper says."""
