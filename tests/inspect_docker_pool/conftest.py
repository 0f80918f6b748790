"""Pools on a real Docker engine, and proof that nothing of them is left."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment
from inspect_docker_pool.manager import PoolManager, close_all, pool_manager

IMAGE = "inspect-rl-test/python:1"


@pytest.fixture
def compose_plugin() -> None:
    """Docker's plugin that reads compose files; it needs no engine."""
    program = shutil.which("docker")
    if (
        program is None
        or subprocess.run([program, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("the program 'docker' is not there, or has no plugin 'compose'")


@contextlib.contextmanager
def new_pools() -> Iterator[PoolManager]:
    """Make new pools of this process; afterwards nothing of them may be left anywhere."""
    close_all()  # containers kept warm by tests without this fixture would count here
    made = pool_manager()
    yield made
    owner = pool_manager().owner.id
    built = list(made._images.budget._made)
    close_all()
    for image in built:  # not what a test beside this one has built
        subprocess.run(["docker", "rmi", image], check=False, capture_output=True)
    assert owned(owner) == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("docker_pool")]


@pytest.fixture
def manager() -> Iterator[PoolManager]:
    with new_pools() as made:
        yield made


def owned(owner: str) -> list[str]:
    """List every container, network, volume and snapshot of an owner."""
    import docker

    client = docker.APIClient()
    filters = {"label": f"inspect-tinker-plugin.owner={owner}"}
    try:
        return [
            *(c["Names"][0] for c in client.containers(all=True, filters=filters)),
            *(n["Name"] for n in client.networks(filters=filters)),
            *(v["Name"] for v in client.volumes(filters=filters)["Volumes"] or []),
            *(i["Id"] for i in client.images(filters=filters)),
        ]
    finally:
        client.close()


@pytest.fixture
def left_behind() -> Callable[[str], list[str]]:
    return owned


class PrivateEngine:
    """A second Docker engine that a test may stop."""

    def __init__(self, folder: Path, *options: str, users: str = "") -> None:
        self._folder = folder
        self._options = options
        self._users = users
        """Lines of ``/etc/subuid`` and ``/etc/subgid`` that only this engine may see."""
        self.address = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self._folder
        with (folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--net"),  # the bridges of other engines are not affected
                    *self._with_users(),
                    "dockerd",
                    *self._options,
                    f"--data-root={folder}/data",
                    f"--exec-root={folder}/exec",
                    f"--pidfile={folder}/pid",
                    f"--host={self.address}",
                    "--bridge=none",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--containerd-namespace=inspect-rl-test",
                    "--containerd-plugins-namespace=inspect-rl-test-plugins",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(300):
            if self.run("info", check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((folder / "dockerd.log").read_text()[-2000:])

    def _with_users(self) -> list[str]:
        if not self._users:
            return []
        users = self._folder / "users"
        users.write_text(self._users)
        mounts = " && ".join(
            f"mount --bind {users} {path}" for path in ("/etc/subuid", "/etc/subgid")
        )
        return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=60)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", f"--host={self.address}", *arguments],
            capture_output=True,
            text=True,
            check=check,
        )

    def containers(self) -> list[str]:
        return self.run("ps", "--all", "--quiet").stdout.split()


@contextlib.contextmanager
def second_engine(*options: str, users: str = "") -> Iterator[PrivateEngine]:
    """Run a separate engine for the test, with the image that the tests use."""
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("a second engine needs dockerd and root")
    # Sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="engine") as folder:
        Path(folder).chmod(0o711)  # remapped users have to pass
        engine = PrivateEngine(Path(folder), *options, users=users)
        try:
            engine.start()
            subprocess.run(
                f"docker save {IMAGE} | docker --host={engine.address} load",
                shell=True,
                check=True,
                capture_output=True,
            )
            yield engine
        finally:
            engine.stop()
            gc.collect()  # sockets that the SDK left open while nobody answered


@pytest.fixture
def private_engine() -> Iterator[PrivateEngine]:
    with second_engine() as engine:
        yield engine


class SilentEngine:
    """A proxy to the real engine that can be told to forward nothing, or to lose answers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loses: Callable[[bytes], bool] = lambda request: False
        """Whether the connection is cut before a request's answer comes through."""
        self.refuses: Callable[[bytes], bool] = lambda request: False
        """Whether the connection is cut before a request comes through."""
        self._deaf = threading.Event()
        self._open: list[socket.socket] = []
        self.start()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def fall_silent(self) -> None:
        self._deaf.set()

    def recover(self) -> None:
        self._deaf.clear()
        self._hang_up()

    def close(self) -> None:
        """Refuse connections, as an engine that was stopped."""
        self._hang_up()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        Path(self.path).unlink()

    def _hang_up(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            engine = socket.socket(socket.AF_UNIX)
            engine.connect("/var/run/docker.sock")
            self._open.extend([client, engine])
            lost = threading.Event()
            for pair in ((client, engine), (engine, client)):
                threading.Thread(target=self._forward, args=(*pair, lost), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._deaf.is_set():
                    return
                begins = data.startswith((b"GET", b"POST", b"DELETE"))
                if lost.is_set() or (begins and self.refuses(data)):
                    source.shutdown(socket.SHUT_RDWR)
                    target.shutdown(socket.SHUT_RDWR)
                    return
                if begins and self.loses(data):
                    lost.set()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def silent_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentEngine]:
    with tempfile.TemporaryDirectory(prefix="engine") as folder:
        door = SilentEngine(f"{folder}/s")
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{door.path}")
            yield door
            close_all()
        door.close()


_ENDED = r"""
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
static char zeros[9000000];
static void *work(void *unused) {
  usleep(100000);
  for (int i = 0; i < 2; i++) {
    int file = open("removed", O_CREAT | O_WRONLY, 0600);
    unlink("removed");
    if (write(file, zeros, sizeof zeros) < 0) break;
  }
  for (;;) pause();
}
int main(void) {
  pthread_t thread;
  pthread_create(&thread, 0, work, 0);
  pthread_exit(0);
}
"""


@pytest.fixture
def without_first_thread(tmp_path: Path) -> bytes:
    """A program whose first thread ends, while another holds removed files of 18 MB open."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    program = tmp_path / "program"
    command = ["gcc", "-static", "-pthread", "-xc", "-o", str(program), "-"]
    subprocess.run(command, input=_ENDED.encode(), check=True)
    return program.read_bytes()


Opener = Callable[..., Awaitable[DockerPoolSandboxEnvironment]]


@pytest.fixture
def image() -> str:
    return IMAGE


async def prewarm(config: DockerPoolConfig | str, count: int) -> None:
    """Wait until this many projects are ready for a configuration."""
    pool = await pool_manager().prepare(parse_config(config))
    pool.expect(count)
    await until(lambda: pool.state.idle >= count)


async def take(config: DockerPoolConfig | str) -> DockerPoolSandboxEnvironment:
    """Take the one sandbox of a configuration, as an episode does."""
    (taken,) = (await DockerPoolSandboxEnvironment.sample_init("test", config, {})).values()
    return taken.as_type(DockerPoolSandboxEnvironment)


@pytest.fixture
async def open_sandbox(manager: PoolManager) -> AsyncIterator[Opener]:
    """Take sandboxes as an episode does; they are released at the end."""
    opened: list[DockerPoolSandboxEnvironment] = []

    async def open_one(
        config: DockerPoolConfig | str | None = None, **options: Any
    ) -> DockerPoolSandboxEnvironment:
        given = config or DockerPoolConfig(**{"image": IMAGE, "warm": 0, **options})
        opened.append(await take(given))
        return opened[-1]

    yield open_one
    for environment in opened:
        environment.release()


@pytest.fixture
async def sandbox(open_sandbox: Opener) -> DockerPoolSandboxEnvironment:
    """A sandbox with the default hardening."""
    return await open_sandbox()
