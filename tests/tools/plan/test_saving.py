"""The memory that a checkpoint takes while it is written."""

import pytest

from helpers import warm
from tokencredit.tools.plan.memory import SERIALIZED

PROGRAM = """
import sys, torch
from pathlib import Path
from tokencredit.distributed.processes import Processes
from tokencredit.runs.tensor_files import write_tensors

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

processes = Processes()
write_tensors(Path(sys.argv[1]) / "first", {"small": torch.ones(8)}, processes)  # the libraries' own memory
# Two do not fit into one file.
tensors = {str(number): torch.ones(10_000_000) for number in range(5)}
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
write_tensors(Path(sys.argv[1]) / "second", tensors, processes)
print((status("VmHWM") - before) / tensors["0"].nbytes)
"""


@pytest.mark.slow
def test_a_file_of_a_checkpoint_is_in_memory_as_often_as_the_formula_says(tmp_path):
    done = warm.python("-c", PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(SERIALIZED, rel=0.1)
