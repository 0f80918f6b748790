"""The distributions of a release: what is in them, and the wheel in a clean environment.

The wheel is built from the source distribution, as a release builds it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.packages import run

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PIP = ["-m", "pip", "--disable-pip-version-check"]


VERSION = "0.1.0"
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
print({"sdist": build_sdist, "wheel": build_wheel}[sys.argv[1]](sys.argv[2]))
"""
MEGABYTE = 1024 * 1024


@dataclass(frozen=True)
class Distributions:
    """Both distributions of one version."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("dist")

    def build(kind: str, source: Path) -> Path:
        args = ["-W", "ignore", "-c", BUILD, kind, str(folder)]
        return folder / run(sys.executable, *args, cwd=source, version=VERSION).split()[-1]

    sdist = build("sdist", ROOT)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Distributions(sdist, build("wheel", folder / sdist.name.removesuffix(".tar.gz")))


@pytest.mark.slow
def test_a_release_has_the_packages_and_small_files(built: Distributions) -> None:
    assert built.sdist.name == f"inspect_tinker_plugin-{VERSION}.tar.gz"
    assert built.wheel.name == f"inspect_tinker_plugin-{VERSION}-py3-none-any.whl"
    assert built.wheel.stat().st_size < MEGABYTE
    assert built.sdist.stat().st_size < 2.5 * MEGABYTE
    files = set(zipfile.ZipFile(built.wheel).namelist())
    packages = {path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()}
    about = f"inspect_tinker_plugin-{VERSION}.dist-info"
    [start_up] = (name for name in files if name.endswith(".pth"))
    assert {name.partition("/")[0] for name in files} == {*packages, about, start_up}
    assert b"InspectRLFinder" in zipfile.ZipFile(built.wheel).read(start_up)
    tracked = run("git", "ls-files", "src", cwd=ROOT).split()
    assert {name.removeprefix("src/") for name in tracked} <= files


def locked() -> dict[str, str]:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in wanted
        if each.marker is None or each.marker.evaluate()
    }


def installed(python: Path) -> dict[str, str]:
    listed = json.loads(run(python, *PIP, "list", "--format", "json"))
    own = {"inspect-tinker-plugin", "pip", "setuptools"}
    return {
        name: each["version"].partition("+")[0]  # the CPU build of PyTorch says so there
        for each in listed
        if (name := canonicalize_name(each["name"])) not in own
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("with_lock", [True, False], ids=["with the lock", "without it"])
def test_the_wheel_works_in_a_clean_environment(
    with_lock: bool, built: Distributions, tmp_path: Path
) -> None:
    try:
        run(sys.executable, *PIP, "download", "-q", "--no-deps", "-d", tmp_path, "sniffio")
    except AssertionError as error:
        pytest.skip(f"needs an index of packages: {error}")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    torch = f"torch=={locked()['torch']}"
    run(python, *PIP, "install", "-q", *shlex.split(os.environ.get("TORCH_ARGS", "")), torch)
    lock = ["-c", str(CONSTRAINTS)] if with_lock else []
    run(python, *PIP, "install", "-q", *lock, torch, built.wheel)
    if with_lock:
        expected = locked()
        found = installed(python)
        assert found == {name: expected.get(name) for name in found}

    work = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "example_tasks", work)
    inspect = tmp_path / "env" / "bin" / "inspect"
    run(inspect, "rl", "export", "word_problems.py", "--output", "out", cwd=work)
    assert list((work / "out").rglob("*.parquet"))
    script = "scripts/log_search.jsonl"
    shown = run(inspect, "rl", "rollout", "log_search.py", "--script", script, cwd=work)
    assert "completed" in shown
    where = "import inspect_tinker_plugin as p; print(p.__version__, p.__file__)"
    version, file = run(python, "-c", where, cwd=work).split()
    assert version == VERSION
    assert file.startswith(str(tmp_path))
