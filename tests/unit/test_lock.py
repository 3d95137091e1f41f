"""requirements.lock: exact versions of everything that pyproject.toml asks for, and nothing else in it."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "requirements.lock").read_text().splitlines()
PINS = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in LINES}


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for requirements in lists for line in requirements]


def test_every_line_is_one_exact_version() -> None:
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][0-9a-z.]*", line), line
    assert len(PINS) == len(LINES)


def test_everything_asked_for_is_pinned_within_its_range() -> None:
    for requirement in wanted():
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)], prereleases=True), (
            requirement
        )
    assert "hiredis" in PINS  # the extra of redis
    assert {"hatchling", "editables"} <= set(PINS)  # the project itself is installed without a download


def test_no_registry_and_no_path_of_a_machine() -> None:
    for name in ("requirements.lock", "pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(
            r"https?://|file://|--(extra-)?index-url|--find-links|/root|/home|/work", text
        ), name
