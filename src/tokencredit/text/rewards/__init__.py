"""Reward terms: functions, classifiers and reward models that score completions."""
