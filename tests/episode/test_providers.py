"""Sandboxes in one process: places, one-time set-up, and separate surroundings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Score, Scorer, Target, accuracy, match, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.util import ExecResult, SandboxEnvironmentSpec, sandbox, subprocess
from tests.episode import sandbox_folder
from tests.episode.sandbox_folder import Counted
from tests.functions import make_solver
from tests.waiting import until

from inspect_docker_pool.config import DockerPoolConfig
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import Cause, SandboxError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.episode.sandbox import InSurroundings, sandbox_places, surroundings
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.processes.loops import Places


async def test_surroundings_are_changed_only_while_the_work_itself_runs(tmp_path: Path) -> None:
    here, seen = os.getcwd(), []

    async def work() -> str:
        for _ in range(3):
            seen.append((os.getcwd(), os.environ.get("RL_TEST")))
            await asyncio.sleep(0)
        try:
            await asyncio.sleep(3600)
        except TimeoutError:
            raise AssertionError from None
        except asyncio.CancelledError:
            seen.append((os.getcwd(), os.environ.get("RL_TEST")))
            return "done"
        return "never"

    async def run() -> str:
        return await InSurroundings(work(), str(tmp_path), {"RL_TEST": "1"})

    task = asyncio.create_task(run())
    for _ in range(6):
        await asyncio.sleep(0)
        assert (os.getcwd(), os.environ.get("RL_TEST")) == (here, None)
    task.cancel()
    assert await task == "done"
    assert seen == [(str(tmp_path), "1")] * 4
    assert (os.getcwd(), os.environ.get("RL_TEST")) == (here, None)


async def test_surroundings_are_those_of_one_thread_at_a_time(tmp_path: Path) -> None:
    def another_may_change_them() -> bool:
        may = surroundings.acquire(blocking=False)
        if may:
            surroundings.release()
        return may

    async def work() -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(another_may_change_them).result()

    assert another_may_change_them()
    assert not await InSurroundings(work(), str(tmp_path), {})
    assert another_may_change_them()


async def test_bounds_of_several_datasets_do_not_add_up() -> None:
    places = Places()
    most = 0

    async def hold(bound: int) -> None:
        nonlocal most
        async with places.place(bound):
            assert places.alive <= max(bound, 3)
            most = max(most, places.alive)
            await asyncio.sleep(0.001)

    async with asyncio.timeout(60):
        await asyncio.gather(*[hold(bound) for bound in (3, 2, 3, 1, 2, 3, 3, 1, 2) * 3])
    assert most == 3
    assert places.alive == 0


async def test_a_narrow_bound_waits_until_fewer_are_alive_whoever_they_are() -> None:
    places = Places()
    async with places.place(None), places.place(5):
        narrow = asyncio.create_task(_hold_place(places, 1))
        await asyncio.sleep(0.01)
        assert not narrow.done()
    async with asyncio.timeout(60):
        await narrow


async def _hold_place(places: Places, bound: int) -> None:
    async with places.place(bound):
        pass


async def test_a_cancelled_narrow_waiter_lets_the_wider_ones_pass() -> None:
    places = Places()
    async with places.place(2):
        narrow = asyncio.create_task(_hold_place(places, 1))
        await asyncio.sleep(0)
        wide = asyncio.create_task(_hold_place(places, 2))
        await asyncio.sleep(0)
        narrow.cancel()
        async with asyncio.timeout(60):
            await wide


@pytest.fixture
def preparing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    async def task_init(task_name: str, config: Any) -> None:
        calls.append(task_name)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Counted, "task_init", task_init)
    monkeypatch.setattr("inspect_tinker_plugin.episode.sandbox._lifecycle", None)
    return calls


def boxed(options: EpisodeOptions | None = None, **sample: Any) -> EpisodeRunner:
    samples = [Sample(id=1, input="?", target="!", **sample)]
    box = sandbox_folder.PROVIDER
    task = Task(dataset=samples, solver=generate(), scorer=match(), sandbox=box)
    return EpisodeRunner(task, options=options)


async def test_a_cancelled_first_comer_does_not_end_the_set_up_for_others(
    preparing: list[str],
) -> None:
    runner = boxed()
    first, second = (runner.episode(runner.task.dataset[0]) for _ in range(2))
    starting = [asyncio.create_task(episode.start()) for episode in (first, second)]
    await asyncio.sleep(0.02)
    await first.close()
    async with asyncio.timeout(60):
        await starting[1]
    await second.close()
    assert preparing == ["startup"]
    await asyncio.gather(starting[0], return_exceptions=True)


@pytest.mark.parametrize("steps", [1, 3, 5])
async def test_a_set_up_that_nobody_waits_for_ends_and_the_next_one_begins_anew(
    preparing: list[str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def start_a_command(task_name: str, config: Any) -> None:
        preparing.append(task_name)
        begun.set()
        program = ["sleep", "0.05" if len(preparing) > 1 else "600"]
        command = await asyncio.create_subprocess_exec(*program, stdout=PIPE, stderr=PIPE)
        try:
            await command.wait()
        finally:
            if command.returncode is None:
                command.kill()
                await command.wait()

    monkeypatch.setattr(Counted, "task_init", start_a_command)
    runner = boxed()
    first, second = (runner.episode(runner.task.dataset[0]) for _ in range(2))
    starting = asyncio.create_task(first.start())
    await begun.wait()
    for _ in range(steps):  # while asyncio connects the command's pipes, among others
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await first.close()
        ours = {asyncio.current_task(), starting}
        assert asyncio.all_tasks() <= ours  # a loop that ends cancels all, asyncio's own too
        await second.start()
        await second.close()
    assert preparing == ["startup", "startup"]
    await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.parametrize("when", ["file fails", "set-up script", "start", "solver"])
async def test_a_sandbox_is_released_once_and_not_as_interrupted(when: str) -> None:
    sandbox_folder.releases.clear()
    runner = boxed(
        files={"bad" if when == "file fails" else "good": "x"},
        setup="true" if when == "set-up script" else None,
    )
    episode = runner.episode(runner.task.dataset[0])
    starting = asyncio.create_task(episode.start())
    if when == "file fails":
        await starting
        result = await episode.stop("it has failed already")
        assert result.error is not None
        assert result.error.cause is Cause.SANDBOX
    else:
        pauses = {"start": 0.5, "set-up script": 1.5, "solver": 50}[when]
        await asyncio.sleep(sandbox_folder.PAUSE * pauses)
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(sandbox_folder.PAUSE / 2)
        closing.cancel()
        starting.cancel()
        await episode.close()
    await asyncio.gather(starting, return_exceptions=True)
    assert [interrupted for _, interrupted in sandbox_folder.releases] == [False]
    assert not sandbox_folder.alive
    assert sandbox_places(sandbox_folder.PROVIDER).alive == 0


@pytest.mark.parametrize("stubborn", [False, True], ids=["can be cancelled", "cannot"])
async def test_a_release_that_hangs_fails_the_episode_and_gives_its_place_back(
    stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.sandbox.RELEASE_GRACE", 0.1)
    end = asyncio.Event()

    async def hang(*_: Any) -> None:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                if not stubborn:
                    raise

    monkeypatch.setattr(Counted, "sample_cleanup", hang)
    runner = boxed(EpisodeOptions(max_sandboxes=1, stop_timeout=0.2))
    for _ in range(3):
        episode = runner.episode(runner.task.dataset[0])
        async with asyncio.timeout(60):
            assert isinstance(await episode.start(), TurnRequest)
            result = await episode.reply(ModelOutput.from_content("rl/policy", "!"))
        assert isinstance(result, EpisodeResult)
        assert result.error is not None
        assert result.error.cause is Cause.SANDBOX
        assert "not released within 0.2 s" in str(result.error)
    assert sandbox_places(sandbox_folder.PROVIDER).alive == 0
    end.set()
    sandbox_folder.alive.clear()


@pytest.mark.parametrize("then", ["true", "exit 1", "sleep 61390"], ids=["runs", "fails", "cut"])
async def test_no_set_up_script_is_left_on_this_machine(then: str, tmp_path: Path) -> None:
    told = tmp_path / "where"
    sample = Sample(id=1, input="?", target="!", setup=f"#!/bin/sh\necho $0 > {told}\n{then}\n")
    task = Task(dataset=[sample], solver=generate(), scorer=match(), sandbox="local")
    episode = EpisodeRunner(task).episode(sample)
    starting = asyncio.create_task(episode.start())
    async with asyncio.timeout(60):
        while not told.exists() or not told.read_text().strip():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if not then.startswith("sleep"):
            await starting
        await episode.close()
        await asyncio.gather(starting, return_exceptions=True)
    script = Path(told.read_text().strip())
    assert script.parent == Path("/tmp")
    assert not script.exists()  # noqa: ASYNC240
    await ended("61390")


def runs(mark: str) -> bool:
    found = psutil.process_iter(["cmdline"])
    return any(mark in (each.info["cmdline"] or ()) for each in found)


async def ended(*marks: str) -> None:
    await until(lambda: not any(map(runs, marks)))


async def run(**task: Any) -> EpisodeResult:
    """Run an episode that does not ask the policy."""
    sample = Sample(id=1, input="?", target="!")
    async with asyncio.timeout(120):
        result = await EpisodeRunner(Task(dataset=[sample], **task)).episode(sample).start()
    assert isinstance(result, EpisodeResult)
    return result


@make_solver
async def starts_processes(state: TaskState, generate: Generate, seen: dict[str, Any]) -> TaskState:
    """Have a command cut off by its time-out, and leave others behind."""
    box = sandbox()
    with pytest.raises(TimeoutError):
        await box.exec(["sh", "-c", "trap '' TERM; sleep 61391 & sleep 61392; true"], timeout=1)
    seen["cut off"] = runs("61391")
    await box.exec(["sh", "-c", "sleep 61393 >/dev/null 2>&1 &"])
    await until(lambda: runs("61393"))
    return state


async def test_a_local_command_ends_in_time_and_its_children_with_the_episode() -> None:
    seen: dict[str, Any] = {}
    result = await run(solver=starts_processes(seen), sandbox="local")
    assert result.error is None
    assert seen["cut off"] is False, "what is cut off ends with its children"
    await ended("61391", "61392", "61393")


@make_solver
async def leaves_commands(
    state: TaskState, generate: Generate, how: str, mark: str, made: list[asyncio.Task[Any]]
) -> TaskState:
    """End while commands are running, or being ended, in tasks that nobody waits for."""
    box = sandbox()
    # The shell does not heed the signal by which Inspect ends a command.
    stubborn = f"trap '' TERM; for i in 1 2 3 4; do sleep {mark}; done"
    commands = [box.exec(["sleep", mark]), box.exec(["sh", "-c", stubborn])]
    made.extend(asyncio.create_task(command) for command in commands)
    await asyncio.sleep(0.5)
    if how == "gathered":  # which goes on as soon as one of them has ended
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*made), 0.5)
    return state


@pytest.mark.parametrize("how", ["left", "gathered"])
@pytest.mark.parametrize(
    "provider",
    [
        "local",
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("docker_pool", marks=pytest.mark.docker),
    ],
)
async def test_no_command_outlives_its_episode(provider: str, how: str, tmp_path: Path) -> None:
    compose = tmp_path / "compose.yaml"
    compose.write_text(
        "services:\n  default:\n    image: inspect-rl-test/python:1\n    x-local: true\n"
        "    init: true\n    command: tail -f /dev/null\n    network_mode: none\n"
    )
    sandboxes: dict[str, Any] = {
        "local": "local",
        "docker": ("docker", str(compose)),
        "docker_pool": SandboxEnvironmentSpec(
            "docker_pool", DockerPoolConfig(image="inspect-rl-test/python:1", warm=0)
        ),
    }
    mark = str(10**6 + uuid.uuid4().int % 10**9)
    made: list[asyncio.Task[Any]] = []
    before = asyncio.all_tasks()
    result = await run(solver=leaves_commands(how, mark, made), sandbox=sandboxes[provider])
    assert result.error is None
    assert [command.done() for command in made] == [True, True]
    for command in made:
        command.cancelled() or command.exception()
    assert {each for each in asyncio.all_tasks() - before if "sleep" in repr(each)} == set()
    await ended(mark)  # a process that was killed is there for a moment


@make_solver
async def leaves_orphans(
    state: TaskState, generate: Generate, mark: str, made: list[asyncio.Task[Any]]
) -> TaskState:
    """Use up Inspect's places for subprocesses with commands whose children survive them."""
    command = ["sh", "-c", f"sleep {mark} & wait"]
    places = range(os.cpu_count() or 1)
    made.extend(asyncio.create_task(sandbox().exec(command, cwd="/")) for _ in places)
    await until(lambda: runs(mark))
    return state


