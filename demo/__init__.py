"""The program that builds the models of `builtin:reviews`; the package has only its results."""
