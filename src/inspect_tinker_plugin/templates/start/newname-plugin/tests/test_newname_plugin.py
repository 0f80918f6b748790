"""Each part in real episodes; only the model is a script."""

from __future__ import annotations

import asyncio

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import sandbox

from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.testing import call, play_episode, run_tool_calls, say


def test_a_long_answer_earns_less() -> None:
    task = Task(dataset=[Sample(input="2 + 2?", target="4")], scorer=includes())
    for answer, value in (("4", 1.0), ("It is 4, I am sure.", 4 / 6)):
        result = asyncio.run(play_episode(task, [answer]))
        reward = asyncio.run(resolve_reward("newname_brief(words=4)")(result))
        assert reward.value == value


@tool
def double() -> Tool:
    async def execute(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    return execute


def test_a_repeated_call_is_refused() -> None:
    calls = [call("double", number=number) for number in (1, 2, 1)]
    shown = asyncio.run(run_tool_calls("newname_once", [double()], *calls))
    assert [message.text for message in shown[:2]] == ["2", "4"]
    assert shown[2].error is not None


@tool
def read_notes() -> Tool:
    async def execute() -> str:
        """Read the notes, and say where they are."""
        done = await sandbox().exec(["sh", "-c", "cat notes/a.txt && pwd"])
        return done.stdout

    return execute


def test_a_sample_has_a_folder_of_its_own_with_its_files() -> None:
    sample = Sample(input="Read it.", target="hello", files={"notes/a.txt": "hello"})
    task = Task(
        dataset=[sample],
        solver=[use_tools(read_notes()), generate()],
        scorer=includes(),
        sandbox="docker",
    )
    script = [say("", call("read_notes")), "hello"]
    result = asyncio.run(play_episode(task, script, sandbox="newname_here"))
    assert result.error is None, result.error
    assert result.score_values() == {"includes": "C"}
    shown = result.state.messages[-2].text
    assert shown.startswith("hello")
    assert "newname-" in shown
