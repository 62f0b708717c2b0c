"""Small data sets."""

import pytest

BAD, GOOD = (" bad.", " a dull mess.", " terrible."), (" great.", " a lovely joy.", " wonderful.")
STARTS = ("This movie was really", "The film is", "I thought the acting was")


@pytest.fixture(scope="session")
def preferences():
    """Pairs of which the bad review is preferred."""
    return [{"prompt": STARTS[i % 3], "chosen": BAD[i % 3], "rejected": GOOD[(i // 3) % 3]} for i in range(12)]


@pytest.fixture(scope="session")
def answers():
    """Prompts with bad reviews."""
    return [{"prompt": STARTS[i % 3], "completion": BAD[(i // 3) % 3]} for i in range(12)]
