"""Training from a data set: supervised fine-tuning, reward models, direct preference optimization."""
