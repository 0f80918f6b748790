"""Other isolation: a runtime, remapped users, a task's own filter, restricted network access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.inspect_docker_pool.conftest import PrivateEngine, second_engine
from tests.waiting import until

from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.errors import SandboxConfigError, SandboxStartError
from inspect_docker_pool.manager import PoolManager, close_all

pytestmark = pytest.mark.docker
Env = DockerPoolSandboxEnvironment


async def test_a_runtime_is_the_engines_and_one_that_it_lacks_is_named(
    open_sandbox: Any, manager: PoolManager, image: str
) -> None:
    sandbox = await open_sandbox(runtime="io.containerd.runc.v2")
    facts = manager.engine.api.inspect_container(sandbox.container.id)
    assert facts["HostConfig"]["Runtime"] == "io.containerd.runc.v2"
    assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"
    config = DockerPoolConfig(image=image, runtime="runsc-of-nobody")
    with pytest.raises(SandboxStartError, match="runsc-of-nobody"):
        await Env.sample_init("test", config, {})


async def test_a_filter_of_the_tasks_own_is_in_force(
    open_sandbox: Any, tmp_path: Path, image: str
) -> None:
    forbidden = [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": forbidden}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    (tmp_path / "compose.yaml").write_text(
        f"services:\n  default:\n    image: {image}\n    command: tail -f /dev/null\n"
        "    security_opt: ['seccomp=profile.json']\nx-docker-pool: {warm: 0}\n"
    )
    filtered = await open_sandbox(str(tmp_path / "compose.yaml"))
    result = await filtered.exec(["mkdir", "/root/x"])
    assert "not permitted" in result.stderr
    assert (await filtered.exec(["touch", "/root/x"])).success
    plain = await open_sandbox()
    assert (await plain.exec(["mkdir", "/root/x"])).success


@pytest.mark.parametrize("text", [None, "no json", "{}"], ids=["missing", "malformed", "empty"])
async def test_a_filter_that_is_none_is_refused(
    tmp_path: Path, image: str, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    config = DockerPoolConfig(image=image, seccomp=str(tmp_path / "profile.json"))
    with pytest.raises(SandboxConfigError, match="seccomp"):
        await Env.task_init("test", config)


@pytest.fixture
def remapped_engine() -> Iterator[PrivateEngine]:
    with second_engine("--userns-remap=daemon", users="daemon:200000:65536\n") as engine:
        yield engine


@pytest.mark.nightly
async def test_remapped_users_work(
    image: str,
    remapped_engine: PrivateEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", remapped_engine.address)
        config = DockerPoolConfig(image=image, warm=0)
        (environment,) = (await Env.sample_init("test", config, {})).values()
        sandbox = environment.as_type(Env)
        assert (await sandbox.exec(["cat", "/proc/self/uid_map"])).stdout.split()[1] == "200000"
        await sandbox.write_file("/root/file", "text")
        assert await sandbox.read_file("/root/file") == "text"
        assert (await sandbox.exec(["id", "-u"])).stdout == "0\n"
        close_all()


_PROXY = r"""
import select, socket, threading
ALLOWED = {"allowed"}
def serve(client):
    head = client.recv(4096).decode().split()
    host, _, port = head[1].partition(":")
    if head[0] != "CONNECT" or host not in ALLOWED:
        client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n"); client.close(); return
    far = socket.create_connection((host, int(port)))
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        for one in select.select([client, far], [], [])[0]:
            data = one.recv(65536)
            if not data: client.close(); far.close(); return
            (far if one is client else client).sendall(data)
door = socket.create_server(("", 3128))
while True: threading.Thread(target=serve, args=(door.accept()[0],), daemon=True).start()
"""
_SERVER = (
    "import socket\nd = socket.create_server(('', 80))\n"
    "while True:\n  c, _ = d.accept(); c.sendall(b'hello from outside'); c.close()"
)
_CLIENT = r"""
import socket, sys
def ask(place, request):
    try:
        with socket.create_connection(place, 3) as s:
            s.sendall(request); s.settimeout(3)
            return b"".join(iter(lambda: s.recv(4096), b"")).decode()
    except OSError as ex: return f"{type(ex).__name__}"
for host in ("allowed", "other"):
    print(ask(("proxy", 3128), f"CONNECT {host}:80 HTTP/1.1\r\n\r\n".encode()))
    print("directly:", ask((host, 80), b"x"))
"""


async def test_the_documented_way_out_lets_through_what_is_listed(
    open_sandbox: Any, manager: PoolManager, image: str, tmp_path: Path
) -> None:
    """The recipe of ``docs/sandboxes.md``: an internal network, and a proxy next to it."""
    api, labels, name = manager.engine.api, manager.owner.labels(), manager.owner.id
    await open_sandbox()  # the proof of life comes first
    inside, outside = f"inside-{name}", f"outside-{name}"
    api.create_network(inside, driver="bridge", internal=True, labels=labels)
    api.create_network(outside, driver="bridge", labels=labels)
    started = []
    try:
        for host, program in (("allowed", _SERVER), ("other", _SERVER), ("proxy", _PROXY)):
            networks: Any = {outside: api.create_endpoint_config(aliases=[host])}
            made = api.create_container(
                image,
                ["python3", "-c", program],
                labels=labels,
                host_config=api.create_host_config(network_mode=outside),
                networking_config=api.create_networking_config(networks),
            )["Id"]
            started.append(made)
            if host == "proxy":
                api.connect_container_to_network(made, inside, aliases=[host])
            api.start(made)
        (tmp_path / "compose.yaml").write_text(
            f"services:\n  default:\n    image: {image}\n    command: tail -f /dev/null\n"
            "    networks: [egress]\nx-docker-pool: {warm: 0}\n"
            f"networks:\n  egress:\n    external: true\n    name: {inside}\n"
        )
        sandbox = await open_sandbox(str(tmp_path / "compose.yaml"))
        said = (await sandbox.exec(["python3", "-c", _CLIENT], timeout=60)).stdout
        sandbox.release()
        assert "200 OK" in said
        assert "hello from outside" in said
        assert "403 Forbidden" in said
        assert said.count("directly: gaierror") == 2, said
    finally:
        for one in started:
            api.remove_container(one, force=True)
        await until(lambda: not api.inspect_network(inside)["Containers"])
        api.remove_network(inside)
        api.remove_network(outside)
