"""Commands that run beside a solver end and speak as Inspect's, in an episode without polling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from inspect_ai import eval_async
from inspect_ai.event import SandboxEvent
from inspect_ai.log import transcript
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import (
    ExecCompleted,
    ExecRemoteAwaitableOptions,
    ExecRemoteStreamingOptions,
    ExecStderr,
    ExecStdout,
    SandboxEnvironment,
    sandbox,
)
from tests.agents.sandboxed import plum, task_of
from tests.functions import make_solver
from tests.tokens.conversations import play_out

from inspect_tinker_plugin.testing.replies import scripted_model

Use = Callable[[SandboxEnvironment], Awaitable[Any]]
KINDS = [
    pytest.param("local", id="local"),
    pytest.param("docker_pool", id="docker_pool", marks=pytest.mark.docker),
    pytest.param("docker", id="docker", marks=[pytest.mark.docker, pytest.mark.nightly]),
]
each_kind = pytest.mark.parametrize("kind", KINDS)


@make_solver
async def using(state: TaskState, generate: Generate, use: Use, seen: list[Any]) -> TaskState:
    seen.append(await use(sandbox()))
    return state


async def used(kind: str, folder: Path, use: Use) -> Any:
    """Use the sandbox of an episode; polling takes five seconds at least."""
    seen: list[Any] = []
    result = await play_out(task_of(kind, folder, using(use, seen)), plum)
    assert result.error is None, result.error.__cause__
    return seen[0]


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "its output": ("echo out; echo err >&2", {}),
    "its status": ("echo broken; exit 3", {}),
    "a signal": ("kill -9 $$", {}),
    "no such program": ("exec nonsense-program", {}),
    "its input": ("cat", {"input": "given\nlines"}),
    "no input": ("cat; echo end", {}),
    "its environment": ("echo $GIVEN-$HOME", {"env": {"GIVEN": "a b 'c'"}}),
    "its folder": ("pwd", {"cwd": "/usr"}),
    "characters in pieces": ("printf '\\303'; sleep 0.3; printf '\\244\\303'", {}),
}


@pytest.mark.nightly  # Inspect's own way polls every five seconds
@each_kind
async def test_a_command_is_as_in_an_eval(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        results = {}
        for name, (text, options) in RUNS.items():
            given = ExecRemoteAwaitableOptions(**options)
            result = await box.exec_remote(sh(text), given, stream=False)
            stderr = result.stderr.strip().rpartition(": ")[2]  # shells name themselves
            results[name] = (result.success, result.returncode, result.stdout, stderr)
        return results

    ours = await used(kind, tmp_path, use)
    seen: list[Any] = []
    task = task_of(kind, tmp_path, using(use, seen))
    (log,) = await eval_async(task, model=scripted_model([]), log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert ours == seen[0]


@each_kind
async def test_output_and_end_come_as_events(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        process = await box.exec_remote(sh("echo one; sleep 0.5; echo two >&2; exit 4"))
        events = [event async for event in process]
        recorded = [each for each in transcript().events if isinstance(each, SandboxEvent)]
        return events, recorded[-1].cmd

    events, recorded = await used(kind, tmp_path, use)
    assert events == [
        ExecStdout(data="one\n"),
        ExecStderr(data="two\n"),
        ExecCompleted(exit_code=4),
    ]
    assert "echo one" in recorded


@each_kind
async def test_a_conversation_by_standard_input(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        options = ExecRemoteStreamingOptions(input="first\n", stdin_open=True)
        process = await box.exec_remote(["cat"], options)
        said = ""
        async for event in process:
            if isinstance(event, ExecStdout):
                said += event.data
            if said == "first\n":
                await process.write_stdin("second\n")
            if said.endswith("second\n"):
                await process.close_stdin()
                await process.close_stdin()
        with pytest.raises(RuntimeError, match="terminated"):
            await process.write_stdin("late")
        without = await box.exec_remote(["cat"])
        with pytest.raises(RuntimeError, match="stdin_open"):
            await without.write_stdin("x")
        assert [event async for event in without] == [ExecCompleted(exit_code=0)]
        return said

    assert await used(kind, tmp_path, use) == "first\nsecond\n"


async def running(box: SandboxEnvironment, mark: str) -> bool:
    pattern = f"{mark[:-1]}[{mark[-1]}]"  # does not match the command that looks
    return bool((await box.exec(sh(f"grep -ls '{pattern}' /proc/[0-9]*/cmdline"))).stdout)


async def gone(look: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(30):
        while await look():  # noqa: ASYNC110 - another process has no event
            await anyio.sleep(0.1)


@each_kind
async def test_killing_ends_it_its_children_and_the_iteration(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        process = await box.exec_remote(sh("sleep 61357 & echo up; wait"))
        events, up = [], anyio.Event()

        async def listen() -> None:
            async for event in process:
                events.append(event)
                up.set()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await up.wait()
                await process.kill()
                await process.kill()
            await gone(lambda: running(box, "61357"))
        return events

    assert await used(kind, tmp_path, use) == [ExecStdout(data="up\n")]


@each_kind
async def test_output_that_was_not_read_outlives_a_kill(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        process = await box.exec_remote(sh("echo up; echo bad >&2; touch said; sleep 61361"))

        async def silent() -> bool:
            return not (await box.exec(["test", "-e", "said"])).success

        await gone(silent)
        await process.kill()
        return [event async for event in process]

    events = await used(kind, tmp_path, use)
    assert events == [ExecStdout(data="up\n"), ExecStderr(data="bad\n")]


@pytest.mark.docker
async def test_what_was_killed_in_the_pool_has_ended(tmp_path: Path) -> None:
    large = "import time; held = bytearray(400 << 20); print('up', flush=True); time.sleep(61360)"

    async def use(box: SandboxEnvironment) -> Any:
        left = []
        for _ in range(3):
            process = await box.exec_remote(["python3", "-c", large])
            assert await anext(process) == ExecStdout(data="up\n")
            await process.kill()
            left.append(await running(box, "61360"))
        return left

    assert await used("docker_pool", tmp_path, use) == [False] * 3


@each_kind
async def test_a_timeout_ends_it_and_raises(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        options = ExecRemoteAwaitableOptions(timeout=0.5)
        with pytest.raises(TimeoutError):
            await box.exec_remote(sh("sleep 61358 & wait"), options, stream=False)
        await gone(lambda: running(box, "61358"))

    await used(kind, tmp_path, use)


@each_kind
async def test_the_last_of_much_output_is_kept(kind: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        text = "head -c 12000000 /dev/zero | tr '\\0' x; echo end"
        return await box.exec_remote(sh(text), stream=False)

    result = await used(kind, tmp_path, use)
    assert result.success
    assert len(result.stdout) == 10 * 1024**2
    assert result.stdout.endswith("xend\n")


@pytest.mark.parametrize("then", ["wait", "exit", "kill -9 $$"])
async def test_nothing_outlives_an_episode_on_this_machine(then: str, tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        command = await box.exec_remote(sh(f"sleep 61359 & {then}"))
        if then != "wait":
            assert isinstance([event async for event in command][-1], ExecCompleted)

    async def runs() -> bool:
        found = psutil.process_iter(["cmdline"])
        return any("61359" in (each.info["cmdline"] or ()) for each in found)

    await used("local", tmp_path, use)
    await gone(runs)


async def test_a_child_that_keeps_the_output_open_does_not_delay_the_end(tmp_path: Path) -> None:
    async def use(box: SandboxEnvironment) -> Any:
        return await box.exec_remote(sh("sleep 100 & echo done"), stream=False)

    with anyio.fail_after(60):
        assert (await used("local", tmp_path, use)).stdout == "done\n"
