"""Gymnasium agents, trained with the same `core/` and `learn/` as language models."""
