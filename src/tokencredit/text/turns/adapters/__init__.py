"""Environments of other packages, in the plain protocol."""
