"""The sandbox of a fault campaign: a folder, in its own module.

A failure is attributed to a sandbox when its provider's module is in the traceback.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from inspect_ai.util import ExecResult, SandboxEnvironment, sandboxenv
from tests.faults.campaign.plan import Point, strike_here

PROVIDER = "rl_faults"
"""Its name, also that of the judge's model provider."""


@sandboxenv(name=PROVIDER)
class Folder(SandboxEnvironment):
    """A folder, which must be removed in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="rl-faults-")

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        await strike_here(Point.SANDBOX_START)
        return {"default": cls()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            environment.as_type(Folder).folder.cleanup()
        await strike_here(Point.SANDBOX_RELEASE)

    async def exec(self, cmd: list[str], *args: Any, **kwargs: Any) -> ExecResult[str]:
        if cmd[0] != "cat":  # what Inspect looks for before a solver begins
            return ExecResult(False, 1, "", "")
        await strike_here(Point.SANDBOX_EXEC)
        return ExecResult(True, 0, (Path(self.folder.name) / cmd[1]).read_text(), "")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await strike_here(Point.SANDBOX_WRITE)
        data = contents.encode() if isinstance(contents, str) else contents
        (Path(self.folder.name) / file).write_bytes(data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        raise FileNotFoundError(file)
