"""Programs that are shipped: committed builds match the sources."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from inspect_docker_pool import container
from inspect_docker_pool.errors import SandboxConfigError

NATIVE = Path(container.__file__).parent / "native"
COMPILERS = {"amd64": "x86_64-linux-gnu-gcc", "arm64": "aarch64-linux-gnu-gcc"}


@pytest.mark.parametrize("architecture", COMPILERS)
def test_a_shipped_program_is_what_its_source_builds(architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which(COMPILERS[architecture])
    if compiler is None:
        pytest.skip(f"needs {COMPILERS[architecture]}")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True)
    if version.stdout.strip() != "12":
        pytest.skip(f"was built with GCC 12, here is {version.stdout.strip()}")
    native = shutil.copytree(NATIVE, tmp_path / "native")
    file = f"executor-{architecture}"
    subprocess.run(["make", "-B", "-C", native, file], check=True, capture_output=True)
    assert (native / file).read_bytes() == (NATIVE / file).read_bytes()


def test_an_image_without_a_program_for_it_is_refused() -> None:
    for architecture in COMPILERS:
        assert container.pack_program(architecture, "/")
    with pytest.raises(SandboxConfigError, match="not riscv64"):
        container.pack_program("riscv64", "/")
