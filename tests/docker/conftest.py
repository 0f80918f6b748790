"""A real Docker engine, or a reason why its tests are skipped; and proof that nothing is left."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from inspect_tinker_plugin.sandboxes.config import DockerPoolConfig
from inspect_tinker_plugin.sandboxes.environment import DockerPoolSandboxEnvironment
from inspect_tinker_plugin.sandboxes.manager import PoolManager, close_all, pool_manager

IMAGE = "inspect-rl-test/python:1"


@functools.cache
def missing_engine() -> str | None:
    """Say why the tests of this folder cannot run, or nothing."""
    import docker

    try:
        client = docker.APIClient(timeout=10)
    except Exception as ex:
        return f"no Docker engine: {ex}"
    try:
        if not client.images(name=IMAGE):
            return f"the engine has no image {IMAGE}"
        return None
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _engine(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("docker"):
        reason = missing_engine()
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture
def manager() -> Iterator[PoolManager]:
    """This process's pools; afterwards nothing of them is left on the engine or here."""
    yield pool_manager()
    owner = pool_manager().owner.id
    close_all()
    assert left_behind(owner) == []
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("docker_pool")]


def left_behind(owner: str) -> list[str]:
    """List every container, network and volume of an owner."""
    import docker

    client = docker.APIClient()
    filters = {"label": f"inspect-tinker-plugin.owner={owner}"}
    try:
        return [
            *(c["Names"][0] for c in client.containers(all=True, filters=filters)),
            *(n["Name"] for n in client.networks(filters=filters)),
            *(v["Name"] for v in client.volumes(filters=filters)["Volumes"] or []),
        ]
    finally:
        client.close()


Opener = Callable[..., Awaitable[DockerPoolSandboxEnvironment]]


@pytest.fixture
def image() -> str:
    return IMAGE


@pytest.fixture
async def open_sandbox(manager: PoolManager) -> AsyncIterator[Opener]:
    """Take sandboxes as an episode does; they are released at the end."""
    opened: list[DockerPoolSandboxEnvironment] = []

    async def take(
        config: DockerPoolConfig | str | None = None, **options: Any
    ) -> DockerPoolSandboxEnvironment:
        given = config or DockerPoolConfig(**{"image": IMAGE, "warm": 0, **options})
        environments = await DockerPoolSandboxEnvironment.sample_init("test", given, {})
        (environment,) = environments.values()
        opened.append(environment.as_type(DockerPoolSandboxEnvironment))
        return opened[-1]

    yield take
    for environment in opened:
        environment.release()


@pytest.fixture
async def sandbox(open_sandbox: Opener) -> DockerPoolSandboxEnvironment:
    """A sandbox with the default hardening."""
    return await open_sandbox()
