"""A run in a real Jupyter kernel: one output, an event loop, interrupts; and the notebooks as they are stored."""

import ast
import html
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FIRST = """
import asyncio, os, signal
os.chdir({folder!r})
import tokencredit as tc

assert os.environ["GOMP_SPINCOUNT"]


async def short(completions, **columns):
    await asyncio.sleep(0)
    return [-len(completion) / 100 for completion in completions]


class Interrupt(tc.Callback):
    def after_reward(self, trainer, scores):
        if not trainer.record.history:
            signal.raise_signal(signal.SIGINT)


config = tc.PPOConfig.from_dict(
    {{"rollout": {{"batch_size": 4, "max_new_tokens": 6}}, "eval": {{"every": 1, "samples": 4}}, "run.iterations": 2,
     "run.show_every": 1, "run.trackers": []}}
)
trainer = tc.PPOTrainer("builtin:reviews", short, config, callbacks=[Interrupt()])
"""
CELLS = (
    "summary = trainer.train()",
    "summary.stopped_by, len(trainer.record.history)",
    "summary = trainer.train()",
    "summary.stopped_by, len(trainer.record.history)",
    "tc.read_run(summary.folder)",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_run_in_a_notebook_has_one_output_per_cell_and_goes_on_after_an_interrupt(tmp_path):
    sources = FIRST.format(folder=str(tmp_path)), *CELLS
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    _, cut, first, rest, second, run = [
        [output for output in cell.outputs if output.output_type != "stream"] for cell in notebook.cells
    ]
    assert first[0].data["text/plain"] == "('interrupt', 1)"
    assert second[0].data["text/plain"] == "('iterations', 2)"
    for outputs, number in ((cut, 1), (rest, 2)):
        assert len(outputs) == 1
        text = outputs[0].data["text/plain"]
        assert f" {number}/2 0:" in text
        assert "left" in text
        assert text.count(f"iteration {number}  evaluated") == 1
        assert "samples of iteration" not in text  # which stand below the progress, until the run ends
        shown = html.unescape(re.sub(r"</?pre[^>]*>", "", outputs[0].data["text/html"]))
        assert shown == text
    assert "resumed after iteration 1" in rest[0].data["text/plain"]
    assert "<svg" in run[0].data["text/html"]


STORED = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_stored_notebook_is_valid_and_has_no_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        ast.parse(cell.source)
        assert (cell.outputs, cell.execution_count, cell.metadata) == ([], None, {})
    assert notebook.cells[0].source.startswith("# ")
    for target in re.findall(r"\]\(([^)#]+)", "".join(x.source for x in notebook.cells if x.cell_type == "markdown")):
        assert target.startswith("https://") or (file.parent / target).exists()


def test_there_are_notebooks():
    assert [file.name[0] for file in STORED] == sorted({file.name[0] for file in STORED})
    assert STORED
