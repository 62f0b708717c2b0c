"""Environments that come with the package: a grid, a calculator, and adapters of other packages' environments."""
