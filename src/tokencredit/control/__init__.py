"""The Gymnasium world: agents trained on the same `core/` and `learn/` as language models."""
