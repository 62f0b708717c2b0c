"""Sampling with the trained model itself."""
