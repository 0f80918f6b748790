"""A sandbox provider: a folder on this machine for each sample. It protects nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal, overload

from inspect_ai.util import (
    ExecResult,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentSpec,
    sandboxenv,
    subprocess,
)


def here(spec: SandboxEnvironmentSpec) -> SandboxEnvironmentSpec:
    """Replace whatever a task or a sample asks for."""
    return SandboxEnvironmentSpec("newname")


@sandboxenv(name="newname")
class NewnameSandbox(SandboxEnvironment):
    """Commands run in a temporary folder, as the user who trains."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="newname-"))

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        return {"default": cls()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            shutil.rmtree(environment.as_type(NewnameSandbox).folder, ignore_errors=True)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
        truncate: bool = True,
    ) -> ExecResult[str]:
        return await subprocess(
            cmd, input=input, cwd=self.folder / (cwd or ""), env=env or {}, timeout=timeout
        )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        contents = (self.folder / file).read_bytes()
        return contents.decode() if text else contents
