"""A tool executor: a call that an episode repeats is refused."""

from __future__ import annotations

from dataclasses import dataclass

from inspect_ai.tool import ToolError, ToolResult

from inspect_tinker_plugin.plugins import ToolInvocation


@dataclass(frozen=True)
class Once:
    """Carries out a call the first time in an episode; the model is told about a repetition."""

    async def __call__(self, invocation: ToolInvocation) -> ToolResult:
        key = (self, invocation.tool, str(sorted(invocation.call.arguments.items())))
        if key in invocation.scope.episode:
            raise ToolError("You have called this before, with the same arguments.")
        invocation.scope.episode[key] = True
        return await invocation.run()
