"""The tables of benchmarks/findings.md say what the kept metrics say."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def findings():
    """The program, which imports Matplotlib."""
    path = Path(__file__).parents[2] / "benchmarks" / "findings.py"
    spec = importlib.util.spec_from_file_location("findings", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.proof
def test_the_page_has_the_tables_of_the_kept_metrics(findings):
    page = findings.PAGE.read_text(encoding="utf-8")
    assert findings.fill(page, findings.tables(findings.studies())) == page


def test_the_readme_has_the_table_that_its_command_prints(findings):
    found = findings.studies()
    table = "\n".join(findings.readme_table(found["worlds"], found["truth"]))
    assert f"\n\n{table}\n\n" in (findings.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_intervals_are_students_and_welchs(findings):
    mean, half = findings.interval([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-6)  # t of 2 degrees of freedom
    delta, low, high = findings.difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    error, freedom = (1 / 3 + 4 / 3) ** 0.5, (1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert delta == -2.0
    assert (high - low) / 2 == pytest.approx(findings.stats.t.ppf(0.975, freedom) * error)


def test_steadiness_looks_at_changes_in_the_second_half(findings):
    assert findings.unsteadiness({"x": [9.0, 1.0, 1.0, 2.0, 1.0, 2.0]}, "x") == pytest.approx(1.0)
