"""Faults on a real engine: the right typed error, nothing left, and the next episode works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.util import OutputLimitExceededError
from tests.inspect_docker_pool.conftest import prewarm
from tests.waiting import until

from inspect_docker_pool import executor
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.errors import (
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
)
from inspect_docker_pool.manager import PoolManager, close_all

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True)
async def _recovers(open_sandbox: Any) -> AsyncIterator[None]:
    """After every fault: the next episode works and no task of this one is left."""
    before = asyncio.all_tasks()
    yield
    again = await open_sandbox()
    assert (await again.exec(["echo", "works"])).stdout == "works\n"
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


async def test_a_container_that_is_killed_during_a_command_ends_in_a_typed_error(
    sandbox: DockerPoolSandboxEnvironment, manager: PoolManager
) -> None:
    command = asyncio.create_task(sandbox.exec(["sleep", "60"]))
    await asyncio.sleep(0.5)
    manager.engine.api.kill(sandbox.container.id)
    with pytest.raises(SandboxDiedError) as caught:
        await command
    assert caught.value.container == sandbox.container.id
    for attempt in (
        sandbox.exec(["true"]),
        sandbox.write_file("a", "b"),
        sandbox.read_file("a"),
    ):
        with pytest.raises(SandboxDiedError):
            await attempt


async def test_a_container_that_somebody_pauses_is_no_fault_of_what_is_inside(
    sandbox: DockerPoolSandboxEnvironment, manager: PoolManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_SILENCE_SECONDS", 1.0)
    manager.engine.api.pause(sandbox.container.id)
    for attempt in (sandbox.exec(["true"], timeout=600), sandbox.read_file("/etc/hostname")):
        with pytest.raises(SandboxEngineError, match="paused"):
            await attempt


async def test_output_of_100_mb_is_cut_and_its_command_killed(
    sandbox: DockerPoolSandboxEnvironment,
) -> None:
    with pytest.raises(OutputLimitExceededError) as caught:
        await sandbox.exec(["head", "-c", "100000000", "/dev/zero"])
    assert len(caught.value.truncated_output or "") == 10 * 1024**2
    assert "head" not in (await sandbox.exec(["ps", "-e", "-o", "comm="])).stdout


async def test_a_fork_bomb_ends_with_its_timeout(open_sandbox: Any) -> None:
    sandbox = await open_sandbox(pids=64)
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    with pytest.raises((TimeoutError, SandboxDiedError)) as caught:
        await sandbox.exec(["python3", "-c", bomb], timeout=2)
    if isinstance(caught.value, TimeoutError):
        assert (await sandbox.exec(["echo", "alive"])).stdout == "alive\n"


async def test_a_missing_image_is_named() -> None:
    config = DockerPoolConfig(image="inspect-rl-test/missing:1")
    with pytest.raises(SandboxImageError, match="inspect-rl-test/missing:1"):
        await DockerPoolSandboxEnvironment.task_init("test", config)


async def test_failed_builds_show_their_output_and_leave_no_connections(
    tmp_path: Path, image: str
) -> None:
    def connections() -> int:
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        return found

    async def build(number: int) -> None:
        dockerfile = tmp_path / f"{number}.Dockerfile"
        dockerfile.write_text(f"FROM {image}\nRUN echo the reason {number} && false\n")
        with pytest.raises(SandboxImageError, match=f"the reason {number}"):
            await DockerPoolSandboxEnvironment.task_init("test", str(dockerfile))

    await build(0)
    before = connections()
    for number in range(1, 9):
        await build(number)
    assert connections() < before + 4  # a thread that builds may keep one


async def test_a_container_that_does_not_come_up_says_what_it_said(open_sandbox: Any) -> None:
    with pytest.raises(SandboxError, match="no-such-folder"):
        await open_sandbox(working_dir="/etc/passwd/no-such-folder")
    with pytest.raises(SandboxError):
        await open_sandbox(user="nobody-here")


async def test_an_engine_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
        with pytest.raises(SandboxEngineError, match="nowhere"):
            await DockerPoolSandboxEnvironment.task_init("test", DockerPoolConfig(image="x"))


@pytest.mark.slow
async def test_a_thousand_cancellations_leave_nothing(image: str, manager: PoolManager) -> None:
    config = DockerPoolConfig(image=image, warm=4, max=8)
    spec = DockerPoolSandboxEnvironment
    finished = 0

    async def episode() -> None:
        nonlocal finished
        environments = await spec.sample_init("test", config, {})
        try:
            (sandbox,) = environments.values()
            await sandbox.write_file("a/b", "text")
            assert (await sandbox.exec(["cat", "a/b"])).stdout == "text"
            await sandbox.exec(["sleep", "0.05"])
            assert await sandbox.read_file("a/b") == "text"
            finished += 1
        finally:
            await spec.sample_cleanup("test", config, environments, True)

    chance = random.Random(7)
    gate = asyncio.Semaphore(16)

    async def cancelled(number: int) -> None:
        async with gate:
            task = asyncio.create_task(episode())
            if number % 50 == 0:  # let some through, however slow the machine is
                await task
            await asyncio.sleep(chance.random() * 0.4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if task.done() and not task.cancelled():
                assert task.exception() is None

    await prewarm(config, 4)
    await asyncio.gather(*(cancelled(number) for number in range(1000)))
    (pool,) = [pool for pool in manager.pools() if pool.config.pool.max == 8]
    await until(lambda: pool.state.leased == pool.state.waiting == pool.state.removing == 0, 30)
    assert finished >= 20


_OWNER = """
import asyncio, sys
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment as Env
from inspect_docker_pool.manager import pool_manager

