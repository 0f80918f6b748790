"""A sandbox provider that counts its sandboxes and takes a moment for every operation."""

from __future__ import annotations

import asyncio
from typing import Any

from inspect_ai.util import ExecResult, SandboxEnvironment, sandboxenv

PROVIDER = "rl_counted"
PAUSE = 0.002

alive: set[int] = set()
releases: list[tuple[int, bool]] = []
"""What was released, in order, with Inspect's ``interrupted``."""
found: list[str] = []
"""Folders and environment values that one-time set-up saw."""


@sandboxenv(name=PROVIDER)
class Counted(SandboxEnvironment):
    """A sandbox that is only a number; files with ``bad`` in their name cannot be written."""

    made = 0

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        Counted.made += 1
        number = Counted.made
        alive.add(number)
        await asyncio.sleep(PAUSE)
        return {"default": cls(number)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        await asyncio.sleep(PAUSE)
        for environment in environments.values():
            number = environment.as_type(Counted).number
            releases.append((number, interrupted))
            alive.discard(number)

    async def exec(self, cmd: list[str], *args: Any, **kwargs: Any) -> ExecResult[str]:
        await asyncio.sleep(PAUSE)
        return ExecResult(True, 0, "", "")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        await asyncio.sleep(PAUSE)
        if "bad" in file:
            raise PermissionError(file)

    async def read_file(self, file: str, text: bool = True) -> Any:
        raise FileNotFoundError(file)
