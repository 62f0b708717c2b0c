import pytest

from tokencredit.report.templating import two_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[
            (0.98765, "0.99"),
            (12.7, "12.70"),
            (-0.3, "-0.30"),
            (1.004, "1.00"),
            (0.01234, "0.012"),
            (-0.0001, "-0.00010"),
            (0.02, "0.020"),
        ],
        *[
            (302.4, "302"),
            (2309.4, "2,309"),
            (3.0, "3"),
            (0.0999999, "0.10"),
            (0.0, "0"),
            (-0.0, "0"),
            (1.23e9, "1.2e+09"),
            (None, "none"),
        ],
    ],
)
def test_two_digits(value, text):
    assert two_digits(value) == text
