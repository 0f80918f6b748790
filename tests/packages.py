"""Packages of tests: third-party ones that are written into a folder, and those of extras."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest


def install(folder: Path, name: str, code: str, *, version: str = "1.0", entry: str = "") -> None:
    """Write a module and its distribution's metadata into a folder that is on the path.

    Args:
        folder: where to, like a ``site-packages``.
        name: name of the module, and of the entry point; the distribution has it with dashes.
        code: source of the module.
        version: version of the distribution.
        entry: value of the entry point; the module when not given.
    """
    folder.joinpath(f"{name}.py").write_text(dedent(code))
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    dashed = name.replace("_", "-")
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {dashed}\nVersion: {version}\n"
    )
    info.joinpath("entry_points.txt").write_text(
        f"[inspect_tinker_plugin]\n{name} = {entry or name}\n"
    )


def require_agent_clients() -> None:
    """Skip a module whose tests need the clients of model APIs (the extra ``agents``)."""
    for name in ("anthropic", "inspect_swe", "openai"):  # each takes seconds to import
        if find_spec(name) is None:
            pytest.skip(f"{name} is missing: the extra `agents`", allow_module_level=True)


def run(
    *command: str | Path,
    cwd: Path | None = None,
    path: Path | None = None,
    version: str | None = None,
    code: int = 0,
) -> str:
    """Run a program that has to end as expected, and return what it prints.

    Args:
        command: the program and its arguments.
        cwd: the folder that it runs in.
        path: a folder of packages that comes before the installed ones.
        version: what is built is this release, whatever the last tag is.
        code: its exit code.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    if version is not None:
        environment["SETUPTOOLS_SCM_PRETEND_VERSION"] = version
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


COMPILERS = {"amd64": "x86_64-linux-gnu-gcc", "arm64": "aarch64-linux-gnu-gcc"}
"""The compilers of programs that the package ships, by architecture."""


def built(native: Path, file: str) -> bytes:
    """Build a program, which ends in its architecture, in a copy of its folder.

    The test is skipped where the release of the compiler is not the one that built what is shipped.
    """
    name = COMPILERS[file.rpartition("-")[2]]
    compiler = shutil.which(name) or pytest.skip(f"needs {name}")
    version = run(compiler, "-dumpversion").strip()
    if version != "12":
        pytest.skip(f"was built with GCC 12, here is {version}")
    run("make", "-B", "-C", native, file)
    return (native / file).read_bytes()
