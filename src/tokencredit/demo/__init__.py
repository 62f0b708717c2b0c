"""The built-in models `builtin:reviews`, and the program that builds them."""
