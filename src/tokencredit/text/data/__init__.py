"""Data sets, prompts and batches of them."""
