"""Project files agree: requirements with their pins, the citation with the version, and PyPI's page with the README."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = dict(line.split("==") for line in LINES if not line.startswith("#"))
VERSIONS = {canonicalize_name(name): Version(version) for name, version in PINS.items()}
DIRECT = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
REQUIREMENTS = [x for x in map(Requirement, DIRECT) if x.name != PROJECT["name"]]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_each_requirement_has_a_lowest_version_and_a_pin_that_it_allows(requirement):
    assert [part.operator for part in requirement.specifier] == [">="]
    assert requirement.specifier.contains(VERSIONS[canonicalize_name(requirement.name)])


def test_the_pins_fit_every_build_of_torch():
    assert [name for name in VERSIONS if re.match(r"(nvidia|cuda|triton|pytorch-triton)\b", name)] == []
    assert [name for name, version in VERSIONS.items() if version.local] == []


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # what the schema requires
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["title"].lower() == PROJECT["name"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_links_of_the_page_on_pypi_lead_into_a_repository(tmp_path):
    options = ["REPOSITORY=https://example.org/owner/name", "REF=v0.1.0", f"RELEASE={tmp_path}"]
    subprocess.run(["make", "--silent", "release-source", *options], cwd=ROOT, check=True)
    source = tmp_path / "source"
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", (source / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 40
    for picture, link in links:
        start = f"https://example.org/owner/name/{'raw' if picture else 'blob'}/v0.1.0/"
        assert link.startswith("#") or (source / link.removeprefix(start).partition("#")[0]).is_file(), link
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Repository"] == "https://example.org/owner/name"
