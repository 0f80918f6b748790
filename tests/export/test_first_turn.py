"""How far a sample runs for its first prompt, and when its sandbox is really started."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, TaskState, generate
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironment, sandbox, sandboxenv
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # private: the provider itself
from tests.functions import make_solver
from tests.packages import run

from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.episode.runner import _running
from inspect_tinker_plugin.export.rows import FirstTurns
from inspect_tinker_plugin.options import DatasetOptions

STARTED: list[str] = []


@sandboxenv(name="first_turn_counting")
class CountingSandbox(LocalSandboxEnvironment):
    """Inspect's local sandbox, noting that it was started."""

    @classmethod
    async def sample_init(cls, task_name: str, *args: Any) -> dict[str, SandboxEnvironment]:
        STARTED.append(task_name)
        return await super().sample_init(task_name, *args)


@pytest.fixture(autouse=True)
def forget() -> None:
    STARTED.clear()


@make_solver
async def quote_file(state: TaskState, generate: Generate, swallow: bool = False) -> TaskState:
    try:
        state.user_prompt.text = await sandbox().read_file("note.txt")
    except RuntimeError:
        if not swallow:
            raise
        state.user_prompt.text = "no sandbox here"
    return state


def sample(**fields: object) -> Sample:
    return Sample.model_validate({"id": 1, "input": "Go.", "files": {"note.txt": "hi"}, **fields})


async def first_text(task: Task, sample: Sample) -> str:
    turn = await FirstTurns(task).of(sample)
    return turn.request.messages[-1].text


async def test_an_agent_that_uses_its_sandbox_later_starts_none() -> None:
    task = Task(solver=react(tools=[bash()]), sandbox="first_turn_counting")
    turn = await FirstTurns(task).of(sample(setup="exit 1"))
    assert [tool.name for tool in turn.request.tools] == ["bash", "submit"]
    assert STARTED == []


async def test_nothing_is_said_of_the_configuration_of_a_sandbox_that_is_not_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread((tmp_path / "compose.yaml").write_text, "services: {}")
    boxed = ("docker", str(tmp_path / "compose.yaml"))
    task = Task(solver=react(tools=[bash()]), sandbox=boxed)
    await FirstTurns(task).of(sample())
    assert "specified for the eval" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("swallow", [False, True], ids=["raising", "swallowing"])
async def test_a_solver_that_reads_its_sandbox_first_gets_the_real_one(swallow: bool) -> None:
    task = Task(solver=[quote_file(swallow), generate()], sandbox="first_turn_counting")
    assert await first_text(task, sample()) == "hi"
    assert len(STARTED) == 1


async def test_a_task_setup_that_reads_the_sandbox_gets_the_real_one() -> None:
    task = Task(setup=quote_file(), solver=generate(), sandbox="first_turn_counting")
    assert await first_text(task, sample()) == "hi"


async def test_the_sandbox_of_a_sample_counts_too() -> None:
    task = Task(solver=[quote_file(), generate()])
    assert await first_text(task, sample(sandbox="first_turn_counting")) == "hi"
    plain = Task(solver=generate())
    assert await first_text(plain, sample(sandbox="first_turn_counting")) == "Go."
    assert len(STARTED) == 1


async def test_the_task_itself_is_left_as_it_is() -> None:
    task = Task(setup=quote_file(), solver=generate(), sandbox="first_turn_counting")
    setup = task.setup
    FirstTurns(task)
    assert task.setup is setup


@make_solver
async def waiting(state: TaskState, generate: Generate) -> TaskState:
    await asyncio.sleep(60)
    return await generate(state)


@make_solver
async def failing(state: TaskState, generate: Generate) -> TaskState:
    raise ValueError("two\nlines")


async def test_a_sample_that_takes_too_long_is_an_error() -> None:
    turns = FirstTurns(Task(solver=waiting()), DatasetOptions(time_limit=1))
    with pytest.raises(ExportError, match="a time limit ended it"):
        await turns.of(sample())


async def test_a_solver_that_fails_is_an_error_of_one_line() -> None:
    with pytest.raises(ExportError, match=r"^\[solver\] ValueError: two lines$"):
        await FirstTurns(Task(solver=failing())).of(sample())


# the fast path


@make_solver
async def both_at_once(state: TaskState, generate: Generate, ended: list[str]) -> TaskState:
    async def branch(name: str) -> TaskState:
        try:
            return await generate(state)
        finally:
            ended.append(name)

    await asyncio.gather(branch("first"), branch("second"), return_exceptions=True)
    return await generate(state)


@make_solver
async def stubborn(state: TaskState, generate: Generate, until: asyncio.Event) -> TaskState:
    try:
        return await generate(state)
    finally:
        with anyio.CancelScope(shield=True):
            await until.wait()


async def test_an_episode_ends_at_its_first_call() -> None:
    ended: list[str] = []
    released: list[str] = []

    async def cleanup(state: TaskState) -> None:
        released.append("yes")

    task = Task(solver=both_at_once(ended), cleanup=cleanup)
    turn = await FirstTurns(task).of(sample())
    assert (turn.request.index, turn.request.messages[-1].text) == (0, "Go.")
    assert ended[0] == "first"  # the second may not have begun
    assert released == ["yes"]
    assert not _running


async def test_a_solver_that_does_not_end_does_not_hold_the_export_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.runner.CLOSE_GRACE", 0)
    allowed = asyncio.Event()
    turns = FirstTurns(Task(solver=stubborn(allowed)), DatasetOptions(stop_timeout=0.05))
    assert (await turns.of(sample())).request.messages[-1].text == "Go."
    assert "it was closed 0 s ago and still runs" in caplog.text
    allowed.set()
    await asyncio.gather(*_running)


@pytest.mark.slow
def test_an_export_loads_no_provider_that_it_does_not_ask(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from inspect_ai import Task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.solver import generate\n"
        "from inspect_tinker_plugin.export.rows import FirstTurns\n"
        "turns = FirstTurns(Task(solver=generate()))\n"
        "asyncio.run(turns.of(Sample(id=1, input='?')))\n"
        "names = ('inspect_ai.model._openai_responses', 'openai', 'anthropic')\n"
        "print([name for name in names if name in sys.modules])\n"
    )
    assert run(sys.executable, "-W", "ignore", "-c", code).splitlines()[-1] == "[]"
