"""The locked set-up matches the project's requirements, and names public files only."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.packages import run

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "uv.lock").read_text(encoding="utf-8")
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("linux", "darwin")


def declared() -> list[Requirement]:
    project = PROJECT["project"]
    # What cannot be installed together with the rest is in uv.lock only.
    extras = [
        text
        for name, each in project["optional-dependencies"].items()
        if name != "verifiers"
        for text in each
    ]
    building = PROJECT["build-system"]["requires"]
    return [Requirement(text) for text in [*project["dependencies"], *extras, *building]]


def holds(marker: Marker | None, python: str, platform: str) -> bool:
    there = {"python_version": python, "python_full_version": f"{python}.7"}
    return marker is None or marker.evaluate({**there, "sys_platform": platform})


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_one_version_of_each_distribution(python: str, platform: str) -> None:
    names = [
        canonicalize_name(each.name) for each in CONSTRAINTS if holds(each.marker, python, platform)
    ]
    assert len(names) == len(set(names))
    assert not {canonicalize_name(each.name) for each in declared()} - set(names)


def test_locked_versions_are_in_the_declared_ranges() -> None:
    locked = {
        (canonicalize_name(each.name), specifier.version)
        for each in CONSTRAINTS
        for specifier in each.specifier
    }
    wrong = [
        (name, version, str(wanted.specifier))
        for wanted in declared()
        for name, version in locked
        if name == canonicalize_name(wanted.name) and version not in wanted.specifier
    ]
    assert not wrong


def test_every_constraint_is_one_exact_version() -> None:
    exact = re.compile(r"==[^,*]+")
    assert not [str(each) for each in CONSTRAINTS if not exact.fullmatch(str(each.specifier))]


def test_the_lock_names_the_public_index_only() -> None:
    hosts = set(re.findall(r"[a-z+]+://([^/\"]+)", LOCK))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}
    assert "file:" not in LOCK


def test_every_file_of_the_lock_has_a_hash() -> None:
    files = re.findall(r"\{ url = [^}]*\}", LOCK)
    assert len(files) > 1000
    assert not [each for each in files if not re.search(r'hash = "sha256:[0-9a-f]{64}"', each)]


@pytest.fixture(scope="module")
def update_lock() -> ModuleType:
    path = ROOT / "scripts" / "update_lock.py"
    spec = importlib.util.spec_from_file_location("update_lock", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_constraints_are_what_the_lock_says(update_lock: ModuleType) -> None:
    assert (ROOT / "constraints.txt").read_text(encoding="utf-8") == update_lock.written_from_lock()


def test_an_update_says_what_came_went_and_changed(update_lock: ModuleType) -> None:
    before = {"kept": ["1"], "gone": ["2"], "moved": ["1.0"], "forked": ["1"]}
    after = {"kept": ["1"], "new": ["3"], "moved": ["1.1"], "forked": ["1", "2"]}
    said = [" ".join(line.split()) for line in update_lock.changes(before, after)]
    assert said == ["forked 1 -> 1 / 2", "gone 2 -> -", "moved 1.0 -> 1.1", "new - -> 3"]


def test_uv_can_install_from_the_lock() -> None:
    """As far as it goes without downloads: which files it would take."""
    from uv import find_uv_bin

    options = ("--frozen", "--no-config", "--extra", "dev", "--quiet")
    shown = run(find_uv_bin(), "export", *options, cwd=ROOT)
    assert "inspect-ai==" in shown
    assert "--hash=sha256:" in shown


def test_the_torch_of_the_lock_is_the_one_that_set_up_installs() -> None:
    options = ("-s", "--no-print-directory", "-n", "setup")
    variables = ("VENV=/nonexistent/venv", "EXTRAS=dev", "LATEST=")
    shown = run("make", *options, *variables, cwd=ROOT)
    [torch] = [str(each.specifier) for each in CONSTRAINTS if each.name == "torch"]
    what = f"-c constraints.txt --no-build-isolation torch{torch} -e '.[dev]'"
    assert f"-m uv pip install -q --python /nonexistent/venv/bin/python {what}" in shown
    assert f"install -qq --no-compile {what}" in shown, "where uv fails"
