"""A small part of `make doctor`: illnesses and health of one critic that was trained for it, in smaller audits.

λ that leans too little on a right critic takes larger ones, and is left to `make doctor`.
"""

from dataclasses import replace

import pytest

import audit_doctor
from audit_doctor import AUDIT, HEALTHY, ILL, trained

pytestmark = [pytest.mark.slow, pytest.mark.proof]
NAME = "vowels"


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("doctor") / NAME, NAME, iterations=10, epochs=4)


@pytest.fixture(autouse=True)
def small_audits(monkeypatch):
    monkeypatch.setattr(audit_doctor, "AUDIT", replace(AUDIT, completions=32, continuations=16))


@pytest.mark.parametrize("check", ["critic_worse", "critic_flat", "lam_low"])
def test_an_illness_made_on_purpose_is_named(check, patient):
    name, change, lam = ILL[check][0]
    assert name == NAME
    assert check in patient.named(patient.metrics(0, change, lam), lam)


@pytest.mark.parametrize(("name", "change", "lam"), [case for case in HEALTHY if case[0] == NAME])
def test_a_healthy_run_is_not_accused(name, change, lam, patient):
    assert patient.named(patient.metrics(0, change, lam), lam) == set()
