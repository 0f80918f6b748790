"""The default script: what the scripted policy says when a task has no script of its own."""

from __future__ import annotations

from collections.abc import Callable

from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.tool import ToolInfo

from inspect_tinker_plugin.episode.types import TurnRequest
from inspect_tinker_plugin.scripted.replies import ScriptExhausted, say, submit

MOST_TURNS = 30
"""An episode with more turns is not going to end by itself."""


def default_script(sample: Sample) -> Callable[[TurnRequest], ModelOutput | Exception]:
    """Think first, then answer with the sample's target.

    The first reply is text, so that an agent's way to continue is seen. After it the ``submit``
    tool is called wherever it is offered; other tools are left alone.
    """
    target = sample.target if isinstance(sample.target, str) else ", ".join(sample.target)

    def answer(request: TurnRequest) -> ModelOutput | Exception:
        if request.index >= MOST_TURNS:
            return ScriptExhausted(
                f"the task asked {MOST_TURNS} times and did not end; give it a script or a limit"
            )
        if request.index > 0 and any(_is_submit(tool) for tool in request.tools):
            return submit(target)
        return say(f"I think so.\n\nANSWER: {target}")

    return answer


def _is_submit(tool: ToolInfo) -> bool:
    return tool.name == "submit" and list(tool.parameters.properties) == ["answer"]
