"""Audit of an agent: true values from replayed episodes, compared with critic and estimators."""
