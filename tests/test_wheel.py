"""The built wheel in a clean environment, with the lock and without, outside of the repository."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.packages import run

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PIP = ["-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    run(sys.executable, *PIP, *built)
    [found] = folder.glob("*.whl")
    return found


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
    with_lock: bool, wheel: Path, tmp_path: Path
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
    run(python, *PIP, "install", "-q", *lock, torch, wheel)
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
    assert version in wheel.name
    assert file.startswith(str(tmp_path))