async def main():
    config = DockerPoolConfig(image=sys.argv[1], warm=2, command=sys.argv[2].split())
    environments = await Env.sample_init("test", config, {})
    print(pool_manager().owner.id, flush=True)
    await environments["default"].exec(["sleep", "600"])

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def _owner(
    image: str, *, program: str = _OWNER, command: str = "tail -f /dev/null", **options: Any
) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that has containers, and wait until it has told the id of their owner."""
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, image, command],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        assert process.stdout is not None
        yield process, (await asyncio.to_thread(process.stdout.readline)).strip()


async def _owner_that_ends(image: str, program: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, image, "tail -f /dev/null"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


async def test_what_a_killed_process_left_is_reaped_by_the_next(
    image: str, left_behind: Any, manager: PoolManager
) -> None:
    async with _owner(image) as (killed, owner):
        alive = await DockerPoolSandboxEnvironment.sample_init(
            "test", DockerPoolConfig(image=image, warm=0), {}
        )
        assert left_behind(owner), "a living owner's containers are not touched"
        manager.reap()
        assert left_behind(owner)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    manager.reap()
    assert left_behind(owner) == []
    assert (await alive["default"].exec(["echo", "mine"])).stdout == "mine\n"
    await DockerPoolSandboxEnvironment.sample_cleanup("test", None, alive, False)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param("tail -f /dev/null", signal.SIGKILL, id="executor-SIGKILL"),
        pytest.param("sleep 600 600", signal.SIGTERM, id="own-SIGTERM"),
        pytest.param(
            "tail -f /dev/null", signal.SIGTERM, id="executor-SIGTERM", marks=pytest.mark.nightly
        ),
        pytest.param("sleep 600 600", signal.SIGKILL, id="own-SIGKILL", marks=pytest.mark.nightly),
    ],
)
async def test_what_a_killed_process_left_is_removed_without_another_process(
    image: str, command: str, number: signal.Signals, left_behind: Any
) -> None:
    async with _owner(image, command=command, start_new_session=True) as (killed, owner):
        os.killpg(killed.pid, number)
        assert await asyncio.to_thread(killed.wait, 60) == -number
    await until(lambda: left_behind(owner) == [], 30)


def _children_of(process: int) -> list[int]:
    threads = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


@pytest.mark.nightly
async def test_what_asks_all_processes_to_end_does_not_end_the_watch(
    image: str, left_behind: Any
) -> None:
    async with _owner(image) as (ended, owner):
        children = _children_of(ended.pid)
        for process in [*children, ended.pid]:
            os.kill(process, signal.SIGTERM)
        await asyncio.to_thread(ended.wait, 60)
    assert len(children) == 1
    await until(lambda: left_behind(owner) == [], 30)


async def test_the_interpreters_exit_releases_all(image: str, left_behind: Any) -> None:
    program = _OWNER.replace('await environments["default"].exec(["sleep", "600"])', "return")
    done = await _owner_that_ends(image, program)
    assert done.stderr == ""
    assert left_behind(done.stdout.strip()) == []


async def test_a_sandbox_is_dropped_under_the_pools_own_lock(manager: PoolManager) -> None:
    """As by a garbage collection in a thread that holds it."""
    environments: Any = await DockerPoolSandboxEnvironment.sample_init(
        "test", DockerPoolConfig(image="inspect-rl-test/python:1", warm=0), {}
    )
    (pool,) = manager.pools()

    def drop() -> None:
        with pool._lock:
            environments.clear()

    dropping = threading.Thread(target=drop, daemon=True)
    dropping.start()
    await asyncio.to_thread(dropping.join, 30)
    assert not dropping.is_alive()
    await until(lambda: pool.state.leased == pool.state.removing == 0)


# The SDK leaves a socket to the garbage collector whenever the engine does not answer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestEngineRestart:
    """On a separate engine, so that nobody else's containers are stopped."""

    async def test_mid_episode_ends_in_a_typed_error_and_the_next_works(
        self, private_engine: Any, image: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = DockerPoolConfig(image=image, warm=1)
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", private_engine.address)
            environments = await DockerPoolSandboxEnvironment.sample_init("test", config, {})
            command = asyncio.create_task(environments["default"].exec(["sleep", "60"]))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(private_engine.restart)
            with pytest.raises((SandboxDiedError, SandboxEngineError)):
                await command
            with pytest.raises(SandboxDiedError):
                await environments["default"].exec(["true"])
            await DockerPoolSandboxEnvironment.sample_cleanup("test", config, environments, False)
            again = await _retry(config)
            assert (await again["default"].exec(["echo", "on"])).stdout == "on\n"
            await DockerPoolSandboxEnvironment.sample_cleanup("test", config, again, False)
            close_all()
            assert private_engine.containers() == []


async def _retry(config: DockerPoolConfig) -> Any:
    for _ in range(60):
        try:
            return await DockerPoolSandboxEnvironment.sample_init("test", config, {})
        except SandboxError as ex:
            last = ex
            time.sleep(0.5)  # noqa: ASYNC251
    raise last


@pytest.mark.nightly
async def test_containers_that_are_kept_on_purpose_outlive_the_process(
    image: str, left_behind: Any, manager: PoolManager
) -> None:
    program = _OWNER.replace(
        'await environments["default"].exec(["sleep", "600"])',
        'await Env.task_cleanup("test", config, False); print(environments["default"]'
        ".container.name)",
    )
    done = await _owner_that_ends(image, program)
    owner, name = done.stdout.split()
    try:
        assert "was left running" in done.stderr
        manager.reap()
        assert left_behind(owner) == [f"/{name}"]
        await asyncio.sleep(0.5)
        assert manager.engine.api.inspect_container(name)["State"]["Running"]
    finally:
        await DockerPoolSandboxEnvironment.cli_cleanup(name)
    assert left_behind(owner) == []
