import pytest
import torch

from tokencredit.processes import Processes
from tokencredit.text.models import precision
from tokencredit.text.models.precision import Precision, bfloat16_helps, choose

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_asked_for_is_taken(dtype, monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_helps", lambda *_: pytest.fail("nothing to try out"))
    processes = Processes()
    assert choose(dtype, 64, processes) == Precision(dtype, processes.device)


@pytest.mark.parametrize(("half", "expected"), [(0.7, "bfloat16"), (0.8, "float32"), (3.0, "float32")])
def test_auto_takes_bfloat16_where_it_is_clearly_faster(half, expected, monkeypatch):
    monkeypatch.setattr(precision, "_seconds", lambda layers, inputs, enabled: half if enabled else 1.0)
    assert choose("auto", 64, Processes()).dtype == expected


def test_trying_out_draws_no_random_numbers_of_the_run():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert bfloat16_helps(32, CPU) in (True, False)
    assert torch.equal(torch.rand(3), expected)
