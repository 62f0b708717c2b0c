"""The wheel has the package and nothing else, and trains where only it is installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy, because setuptools leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "demo", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    # setuptools is one of the requirements for development, so that nothing is downloaded.
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    run(*PIP, *build, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    package = ROOT / "src" / "tokencredit"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(package.parent).as_posix() for path in files}
    assert {"tokencredit/py.typed", "tokencredit/demo/reviews/policy/model.safetensors"} <= names
    assert [name for name in names if name.startswith("tokencredit/demo/") and name.endswith(".py")] == []


def test_the_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    # Before the environment's own packages, of which this one is an editable install.
    path = {"PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", "import tokencredit; print(tokencredit.__file__)", cwd=empty, **path)
    assert Path(where.strip()).is_relative_to(site)
    run(sys.executable, site / "bin" / "tokencredit", "train", "--run.iterations", "2", cwd=empty, **path)
    assert [path.name for path in empty.iterdir()] == ["runs"]
    (folder,) = (empty / "runs").iterdir()
    files = {"config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "report.html", "policy"}
    assert files <= {path.name for path in folder.iterdir()}
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
