"""Cases of a test that `make proofs` runs."""

import pytest


def proofs(*cases):
    """Parameters for `pytest.mark.parametrize`, each a value or a tuple of values."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.proof) for case in cases]
