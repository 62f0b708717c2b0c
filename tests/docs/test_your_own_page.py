"""The examples of docs/your-own.md run as they stand, each in a small run."""

import re
from pathlib import Path

import pytest

from helpers.configs import text_config
from helpers.files import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "your-own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
EXAMPLES = {re.search(r"^(?:def|class) (\w+)", block, re.M)[1]: block for block in BLOCKS}
LOOP = EXAMPLES.pop("Model")
METRICS = {"soft_clip": "loss/bend", "FirstAndLast": "kl_of_last_minibatch"}


def test_there_are_five_of_at_most_25_lines():
    assert set(EXAMPLES) == {"by_entropy", "differences", "PerPosition", "soft_clip", "FirstAndLast"}
    assert all(len([line for line in block.splitlines() if line]) <= 25 for block in EXAMPLES.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path):
    code = EXAMPLES[name].replace("PPOConfig(", "small(")
    exec(code, {"small": lambda **groups: text_config(tmp_path / "run", 2, **groups)})
    row = read_metrics(tmp_path / "run")[-1]
    assert row["advantage_std"] > 0
    assert METRICS.get(name, "reward") in row


@pytest.mark.slow
def test_the_loop_of_another_model_learns(capsys):
    exec(LOOP, {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.5
