import pytest

from tokencredit.report.templating import rounded, two_digits


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


def test_rounded():
    tree = {"a": [1.23456789, None, "x", 123456789], "b": {"c": 1e-9 / 3}}
    assert rounded(tree) == {"a": [1.2346, None, "x", 123456789], "b": {"c": 3.3333e-10}}
    assert rounded(tree, digits=6)["a"][0] == 1.23457
