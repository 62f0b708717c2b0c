import pytest

from tokencredit.runs.untrusted import visible, visible_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain “text” é 漢字 🙂", "plain “text” é 漢字 🙂"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m\x07\x00\x7f", r"\x9b31m\x07\x00\x7f"),
        ("\u202eright to left\u2066", r"\u202eright to left\u2066"),
        ("\ud800 alone", r"\ud800 alone"),
    ],
)
def test_untrusted_text_cannot_act_on_the_terminal(text, expected):
    assert visible(text) == expected


def test_line_breaks_may_stay():
    assert visible_lines("a\x1b\n\nb\r\u2028c") == "a\\x1b\n\nb\\r\\u2028c"
