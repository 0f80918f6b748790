"""Checks, when a dataset is built, that its renderer fits the tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from inspect_ai.dataset import Sample
from inspect_ai.tool import ToolInfo

from inspect_tinker_plugin.contracts.episodes import SolverLike, TurnRequest
from inspect_tinker_plugin.contracts.errors import RendererError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.tokens.dataset_renderer import DatasetRenderer

T = TypeVar("T")

_PATIENCE_S = 30.0


def can_describe_tools(context: DatasetRenderer) -> bool:
    """Return whether a renderer has a tool format at all."""
    try:
        context.check_tools([ToolInfo(name="probe", description="Is there a tool format?")])
    except RendererError:
        return False
    return True


def refuse_tools(
    runner: EpisodeRunner, solver: SolverLike | None, renderer: Any, sample: Sample
) -> None:
    """Raise if a sample offers tools: it is run to its first model call, without a sandbox.

    Which tools a solver offers is known only by running it. A solver that fails before its
    first model call is left to its episodes, which raise the same error.

    Args:
        runner: Runs the dataset's episodes.
        solver: Replacement of the task's solver, if there is one.
        renderer: A renderer without a tool format.
        sample: The first sample.

    Raises:
        RendererError: The sample offers tools.
    """
    prepared = runner.prepared
    probing = EpisodeRunner(prepared.task, options=prepared.options, solver=solver, sandbox=False)
    request = _run_apart(lambda: _first_call(probing, sample))
    if request is not None and request.tools:
        names = ", ".join(tool.name for tool in request.tools)
        raise RendererError(
            f"task {prepared.name!r} offers tools ({names}), and the renderer "
            f"{type(renderer).__name__} has no tool format; choose one that has, "
            "e.g. get_renderer('qwen3', tokenizer)"
        )


async def _first_call(runner: EpisodeRunner, sample: Sample) -> TurnRequest | None:
    episode = runner.episode(sample)
    try:
        outcome = await asyncio.wait_for(episode.start(), timeout=_PATIENCE_S)
        return outcome if isinstance(outcome, TurnRequest) else None
    except TimeoutError:
        return None
    finally:
        await episode.close()


def _run_apart(make: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end, whether or not the caller is inside an event loop."""
    box: list[T] = []

    async def run() -> None:
        box.append(await make())

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="first model call")
    thread.start()
    thread.join()
    if not box:
        raise RuntimeError("the first sample could not be run to its first model call")
    return box[0]
