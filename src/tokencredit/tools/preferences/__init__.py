"""Preferences: pairs of completions ranked by a reward, and labels by hand."""
