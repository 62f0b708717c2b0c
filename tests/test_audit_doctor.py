"""A small part of `make doctor`: an illness per check, and healthy runs, on two critics that were trained for it."""

import pytest

from audit_doctor import HEALTHY, ILL, REWARDS, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    return {name: trained(tmp_path_factory.mktemp("doctor") / name, name, iterations=10) for name in REWARDS}


@pytest.mark.parametrize("check", ILL)
def test_an_illness_made_on_purpose_is_named(check, patients):
    name, change, lam = ILL[check][0]
    assert check in patients[name].named(patients[name].metrics(0, change, lam), lam)


@pytest.mark.parametrize(("name", "change", "lam"), [case for case in HEALTHY if case[0] in REWARDS])
def test_a_healthy_run_is_not_accused(name, change, lam, patients):
    assert patients[name].named(patients[name].metrics(0, change, lam), lam) == set()
