"""Minibatches of all processes' rows: three gloo processes with 3, 7 and 1 rows take the steps of one with 11.

Also with an actor and a critic that are sharded over them, whose passes are collective.
"""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from helpers import minibatches
from helpers.warm import together
from tokencredit.distributed.processes import Processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo"),
]


PROOFS = (
    *("whitened minibatches", "target KL", "fewer rows than processes", "constant reduction", "by sequence", "DPPO"),
    *("importance weights", "separate critic, micro-batches", "separate critic, not clipped"),
    *("separate critic, whitened", "separate critic, critic-only steps", "adapter on a frozen actor"),
    *("micro-batches", "critic-only steps"),  # interpolated by age has both
)
EVERY = (*minibatches.CASES, *minibatches.SEPARATE)
DAILY = [case for case in EVERY if case not in PROOFS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("three")


@pytest.fixture(scope="module")
def one(folder):
    """Results of one process, without those of the proofs."""
    alone = Processes()
    answer = minibatches.results(alone) | {"saved": minibatches.saved(alone, folder / "of-one")}
    return json.loads(json.dumps(answer | minibatches.compared(alone, DAILY)))


@pytest.fixture(scope="module")
def three(folder, one):
    """Results of each of three processes."""
    return started(folder, DAILY)


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    return minibatches.compared(Processes(), PROOFS), started(tmp_path_factory.mktemp("three"), PROOFS)


def started(folder, cases):
    done = together(3, Path(minibatches.__file__), folder, *cases, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.proof if case in PROOFS else ()) for case in EVERY]
)
def test_three_processes_take_the_steps_of_one(case, request):
    names = ("one", "three")
    one, three = request.getfixturevalue("proofs") if case in PROOFS else map(request.getfixturevalue, names)
    for process in three:
        for metrics, expected in zip(process[case]["metrics"], one[case]["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=2e-6, abs=1e-6)
        for weights, expected in zip(process[case]["weights"], one[case]["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert one[case]["metrics"][0]["steps"] > 0


def test_each_minibatch_is_shared_among_the_processes(one, three):
    shares = [process["minibatches"] for process in three]
    together = [[*chain(*parts)] for parts in zip(*shares, strict=True)]
    assert together == one["minibatches"]
    assert sorted(chain(*together)) == list(range(minibatches.ROWS))
    assert any(not part for part in shares[2]), "a minibatch has fewer rows than there are processes"


def test_advantages_as_the_loss_used_them_are_those_of_one_process(one, three):
    found = [row for process in three for row in process["used advantages"]]
    assert [len(row) for row in found] == [len(row) for row in one["used advantages"]]
    assert list(chain(*found)) == pytest.approx(list(chain(*one["used advantages"])), abs=1e-5)


@pytest.mark.parametrize("model", ["", ", sharded"])
@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_the_row_of_a_number_that_is_not_finite_is_found_in_every_process(field, model, one, three):
    [found] = one[f"{field} of the last row{model}"]
    assert found == [{"advantages": "policy loss", "returns": "value loss"}[field], minibatches.ROWS - 1]
    assert all(process[f"{field} of the last row{model}"] == [found] for process in three)


def test_shares_and_texts(three):
    assert [process["share of 10"] for process in three] == [[0, 4], [4, 7], [7, 10]]
    assert all(process["texts"] == ["", "ünï", "ünïünï"] for process in three)


def test_checkpoints_of_one_and_of_three_sharded_processes_go_on_alike(one, three, folder):
    expected = pytest.approx(one["saved"]["next"], rel=2e-6, abs=1e-6)
    assert minibatches.gone_on(Processes(), folder / "of-three")["next"] == expected
    for process in three:
        assert process["saved"]["next"] == expected
        assert process["gone on"]["next"] == expected
        assert process["saved"]["size"] == one["saved"]["size"], "of all processes together"
