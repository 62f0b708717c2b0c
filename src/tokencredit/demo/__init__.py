"""The built-in world `builtin:reviews` and the program that builds it."""
