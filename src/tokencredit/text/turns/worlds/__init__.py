"""Built-in worlds of several turns: a grid in words and a calculator."""
