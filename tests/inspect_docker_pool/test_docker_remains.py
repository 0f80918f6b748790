"""Nothing remains of what an engine did not answer, a leader left, or a forked child inherited."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.inspect_docker_pool.conftest import SilentEngine
from tests.waiting import until

from inspect_docker_pool import DockerPoolConfig, SandboxEngineError
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.manager import PoolManager, close_all, pool_manager

pytestmark = [
    pytest.mark.docker,
    # The SDK leaves a socket to the garbage collector whenever the engine does not answer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Env = DockerPoolSandboxEnvironment
Owned = Callable[[str], list[str]]

_PROJECT = """
services:
  default: {image: inspect-rl-test/python:1, command: tail -f /dev/null}
  web: {image: inspect-rl-test/python:1, command: tail -f /dev/null, volumes: ["data:/data"]}
volumes: {data: {}}
x-docker-pool: {warm: 0}
"""


@pytest.mark.parametrize("what", [b"/containers/create", b"/networks/create", b"/volumes/create"])
async def test_what_the_engine_made_without_an_answer_is_removed(
    silent_engine: SilentEngine,
    compose_plugin: None,
    left_behind: Owned,
    tmp_path: Path,
    what: bytes,
) -> None:
    (tmp_path / "compose.yaml").write_text(_PROJECT)
    silent_engine.loses = lambda request: what in request
    owner = pool_manager().owner.id
    with pytest.raises(SandboxEngineError, match="does not answer"):
        await Env.sample_init("test", str(tmp_path / "compose.yaml"), {})
    silent_engine.loses = lambda request: False
    await asyncio.to_thread(close_all)
    assert left_behind(owner) == []


async def test_what_could_not_be_removed_is_removed_when_the_engine_answers(
    silent_engine: SilentEngine, left_behind: Owned, image: str
) -> None:
    config = DockerPoolConfig(image=image, warm=0)
    sandboxes = await Env.sample_init("test", config, {})
    owner = pool_manager().owner.id
    refused: list[bytes] = []

    def refuse(request: bytes) -> bool:
        if request.startswith(b"DELETE"):
            refused.append(request)
        return request.startswith(b"DELETE")

    silent_engine.refuses = refuse
    await Env.sample_cleanup("test", None, sandboxes, False)
    await until(lambda: len(refused) > 2)
    assert left_behind(owner)
    silent_engine.refuses = lambda request: False
    await until(lambda: left_behind(owner) == [])


# The SDK leaves a socket to the garbage collector whenever the engine does not answer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_release_while_the_engine_is_away_keeps_no_place(
    silent_engine: SilentEngine, image: str
) -> None:
    config = DockerPoolConfig(image=image, warm=0, max=1)
    sandboxes = await Env.sample_init("test", config, {})
    silent_engine.close()
    await Env.sample_cleanup("test", None, sandboxes, False)
    (pool,) = pool_manager().pools()
    await until(lambda: pool.state.removing == 0)
    silent_engine.start()
    again = await Env.sample_init("test", config, {})
    assert (await again["default"].exec(["echo", "on"])).stdout == "on\n"
    await Env.sample_cleanup("test", None, again, False)


async def _set_up(config: DockerPoolConfig) -> dict[str, Any]:
    with Env.share_setup({}, b"echo made > /made") as shared:
        sandboxes = await Env.sample_init("test", config, {})
        await sandboxes["default"].exec(["sh", "-c", "echo made > /made"])
    await shared.finish()
    return sandboxes


async def test_a_snapshot_that_the_engine_does_not_answer_is_none(
    silent_engine: SilentEngine, image: str
) -> None:
    silent_engine.refuses = lambda request: b"/json?size=" in request
    sandboxes = await _set_up(DockerPoolConfig(image=image, warm=0, snapshot="always"))
    assert (await sandboxes["default"].exec(["cat", "/made"])).stdout == "made\n"
    await Env.sample_cleanup("test", None, sandboxes, False)


async def test_ports_that_the_engine_does_not_tell_are_no_connection(
    silent_engine: SilentEngine, compose_plugin: None, tmp_path: Path
) -> None:
    (tmp_path / "compose.yaml").write_text(
        "services: {default: {image: inspect-rl-test/python:1, command: tail -f /dev/null, "
        "ports: ['80'], network_mode: bridge}}"
    )
    sandboxes = await Env.sample_init("test", str(tmp_path / "compose.yaml"), {})
    asked: list[bytes] = []

    def refuse(request: bytes) -> bool:
        if b"/json " in request and b"/containers/inspect-pool" not in request:
            asked.append(request)
        return len(asked) == 2  # the first asks whether it runs

    silent_engine.refuses = refuse
    with pytest.raises(ConnectionError, match="not running"):
        await sandboxes["default"].connection()
    assert len(asked) >= 2
    silent_engine.refuses = lambda request: False
    await Env.sample_cleanup("test", None, sandboxes, False)


async def test_a_leader_that_is_cancelled_in_its_snapshot_leaves_no_image(
    manager: PoolManager, left_behind: Owned, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    loop, make = asyncio.get_running_loop(), manager.snapshots._make

    def slowly(part: Any) -> Any:
        made = make(part)
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.5)
        return made

    monkeypatch.setattr(manager.snapshots, "_make", slowly)
    leader = asyncio.create_task(_set_up(DockerPoolConfig(image=image, warm=0, snapshot="always")))
    await begun.wait()
    leader.cancel()
    await asyncio.gather(leader, return_exceptions=True)
    del leader

    def has_left_nothing() -> bool:
        gc.collect()  # what the commit's thread held until it ended
        return left_behind(manager.owner.id) == []

    await until(has_left_nothing)


async def test_a_snapshot_that_is_dropped_in_use_goes_with_its_successors(
    manager: PoolManager, left_behind: Owned, image: str
) -> None:
    config = DockerPoolConfig(image=image, warm=0, snapshot="always")
    first = [await _set_up(config) for _ in range(2)]
    with contextlib.suppress(ValueError), Env.share_setup({}, b"echo made > /made"):
        await Env.sample_init("test", config, {})
        raise ValueError("a file cannot be written")
    gc.collect()
    second = [await _set_up(config) for _ in range(2)]
    for sandboxes in (*first, *second):
        await Env.sample_cleanup("test", None, sandboxes, False)
    await asyncio.to_thread(close_all)
    assert left_behind(manager.owner.id) == []


_FORK = """
import asyncio, os, sys, time
from inspect_docker_pool import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment as Env

async def main():
    config = DockerPoolConfig(image="inspect-rl-test/python:1", warm=0)
    sandboxes = await Env.sample_init("test", config, {})
    child = os.fork()
    if child == 0:
        sandboxes["default"].release()
        time.sleep(2)
        os._exit(0)
    os.waitpid(child, 0)
    print((await sandboxes["default"].exec(["echo", "here"])).stdout)

asyncio.run(main())
"""


@pytest.mark.nightly
def test_a_forked_child_does_not_release_its_parents_sandbox() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert parent.stdout.strip() == "here", parent.stderr