@pytest.mark.parametrize("provider", ["local", sandbox_folder.PROVIDER])
async def test_what_survives_a_command_does_not_hold_its_place(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin of ``docker`` does, if that is ended while it starts: it keeps the output open."""

    async def execute(box: Counted, cmd: list[str], *_: Any, **__: Any) -> ExecResult[str]:
        return await subprocess(cmd)

    async def end_them(*args: Any) -> None:
        await subprocess(["pkill", "-f", mark])
        sandbox_folder.alive.clear()

    mark = str(10**6 + uuid.uuid4().int % 10**9)
    monkeypatch.setattr("inspect_tinker_plugin.episode.boundaries.CANCEL_GRACE", 2.5)
    monkeypatch.setattr(Counted, "exec", execute)
    monkeypatch.setattr(Counted, "sample_cleanup", end_them)
    made: list[asyncio.Task[Any]] = []
    result = await run(solver=leaves_orphans(mark, made), sandbox=provider)
    await end_them()
    await ended(mark)
    assert result.error is None
    assert [command.done() for command in made] == [True] * len(made)
    for command in made:
        command.cancelled() or command.exception()


async def unwilling(box: Counted, cmd: list[str], *args: Any, **kwargs: Any) -> ExecResult[str]:
    """Run a command that goes on after its cancellation, or one that exits from this process."""
    if cmd[0] == "exit":
        sys.exit(3)
    end = time.monotonic() + float(cmd[1])
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)
    return ExecResult(True, 0, "", "")


@scorer(metrics=[accuracy()])
def runs_command(*command: str) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await sandbox().exec(list(command))
        return Score(value=1)

    return score


async def ended_by(scoring: Scorer) -> EpisodeResult:
    return await run(solver=[], scorer=scoring, sandbox=sandbox_folder.PROVIDER)


async def test_who_has_given_a_command_up_is_not_cancelled_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.boundaries.CANCEL_GRACE", 0.1)
    monkeypatch.setattr(Counted, "exec", unwilling)
    result = await ended_by(runs_command("sleep", "1"))
    assert result.error is None
    assert [each.score.value for each in result.scores.values()] == [1]


async def test_a_provider_that_exits_fails_the_episode_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counted, "exec", unwilling)
    result = await ended_by(runs_command("exit"))
    assert result.error is not None
    assert "SystemExit" in str(result.error)


@solver
def goes_on(how: str, mark: str, made: list[asyncio.Task[Any]]) -> Solver:
    """Leave a task that runs commands after the episode, in a folder that is still there then."""

    async def commands() -> None:
        if how == "begins late":
            await asyncio.sleep(1.0)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await sandbox().exec(["sleep", mark], cwd="/")

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        made.append(asyncio.create_task(commands()))
        await asyncio.sleep(0.2)
        return state

    return solve


@pytest.mark.parametrize("how", ["swallows cancellation", "begins late"])
async def test_no_command_begins_after_its_episode(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.boundaries.CANCEL_GRACE", 1.0)
    mark = str(10**6 + uuid.uuid4().int % 10**9)
    made: list[asyncio.Task[Any]] = []
    result = await run(solver=goes_on(how, mark, made), sandbox="local")
    await asyncio.wait(made, timeout=60)
    assert result.error is None
    assert isinstance(made[0].exception(), SandboxError)
    assert not runs(mark)
