"""Data sets and the prompts made of them."""
