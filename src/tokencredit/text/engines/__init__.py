"""Rollout engines: prompts and settings in, a rollout out."""
