"""How many files of this package a tool call passes, from sampled tokens to its result."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from tests.functions import make_tool
from tests.rl.policies import END, encode, renderer, tool_call

import inspect_tinker_plugin
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

PACKAGE = Path(inspect_tinker_plugin.__file__).parent
passed: set[str] = set()


def _note(frame: FrameType, event: str, arg: object) -> None:
    file = Path(frame.f_code.co_filename)
    if file.is_relative_to(PACKAGE):
        passed.add(str(file.relative_to(PACKAGE)))


@make_tool
async def ends_the_profile() -> str:
    """Do nothing."""
    sys.setprofile(None)
    return "done"


async def test_a_tool_call_passes_few_files() -> None:
    task = Task(
        [Sample("?", id=1, target="x")],
        solver=[use_tools(ends_the_profile()), generate()],
        scorer=includes(),
    )
    [builder] = as_rl_dataset(task, renderer()).get_batch(0)
    [env] = await builder.make_envs()
    await env.initial_observation()
    call = encode(tool_call("ends_the_profile", "{}") + END)
    await env.step(call)  # sets up what is used from then on
    sys.setprofile(_note)
    try:
        await env.step(call)
    finally:
        sys.setprofile(None)
    await builder.cleanup()
    assert len(passed) <= 18, sorted(passed)  # 17 alone; a warning or a lock passes one more
