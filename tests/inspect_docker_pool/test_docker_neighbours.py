"""Episodes are not slowed or harmed by builds, starts, a silent engine or hostile disks."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.inspect_docker_pool.conftest import SilentEngine, prewarm, take
from tests.waiting import until

from inspect_docker_pool import executor
from inspect_docker_pool import pool as pools
from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.context import process_metrics
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.errors import (
    SandboxConfigError,
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
)
from inspect_docker_pool.image import ImageBudget
from inspect_docker_pool.manager import PoolManager

pytestmark = pytest.mark.docker
Env = DockerPoolSandboxEnvironment


def _dockerfiles(folder: Path, image: str, count: int, run: str) -> list[str]:
    made = []
    for number in range(count):
        path = folder / str(number) / "Dockerfile"
        path.parent.mkdir()
        path.write_text(f"FROM {image}\nRUN {run} && echo {folder.name} {number} > /which\n")
        made.append(str(path))
    return made


@pytest.mark.nightly
async def test_running_episodes_do_not_wait_behind_builds(
    image: str, manager: PoolManager, open_sandbox: Any, tmp_path: Path
) -> None:
    running = await open_sandbox()
    await running.write_file("file", "text")
    builds = [
        asyncio.create_task(Env.task_init("test", path))
        for path in _dockerfiles(tmp_path, image, 20, "sleep 4")
    ]
    rounds = 0
    while not all(build.done() for build in builds):
        await running.exec(["true"])
        assert await running.read_file("file") == "text"
        rounds += 1
        await asyncio.sleep(0.05)
    await asyncio.gather(*builds)
    assert rounds > len(builds), "it did not wait for one build after the other"
    made = set(manager._images.budget._made)
    images = [one for one in manager.engine.api.images() if made & {*(one["RepoTags"] or [])}]
    ends = sorted(image["Created"] for image in images)
    assert len(ends) == len(builds)
    assert any(end - before < 4 for before, end in pairwise(ends)), "one after the other"


async def test_an_image_is_built_once_however_many_wait_for_it(
    image: str, open_sandbox: Any, tmp_path: Path
) -> None:
    unique = f"echo {time.time()}; cat /proc/sys/kernel/random/uuid > /id"
    (path,) = _dockerfiles(tmp_path, image, 1, unique)
    taken = await asyncio.gather(*(open_sandbox(path) for _ in range(4)))
    assert len({await one.read_file("/id") for one in taken}) == 1
    assert len({one.container.image.id for one in taken}) == 1


async def test_a_failed_build_reaches_all_who_wait_and_the_next_builds_again(
    image: str, open_sandbox: Any, tmp_path: Path
) -> None:
    (path,) = _dockerfiles(tmp_path, image, 1, "sleep 0.5; false")
    failed = await asyncio.gather(*(take(path) for _ in range(4)), return_exceptions=True)
    assert all(isinstance(error, SandboxImageError) for error in failed), failed
    (tmp_path / "0" / "Dockerfile").write_text(f"FROM {image}\nRUN echo {tmp_path} > /right\n")
    assert await (await open_sandbox(path)).read_file("/right") == f"{tmp_path}\n"


async def test_an_image_that_was_removed_meanwhile_is_built_again(
    image: str, manager: PoolManager, tmp_path: Path
) -> None:
    (path,) = _dockerfiles(tmp_path, image, 1, "true")
    config = DockerPoolConfig(file=path, warm=0)
    taken = await take(config)
    for joining in (1, 1, 6):
        built = taken.container.image.id
        taken.release()
        await until(lambda: all(pool.state.removing == 0 for pool in manager.pools()))
        manager.engine.api.remove_image(built, force=True)
        taken, *others = await asyncio.gather(*(take(config) for _ in range(joining)))
        assert (await taken.exec(["cat", "/which"])).success
        for other in others:
            other.release()
    taken.release()


async def test_images_stay_within_their_budget_and_what_goes_is_named(
    image: str,
    manager: PoolManager,
    open_sandbox: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    paths = _dockerfiles(tmp_path, image, 3, "head -c 20000000 /dev/urandom > /big")
    (base,) = manager.engine.api.images(name=image)
    configs = [DockerPoolConfig(file=p, warm=0, images=base["Size"] + 50_000_000) for p in paths]
    for config in configs:
        (await take(config)).release()
        await until(lambda: all(pool.state.removing == 0 for pool in manager.pools()))
    removed = [record.getMessage() for record in caplog.records if "removed image" in record.msg]
    assert len(removed) == 1, removed
    tags = {tag for one in manager.engine.api.images() for tag in one["RepoTags"] or []}
    assert image in tags
    assert not any(f"{tag} " in removed[0] for tag in tags)
    assert (await (await open_sandbox(configs[0])).read_file("/which")).endswith(" 0\n")


def test_builds_that_make_room_at_once_remove_an_image_once(
    image: str, manager: PoolManager, caplog: pytest.LogCaptureFixture
) -> None:
    budget, api = ImageBudget(manager.engine), manager.engine.api
    names = [f"inspect-budget/at-once:{number}" for number in range(3)]
    for name in names:
        api.tag(image, "inspect-budget/at-once", name.partition(":")[2])
        budget.add(name)
    budget.note_use(parse_config(DockerPoolConfig(image=image, images=0)))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(budget._remove_if_over, names * 4))
    assert not any(map(budget.counts, names))
    assert sum("removed image" in record.msg for record in caplog.records) == len(names)


async def test_a_rebuilt_image_leaves_nothing_behind(
    image: str, manager: PoolManager, tmp_path: Path
) -> None:
    (path,) = _dockerfiles(tmp_path, image, 1, "cat /proc/sys/kernel/random/uuid > /id")
    config = DockerPoolConfig(file=path, warm=0)
    taken = await take(config)
    in_use = taken.container.image.id
    made = {in_use}
    for number in range(3):
        text = f"FROM {image}\nRUN echo {tmp_path} {number} > /which\n"
        await asyncio.to_thread(Path(path).write_text, text)
        await Env.task_init("test", config)
        pool = manager.known(parse_config(config))
        assert pool is not None
        another = await pool.acquire()
        made.add(another.default.image.id)
        pool.release(another)
        await until(lambda: all(pool.state.removing == 0 for pool in manager.pools()))
    assert len(made) == 4
    left = {one["Id"] for one in manager.engine.api.images() if one["Id"] in made}
    assert len(left) == 2, "the newest, and the one that an episode uses"
    assert in_use in left
    assert (await taken.exec(["cat", "/id"])).success
    taken.release()


async def test_a_maximum_holds_whatever_was_configured_before(
    image: str, open_sandbox: Any
) -> None:
    for _ in range(2):
        await open_sandbox()
    highest = inside = 0
    two = asyncio.Barrier(2)  # however long the second container takes

    async def episode() -> None:
        nonlocal highest, inside
        taken = await take(DockerPoolConfig(image=image, warm=0, max=2))
        inside += 1
        highest = max(highest, inside)
        await two.wait()
        await asyncio.sleep(0.2)
        inside -= 1
        taken.release()

    await asyncio.gather(*(episode() for _ in range(6)))
    assert highest == 2
    for _ in range(2):
        await open_sandbox()


async def test_a_loop_that_was_closed_gets_no_container(image: str, manager: PoolManager) -> None:
    config = DockerPoolConfig(image=image, warm=0, max=1)
    first = await take(config)

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(take(config))
        loop.run_until_complete(asyncio.sleep(0.1))
        waiting._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        abandoned.append(waiting)

    abandoned: list[Any] = []
    await asyncio.to_thread(abandon)
    waiting = asyncio.create_task(take(config))
    await asyncio.sleep(0.1)
    first.release()
    (await asyncio.wait_for(waiting, 60)).release()


async def test_containers_with_networks_of_their_own_wait_for_one(
    image: str, manager: PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "NETWORKS", 1)
    path = tmp_path / "compose.yaml"
    path.write_text(
        f"services: {{default: {{image: {image}, networks: [own, more], command: sleep 9d}}}}\n"
        "networks: {own: {internal: true}, more: {internal: true}}\nx-docker-pool: {warm: 0}\n"
    )
    first = await take(str(path))
    assert (await first.exec(["ls", "/sys/class/net"])).stdout.split() == ["eth0", "eth1", "lo"]
    (pool,) = manager.pools()
    waiting = asyncio.create_task(take(str(path)))
    await until(lambda: pool.state.waiting == 1)
    assert pool.state.starting == 0
    first.release()
    (await asyncio.wait_for(waiting, 60)).release()


async def test_configurations_with_networks_take_turns(
    image: str, manager: PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "NETWORKS", 2)
    paths = [tmp_path / f"{name}.yaml" for name in ("ctf", "web", "own")]
    for path in paths:
        path.write_text(
            f"services: {{default: {{image: {image}, networks: [own], command: sleep 9d, hostname:"
            f" {path.stem}}}}}\nnetworks: {{own: {{internal: true}}}}\nx-docker-pool: {{warm: 1}}\n"
        )
    most, order = 0, []

    async def run(path: Path) -> None:
        nonlocal most
        sandbox = await take(str(path))
        order.append((await sandbox.exec(["hostname"])).stdout.strip())
        most = max(most, sum(map(len, (p.projects_in_use() for p in manager.pools()))))
        sandbox.release()

    await prewarm(str(paths[0]), 2)  # as many as there are networks
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        for path in (*paths[:1] * 9, *paths[1:]):
            tasks.create_task(run(path))
    assert most <= 2
    assert {"web", "own"} < set(order[:9]), "no configuration waits until another has finished"


@pytest.mark.parametrize("known", [True, False], ids=["known-image", "first-use"])
async def test_cancelled_callers_start_no_containers(
    image: str, manager: PoolManager, known: bool
) -> None:
    config = DockerPoolConfig(image=image, warm=0)
    if known:
        await Env.task_init("test", config)
    before = process_metrics().get("sandbox/started", 0)
    waiting = [asyncio.create_task(take(config)) for _ in range(60)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: manager.pools() and manager.pools()[0].state.starting == 0)
    # As many as had begun to start already.
    assert process_metrics().get("sandbox/started", 0) - before <= 4
    (pool,) = manager.pools()
    await until(lambda: pool.state.idle == pool.state.removing == 0)


@pytest.mark.nightly
async def test_file_descriptors_do_not_grow_with_episodes(image: str, manager: PoolManager) -> None:
    config = DockerPoolConfig(image=image, warm=2, max=4)

    async def episode() -> None:
        taken = await take(config)
        await taken.write_file("file", "text")
        assert await taken.read_file("file") == "text"
        await taken.exec(["true"], user="nobody")
        taken.release()

    async def several() -> int:
        await asyncio.gather(*(episode() for _ in range(12)))
        (pool,) = manager.pools()
        await until(lambda: pool.state.removing == pool.state.starting == 0)
        return len(os.listdir("/proc/self/fd"))

    after_some = await several()
    for _ in range(3):
        after_more = await several()
    assert after_more <= after_some + 12


# The SDK leaves a socket to the garbage collector whenever the engine does not answer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_silent_engine_holds_up_no_event_loop(
    image: str,
    manager: PoolManager,
    silent_engine: SilentEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager.engine, "_timeout", 100_000)  # who waits for an answer hangs
    config = DockerPoolConfig(image=image, warm=1, max=2)
    first, second = await take(config), await take(config)
    silent_engine.fall_silent()
    second.release()
    attempts: list[Any] = [take(config), Env.task_init("test", config), take(image)]
    for attempt in attempts:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(attempt, 1)
    silent_engine.recover()
    first.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_silent_engine_holds_no_command(
    image: str,
    manager: PoolManager,
    silent_engine: SilentEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(executor, "_SILENCE_SECONDS", 100_000)
    sandbox = await take(DockerPoolConfig(image=image, warm=0))
    silent_engine.fall_silent()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.exec(["sleep", "60"], timeout=2), 3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.write_file("file", "x" * 1_000_000), 1)
    with pytest.raises(SandboxEngineError, match="does not answer"):
        await sandbox.exec(["true"], timeout=1)
    silent_engine.recover()
    sandbox.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["build", "pull"])
async def test_a_build_or_pull_without_progress_ends_with_an_error(
    image: str, manager: PoolManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("inspect_docker_pool.image.BUILD_SILENCE_SECONDS", 2)
    monkeypatch.setattr("inspect_docker_pool.image.PULL_SILENCE_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as registry:
        config: Any = DockerPoolConfig(image=f"127.0.0.1:{registry.getsockname()[1]}/nobody:1")
        if what == "build":
            (config,) = _dockerfiles(tmp_path, image, 1, "sleep 30")
        with pytest.raises(SandboxError, match=what):
            await asyncio.wait_for(take(config), 120)


_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees others' open files")


class TestDiskLimit:
    """Ways to take more disk than the limit, each of which ends the container."""

    @pytest.fixture(autouse=True)
    def _measured_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inspect_docker_pool.manager._DISK_SECONDS", 0.5)

    async def _ends(self, sandbox: DockerPoolSandboxEnvironment, program: str) -> None:
        with pytest.raises(SandboxDiedError, match="disk limit"):
            await sandbox.exec(["sh", "-c", program + "\nsleep 60"])

    @pytest.mark.parametrize(
        "program",
        [
            "cd /root; seq 20000 | xargs touch",
            "for f in hosts hostname resolv.conf\ndo head -c 9000000 /dev/zero >> /etc/$f; done",
            "for n in $(seq 25); do d=$(printf d%200s | tr ' ' d); mkdir $d; cd $d; done\n"
            "for n in 1 2; do head -c 9000000 /dev/zero > /root/$n; done",
            pytest.param(
                "head -c 9000000 /dev/zero > f; exec 5<f; rm f\n"
                "head -c 9000000 /dev/zero > f; exec 6<f; rm f",
                marks=_AS_ROOT,
            ),
            pytest.param(
                "for n in 1 2; do cp /bin/sleep s; head -c 9000000 /dev/zero >> s; ./s 60 &\n"
                "sleep 1; rm s; done",
                marks=_AS_ROOT,
            ),
        ],
        ids=["empty", "mounted by the engine", "beside deep folders", "open", "running"],
    )
    async def test_files(self, open_sandbox: Any, program: str) -> None:
        """Many empty ones, those that cannot be measured, and removed ones still in use."""
        await self._ends(await open_sandbox(disk="10m"), program)

    async def test_blocks_beyond_a_files_size(self, open_sandbox: Any) -> None:
        sandbox = await open_sandbox(disk="60m")
        assert (await sandbox.exec(["fallocate", "-l", "1M", "/root/plain"])).success
        await sandbox.exec(["touch", "/root/hidden"])
        hidden = await sandbox.exec(["fallocate", "--keep-size", "-l", "1500M", "/root/hidden"])
        assert "unsupported" in hidden.stderr
        for request in (0x40305828, 0x4030582A, 0x40305839, 0x401C5820):
            program = (
                "import fcntl, struct; fcntl.ioctl(open('/root/hidden', 'r+b'), "
                f"{request}, struct.pack('<hh4xqqiI4i', 0, 0, 0, 1 << 29, 0, 0, 0, 0, 0, 0))"
            )
            hidden = await sandbox.exec(["python3", "-c", program])
            assert "not supported" in hidden.stderr
        assert (await sandbox.exec(["stat", "-c", "%b", "/root/hidden"])).stdout == "0\n"

    async def test_volumes_of_an_image(self, open_sandbox: Any, image: str, tmp_path: Path) -> None:
        (tmp_path / "Dockerfile").write_text(f"FROM {image}\nVOLUME /kept\n")
        file = str(tmp_path / "Dockerfile")
        with pytest.raises(SandboxConfigError, match="VOLUME /kept"):
            await open_sandbox(DockerPoolConfig(file=file, warm=0))
        for covered in ({"tmpfs": ["/kept:size=1m"]}, {"disk": 0}):
            await open_sandbox(DockerPoolConfig(file=file, warm=0, **covered))

    async def test_the_volume_of_the_executor(self, open_sandbox: Any) -> None:
        with pytest.raises(SandboxConfigError, match="read_only"):
            await open_sandbox(read_only=True, cap_drop=[])

    @_AS_ROOT
    async def test_removed_files_of_a_process_whose_first_thread_has_ended(
        self, open_sandbox: Any, without_first_thread: bytes
    ) -> None:
        sandbox = await open_sandbox(disk="10m")
        await sandbox.write_file("/root/program", without_first_thread)
        await self._ends(sandbox, "chmod +x program; ./program &")

    async def test_memory_files_are_no_disk(self, open_sandbox: Any) -> None:
        sandbox = await open_sandbox(disk="10m")
        program = (
            "import os, time\nkept = [os.memfd_create('x') for _ in range(3)]\n"
            "for file in kept: os.write(file, bytes(9_000_000))\n"
            "open('/dev/shm/x', 'wb').write(bytes(9_000_000)); time.sleep(3); print('lives')"
        )
        assert (await sandbox.exec(["python3", "-c", program])).stdout == "lives\n"
