"""Rollout engines: sample completions from the policy."""
