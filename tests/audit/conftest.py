import math

import pytest


@pytest.fixture(scope="session")
def covered():
    """Check that ±1.96 standard errors hold the truth in this share of cases, as far as chance allows."""

    def check(errors, share=0.94, deviations=3.5):
        found = sum(abs(float(error)) <= 1.96 for error in errors) / len(errors)
        margin = deviations * math.sqrt(share * (1 - share) / len(errors))
        assert share - margin <= found <= share + margin, (found, len(errors))
        mean = sum(map(float, errors)) / len(errors)
        assert abs(mean) < deviations / math.sqrt(len(errors)) + 0.1, mean

    return check
