"""docs/control.md: every line that its table of details quotes is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "control.md").read_text(encoding="utf-8")
DETAILS = re.findall(r"^\| (.+?) \| `(\S+\.py)` \| `(.+)` \|$", PAGE, re.MULTILINE)


def test_all_twenty_two_details_are_named():
    assert len(DETAILS) == 22


@pytest.mark.parametrize(("detail", "file", "line"), DETAILS)
def test_the_quoted_line_is_there(detail, file, line):
    assert line in (ROOT / "src" / "tokencredit" / file).read_text(encoding="utf-8"), detail
