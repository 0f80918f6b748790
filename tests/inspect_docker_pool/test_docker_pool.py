"""Pools on a real engine: one container per episode, warm, fair, bounded, in any event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, TaskState
from inspect_ai.tool import bash_session, text_editor
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from tests.functions import make_solver
from tests.inspect_docker_pool.conftest import prewarm, take
from tests.waiting import until

from inspect_docker_pool import process_metrics, record_sandbox_metrics
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.lease import Lease, remove_owned
from inspect_docker_pool.manager import PoolManager, pool_manager

pytestmark = pytest.mark.docker
Env = DockerPoolSandboxEnvironment


async def test_every_episode_gets_a_living_container_that_nobody_used(
    image: str, manager: PoolManager
) -> None:
    config = DockerPoolConfig(image=image, warm=2)
    await prewarm(config, 2)
    remove_owned(manager.engine, manager.owner.id)
    seen = set()
    for _ in range(6):
        taken = await take(config)
        seen.add(taken.container.id)
        assert not (await taken.exec(["test", "-e", "/root/used"])).success
        await taken.write_file("/root/used", "")
        taken.release()
    assert len(seen) == 6


async def test_warm_containers_are_hits_and_are_replaced(image: str, manager: PoolManager) -> None:
    config = DockerPoolConfig(image=image, warm=1)
    await prewarm(config, 3)
    (pool,) = manager.pools()
    assert pool.state.idle == 3
    with record_sandbox_metrics() as metrics:
        taken = [await take(config) for _ in range(3)]
        await taken[0].exec(["true"])
    assert metrics.snapshot()["sandbox/warm_hits"] == 3
    assert metrics.snapshot()["sandbox/execs"] == 1
    assert metrics.snapshot()["sandbox/acquire_s"] > 0
    assert process_metrics()["sandbox/started"] >= 3
    await until(lambda: pool.state.idle == 1)
    for one in taken:
        one.release()
    await until(lambda: pool.state.leased == pool.state.removing == 0)


@pytest.mark.parametrize("known", [True, False], ids=["known-image", "first-use"])
async def test_the_maximum_holds_and_waiting_is_fair(
    image: str, manager: PoolManager, tmp_path: Path, known: bool
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nRUN sleep 1 && echo {tmp_path} > /x\n")
    config = DockerPoolConfig(file=str(tmp_path / "Dockerfile"), warm=0, max=2)
    if known:
        await Env.task_init("test", config)
    order: list[int] = []
    highest = 0

    async def episode(number: int) -> None:
        nonlocal highest
        taken = await take(config)
        order.append(number)
        (pool,) = manager.pools()
        highest = max(highest, pool.state.leased)
        await asyncio.sleep(0.1)
        taken.release()

    tasks = []
    for number in range(8):
        tasks.append(asyncio.create_task(episode(number)))
        await asyncio.sleep(0.3 if number in (2, 4) else 0.01)
    await asyncio.gather(*tasks)
    assert order == list(range(8))
    assert highest <= 2


async def test_a_pool_serves_several_event_loops(image: str, manager: PoolManager) -> None:
    config = DockerPoolConfig(image=image, warm=1, max=2)
    outputs: list[str] = []

    async def episode(number: int) -> None:
        taken = await take(config)
        outputs.append((await taken.exec(["echo", str(number)])).stdout)
        taken.release()

    async def several(first: int) -> None:
        await asyncio.gather(*(episode(first + i) for i in range(3)))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(several(3 * n))) for n in range(3)]
    for thread in threads:
        thread.start()
    await several(9)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert sorted(outputs, key=int) == [f"{n}\n" for n in range(12)]


async def test_failed_starts_back_off_and_reach_the_caller(
    image: str, manager: PoolManager
) -> None:
    config = DockerPoolConfig(image=image, warm=2, working_dir="/etc/passwd/x")
    before = time.monotonic()
    with pytest.raises(Exception, match="passwd"):
        await take(config)
    await asyncio.sleep(1)
    (pool,) = manager.pools()
    assert 1 <= pool.state.failures <= 2 + (time.monotonic() - before)


async def test_an_unused_pool_lets_its_containers_go(
    image: str, manager: PoolManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prewarm(DockerPoolConfig(image=image, warm=1), 2)
    monkeypatch.setattr("inspect_docker_pool.pool.IDLE_SECONDS", 0.5)
    (pool,) = manager.pools()
    await until(lambda: pool.state.idle == pool.state.removing == 0)


async def test_what_an_owner_on_another_host_left_is_removed_when_all_of_it_has_ended(
    image: str, manager: PoolManager, left_behind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = manager.engine.api
    foreign = Lease("f0reign0wner", "another-boot/pid:[1]", 1, "1")
    command = ["sh", "-c", "trap exit TERM; while :; do sleep 0.1; done"]
    try:
        container = api.create_container(image, command, labels=foreign.labels())["Id"]
        api.create_network("f0reign0wner", labels=foreign.labels())
        manager.reap()
        assert len(left_behind(foreign.id)) == 2, "what was just made may be in use"
        monkeypatch.setattr("inspect_docker_pool.lease.REMAINS_SECONDS", 0)
        api.start(container)
        manager.reap()
        assert len(left_behind(foreign.id)) == 2, "it runs"
        api.stop(container)
        # The engine's list may be behind for a moment.
        await until(lambda: manager.reap() == 1)
        assert left_behind(foreign.id) == []
    finally:
        remove_owned(manager.engine, foreign.id)


async def test_cleanup_by_name_takes_only_what_is_named(
    open_sandbox: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = await open_sandbox(), await open_sandbox()
    await Env.cli_cleanup(None)
    assert "0 containers" in capsys.readouterr().out
    await Env.cli_cleanup(first.container.name)
    assert "1 container " in capsys.readouterr().out
    assert (await second.exec(["echo", "on"])).stdout == "on\n"


async def test_the_connection_can_be_used(open_sandbox: Any) -> None:
    taken = await open_sandbox()
    connection = await taken.connection()
    assert connection.container == taken.container.name
    assert connection.command.startswith(f"docker exec -it {taken.container.name} ")
    taken.release()
    with pytest.raises(ConnectionError, match="given back"):
        await taken.connection()


@make_solver
async def _uses_tools(state: TaskState, generate: Generate) -> TaskState:
    seen: dict[str, Any] = {}
    seen["file"] = await sandbox().read_file("given.txt")
    seen["setup"] = await sandbox().read_file("/tmp/setup")
    edit, session = text_editor(), bash_session()
    await edit(command="create", path="/tmp/made", file_text="by the editor\n")
    seen["editor"] = (await sandbox().exec(["cat", "/tmp/made"])).stdout
    seen["session"] = str(await session(action="type_submit", input="echo se''ssion"))
    remote = await sandbox().exec_remote(["echo", "remote"], stream=False)
    seen["remote"] = remote.stdout
    state.store.set("seen", seen)
    return state


@pytest.mark.slow
async def test_inspect_runs_a_task_with_its_tools(
    image: str, manager: PoolManager, tmp_path: Path
) -> None:
    task = Task(
        dataset=[Sample("x", files={"given.txt": "given"}, setup="echo did > /tmp/setup")],
        solver=_uses_tools(),
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=image, warm=0)),
    )
    (log,) = await eval_async(task, model="none/none", log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert log.samples is not None
    seen = log.samples[0].store["seen"]
    assert (seen["file"], seen["setup"]) == ("given", "did\n")
    assert (seen["editor"], seen["remote"]) == ("by the editor\n", "remote\n")
    assert "session" in seen["session"]
    (pool,) = pool_manager().pools()
    await until(lambda: pool.state.leased == pool.state.removing == 0)
