"""Gymnasium agents, trained with the same `core/` and `learn/` as language models."""

from tokencredit.errors import importing

with importing("an agent", "Gymnasium", "tokencredit[control]"):
    import gymnasium  # noqa: F401
