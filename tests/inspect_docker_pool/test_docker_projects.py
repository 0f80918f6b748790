"""Compose files with several services: one warm project per episode, reached by their names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import SandboxEnvironment, sandbox
from tests.functions import make_scorer, make_solver
from tests.inspect_docker_pool.conftest import prewarm
from tests.waiting import until

from inspect_docker_pool import process_metrics, record_sandbox_metrics
from inspect_docker_pool.command import Command
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment as Env
from inspect_docker_pool.errors import SandboxImageError, SandboxStartError
from inspect_docker_pool.manager import PoolManager, close_all
from inspect_tinker_plugin import EpisodeOptions, EpisodeResult, EpisodeRunner

pytestmark = pytest.mark.docker

SERVE = (
    "import socket, sys\n"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('', 80)); s.listen()\n"
    "while True:\n"
    "    c, _ = s.accept(); c.sendall(sys.argv[1].encode()); c.close()\n"
)
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 80), 3).recv(99).decode())"
HEALTHY = {"test": ["CMD", "python3", "-c", ASK, "localhost"], "interval": "1s", "retries": 20}


def served(word: str, **more: Any) -> dict[str, Any]:
    """Describe a service that answers with a word on port 80."""
    return {"command": ["python3", "-c", SERVE, word], "healthcheck": HEALTHY, **more}


@pytest.fixture
def project(tmp_path: Path, image: str) -> Callable[..., str]:
    def write(services: dict[str, dict[str, Any]], **top: Any) -> str:
        waits = {"image": image, "command": "tail -f /dev/null"}
        services = {"default": {}, **services}
        data: dict[str, Any] = {"services": {k: {**waits, **s} for k, s in services.items()}, **top}
        for service in data["services"].values():
            if "build" in service:
                del service["image"]
        data.setdefault("x-docker-pool", {"warm": 0})
        path = tmp_path / "compose.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


async def start(path: str) -> dict[str, Env]:
    given = await Env.sample_init("test", path, {})
    return {name: each.as_type(Env) for name, each in given.items()}


async def ask(box: SandboxEnvironment, host: str) -> str:
    done = await box.exec(["python3", "-c", ASK, host])
    return done.stdout.strip() or f"refused: {done.stderr[-200:]}"


async def capabilities(box: SandboxEnvironment) -> int:
    line = (await box.exec(["grep", "CapEff", "/proc/self/status"])).stdout
    return int(line.split()[1], 16)


async def test_each_service_is_a_sandbox_with_its_own_keys(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    path = project(
        {
            "web": served("hello", mem_limit="64m", pids_limit=50),
            "db": served("data", cap_drop=["ALL"], read_only=True),
            "agent": {"x-default": True, "depends_on": {"web": {"condition": "service_healthy"}}},
        }
    )
    boxes = await start(path)
    assert list(boxes) == ["agent", "db", "default", "web"]
    assert await ask(boxes["agent"], "web") == "hello"
    assert await ask(boxes["agent"], "db") == "data"
    assert await ask(boxes["web"], "agent") != "hello"
    for name, box in boxes.items():
        await box.write_file("/dev/shm/name", name)
    assert [await box.read_file("/dev/shm/name") for box in boxes.values()] == list(boxes)
    # The policy's own is hardened, and so is a server that says so; others are as under compose.
    assert await capabilities(boxes["agent"]) == await capabilities(boxes["db"]) == 0
    assert await capabilities(boxes["web"]) > 0
    assert not (await boxes["db"].exec(["touch", "/x"])).success
    facts = manager.engine.api.inspect_container(boxes["web"].container.id)["HostConfig"]
    assert (facts["Memory"], facts["PidsLimit"]) == (64 * 1024**2, 50)
    # No service can reach this machine, and none the internet.
    routes = (await boxes["agent"].exec(["cat", "/proc/net/route"])).stdout.splitlines()
    assert "00000000" not in [route.split()[1] for route in routes]
    await Env.sample_cleanup("test", path, dict(boxes), False)


async def test_episodes_do_not_reach_each_others_services(
    manager: PoolManager, project: Callable[..., str], left_behind: Callable[[str], list[str]]
) -> None:
    path = project({"web": served("one")})
    first, second = await start(path), await start(path)
    address = (await first["web"].exec(["hostname", "-i"])).stdout.split()[0]
    assert await ask(first["default"], address) == "one"
    assert (await ask(second["default"], address)).startswith("refused")
    second["web"].release()
    first["default"].release()
    await until(lambda: not left_behind(manager.owner.id))


async def test_the_host_is_not_reached_from_an_internal_network(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    boxes = await start(project({"web": served("x")}))
    network = f"{boxes['web'].container.name.removesuffix('-web')}-default"
    facts = manager.engine.api.inspect_network(network)
    assert facts["Internal"]
    gateway = facts["IPAM"]["Config"][0]["Gateway"]
    with socket.create_server(("", 0)) as listening:
        place = (gateway, listening.getsockname()[1])
        connect = f"import socket; socket.create_connection({place}, 2)"
        assert not (await boxes["default"].exec(["python3", "-c", connect])).success
    boxes["default"].release()


async def test_a_warm_project_is_there_immediately_and_counts_as_one(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    path = project(
        {"web": served("w"), "db": served("d")},
        **{"x-docker-pool": {"warm": 2, "max": 2}},
    )
    await prewarm(path, 2)
    (pool,) = manager.pools()
    assert (pool.state.idle, pool.state.starting) == (2, 0)
    with record_sandbox_metrics() as metrics:
        boxes = [await start(path), await start(path)]
    assert metrics.snapshot()["sandbox/warm_hits"] == 2
    third = asyncio.create_task(start(path))
    await until(lambda: pool.state.waiting == 1)
    assert pool.state.starting == 0, "a third one is over the maximum"
    third.cancel()
    await asyncio.wait([third])
    assert await ask(boxes[1]["default"], "web") == "w"
    for box in boxes:
        box["default"].release()


async def test_a_warm_project_whose_server_has_ended_is_not_handed_out(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    path = project({"web": served("w")}, **{"x-docker-pool": {"warm": 1}})
    await prewarm(path, 1)
    (pool,) = manager.pools()
    web = pool._idle[0].containers[1]
    await web.run(Command(("pkill", "-9", "python3"), cwd="/"))
    await until(lambda: not web.is_ready(), 100)  # the executor tells
    boxes = await start(path)
    assert boxes["web"].container is not web
    assert await ask(boxes["default"], "web") == "w"
    boxes["default"].release()


async def test_services_start_as_they_depend_on_each_other(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    completed = {"condition": "service_completed_successfully"}
    path = project(
        {
            "default": {"depends_on": {"seed": completed}, "volumes": ["data:/data:ro"]},
            "seed": {
                "command": [
                    "python3",
                    "-c",
                    f"{ASK}; open('/data/seeded', 'w').write('yes')",
                    "web",
                ],
                "depends_on": {"web": {"condition": "service_healthy"}},
                "volumes": ["data:/data"],
            },
            "web": served("w"),
        },
        volumes={"data": None},
    )
    boxes = await start(path)
    assert list(boxes) == ["default", "web"], "what has completed is no sandbox"
    assert await boxes["default"].read_file("/data/seeded") == "yes"
    assert not (await boxes["default"].exec(["touch", "/data/x"])).success
    again = await start(path)
    assert (await again["default"].exec(["ls", "/data"])).stdout == "seeded\n"
    boxes["default"].release()
    again["default"].release()


@pytest.mark.parametrize(
    ("services", "said"),
    [
        (
            {"web": {"healthcheck": {"test": "echo not yet; false", "interval": "100ms",
                                     "timeout": "1s", "retries": 1}}},
            r"service 'web': not healthy within 1 seconds \(status 1\); it said: not yet",
        ),
        (
            {"seed": {"command": ["sh", "-c", "echo broken; exit 3"]},
             "default": {"depends_on": {"seed": {"condition": "service_completed_successfully"}}}},
            r"service 'seed': its command did not complete \(status 3\); it said: broken",
        ),
        (
            {"web": {"command": ["sh", "-c", "echo gone; exit 4"],
                     "healthcheck": {"test": "sleep 1; false"}}},
            "service 'web': its command 'sh' ended with status 4; it said: gone",
        ),
        (
            {"a": {"command": ["sh", "-c", "sleep 0.1; echo gone; exit 4"]},
             "web": {"healthcheck": {"test": "sleep 0.3"}}},
            "service 'a': its command 'sh' ended with status 4; it said: gone",
        ),
        (
            {"web": {"command": ["sh", "-c", "sleep 0.2; echo no module; exit 1"],
                     "healthcheck": {"test": "false", "interval": "1s", "timeout": "1s"}}},
            "service 'web': its command 'sh' ended with status 1; it said: no module",
        ),
        ({"web": {"image": "no/such:image", "x-local": True}}, "no/such:image"),
    ],
    ids=["unhealthy", "incomplete", "ends", "ends later", "never healthy, as it ends", "missing"],
)  # fmt: skip
async def test_a_server_that_does_not_come_up_is_an_error_that_names_it(
    manager: PoolManager,
    project: Callable[..., str],
    services: dict[str, Any],
    said: str,
    left_behind: Callable[[str], list[str]],
) -> None:
    with pytest.raises((SandboxStartError, SandboxImageError), match=said):
        await start(project(services))
    assert left_behind(manager.owner.id) == []


async def test_closing_does_not_wait_for_a_health_check(
    manager: PoolManager, project: Callable[..., str], left_behind: Callable[[str], list[str]]
) -> None:
    slow = {"test": "false", "interval": "1s", "retries": 300}
    with anyio.move_on_after(2):
        await start(project({"web": {"healthcheck": slow}}))
    with anyio.fail_after(100):
        await anyio.to_thread.run_sync(close_all)
    assert left_behind(manager.owner.id) == []


async def test_published_ports_are_on_this_host_only(
    manager: PoolManager, project: Callable[..., str]
) -> None:
    path = project({"web": served("w", ports=["80"])}, networks={"default": {}})
    boxes = await start(path)
    (port,) = (await boxes["web"].connection()).ports or []
    assert (port.container_port, port.mappings[0].host_ip) == (80, "127.0.0.1")
    stream = await anyio.connect_tcp("127.0.0.1", port.mappings[0].host_port)
    assert await stream.receive() == b"w"
    await stream.aclose()
    assert (await boxes["default"].connection()).ports is None
    boxes["default"].release()


async def test_an_images_own_health_check_is_not_run_by_the_engine(
    manager: PoolManager, project: Callable[..., str], tmp_path: Path, image: str
) -> None:
    # The engine would run it as the executor's user, with its capabilities.
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nHEALTHCHECK --interval=1s --retries=2 CMD id -u > /ran\n"
    )
    boxes = await start(project({"default": {"build": "."}, "web": {"build": "."}}))
    assert not (await boxes["default"].exec(["ls", "/ran"])).success, "its command may be another"
    assert await boxes["web"].read_file("/ran") == "0\n"
    facts = manager.engine.api.inspect_container(boxes["web"].container.id)
    assert facts["Config"]["Healthcheck"]["Test"] == ["NONE"]
    boxes["default"].release()


async def test_a_dropped_or_named_project_is_removed_as_a_whole(
    manager: PoolManager, project: Callable[..., str], left_behind: Callable[[str], list[str]]
) -> None:
    path = project({"web": served("w", volumes=["data:/d"])}, volumes={"data": None})
    boxes = await start(path)
    await Env.cli_cleanup(boxes["web"].container.name)
    assert left_behind(manager.owner.id) == []
    boxes["default"].release()
    boxes = await start(path)
    del boxes
    await until(lambda: not left_behind(manager.owner.id))


@make_solver
async def asks(state: TaskState, generate: Generate) -> TaskState:
    state.store.set("web", await ask(sandbox(), "web"))
    state.store.set("made", (await sandbox("web").exec(["cat", "/made"])).stdout)
    await sandbox().write_file("answer.txt", "42")
    return state


@make_scorer(mean())
async def answers(state: TaskState, target: Target) -> Score:
    given = await sandbox().read_file("answer.txt")
    return Score(value=float(given == "42" and await ask(sandbox(), "web") == "w"))


@pytest.mark.parametrize("score_sandbox", ["same", "fresh"])
async def test_episodes_of_a_group_each_set_up_their_own_project(
    manager: PoolManager, project: Callable[..., str], score_sandbox: Any
) -> None:
    path = project({"web": served("w")})
    sample = Sample(id=1, input="x", files={"web:/made": "made"}, setup="#!/bin/sh\nsleep 1.1\n")
    task = Task(dataset=[sample], solver=asks(), scorer=answers(), sandbox=("docker_pool", path))
    options = EpisodeOptions(score_sandbox=score_sandbox, score_files=["answer.txt"])
    runner, forks = EpisodeRunner(task, options=options), process_metrics().get("sandbox/forks", 0)
    for episode in [runner.episode(sample, epoch=1), runner.episode(sample, epoch=2)]:
        result = await episode.start()
        assert isinstance(result, EpisodeResult)
        assert (result.error, result.score_values()) == (None, {"answers": 1.0})
        assert result.state.store.get("web") == "w"
        assert result.state.store.get("made") == "made"
        await episode.close()
    assert process_metrics().get("sandbox/forks", 0) == forks
