"""Starts the containers of one episode, with their networks and volumes, and removes them together.

Services start in the order in which they depend on each other. A project is ready when each of its
services is: healthy, where it or a server's image has a health check; completed, where another
one waits for that; else running. Health checks run as any command of the container does.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

import anyio

from inspect_docker_pool.command import Command, CommandResult
from inspect_docker_pool.config import HealthCheck, ProjectConfig
from inspect_docker_pool.container import Container
from inspect_docker_pool.context import STARTED, measure
from inspect_docker_pool.engine import CLOSED, Engine, engine_errors, quietly
from inspect_docker_pool.errors import SandboxError, SandboxStartError
from inspect_docker_pool.image import Image
from inspect_docker_pool.lease import KEPT, PROJECT, Lease

_COMPLETE_SECONDS = 600.0
"""Seconds that a service may take to complete, as Inspect's own Docker provider waits."""

_FIRST_PAUSE = 0.05
_LOOK_SECONDS = 0.2

_ISOLATED = {"com.docker.network.bridge.inhibit_ipv4": "true"}
"""The host has no address on such a network."""


class Project:
    """The containers of one episode. :meth:`start` creates them, :meth:`remove` removes them."""

    def __init__(
        self, engine: Engine, owner: Lease, config: ProjectConfig, images: Sequence[Image]
    ) -> None:
        self.config = config
        self.name = f"inspect-pool-{owner.id}-{uuid.uuid4().hex[:8]}"
        self._engine = engine
        self._labels = {**owner.labels(), PROJECT: self.name}
        self.containers = [
            Container(engine, self._labels, service, image, self.name)
            for service, image in zip(config.services, images, strict=True)
        ]
        """The default service's container first."""
        self.kept = False
        self.ready_at = 0.0
        """Monotonic time at which it could take its first command."""
        self._networks: list[str] = []
        self._volumes: list[str] = []
        self._removal = threading.Lock()
        self._removed = False

    def start(self, closed: Callable[[], bool]) -> None:
        """Create and start everything, in this thread; what fails is still to be removed."""
        self._create_networks_and_volumes()
        self._start_services(closed)
        self.ready_at = time.monotonic()
        measure(STARTED, len(self.containers))

    @property
    def default(self) -> Container:
        """The container that the policy works in."""
        return self.containers[0]

    def is_ready(self) -> bool:
        """Return, without waiting, whether all containers live."""
        return all(container.is_ready() for container in self.containers)

    def keep(self) -> None:
        """Leave the containers behind on purpose, marked so that no reaper takes them."""
        self.kept = True
        for container in self.containers:
            container.keep(KEPT)

    def remove(self) -> bool:
        """Remove everything, in this thread. Safe to call again.

        Returns:
            Whether nothing is left; false when the engine did not answer.
        """
        with self._removal:
            if self._removed:
                return True
            api = self._engine.api
            done = all([container.remove() for container in self.containers])
            self._networks = [n for n in self._networks if not quietly(api.remove_network, n)]
            self._volumes = [v for v in self._volumes if not quietly(api.remove_volume, v)]
            self._removed = done and not self._networks and not self._volumes
            return self._removed

    def _create_networks_and_volumes(self) -> None:
        api = self._engine.api
        with engine_errors(f"{self.config.source}: network or volume"):
            for network in self.config.networks.values():
                name = f"{self.name}-{network.name}"
                self._networks.append(name)  # an engine whose answer is lost has made it, too
                api.create_network(
                    name,
                    driver="bridge",
                    internal=network.internal,
                    options=_ISOLATED if network.internal else None,
                    labels=self._labels,
                )
            mounts = [mount for service in self.config.services for mount in service.mounts]
            for source in sorted({mount.source for mount in mounts if mount.own}):
                name = f"{self.name}-{source}"
                self._volumes.append(name)
                api.create_volume(name, labels=self._labels)

    def _start_services(self, closed: Callable[[], bool]) -> None:
        waiting = {container.config.service: container for container in self.containers}
        ready: set[str] = set()

        def await_ready(service: str) -> None:
            if service not in ready:
                _await_ready(services[service], closed)
                ready.add(service)

        services = dict(waiting)
        while waiting:
            container = next(
                container
                for container in waiting.values()
                if not waiting.keys() & {other for other, _ in container.config.depends_on}
            )
            for other, condition in container.config.depends_on:
                if condition != "service_started":
                    await_ready(other)
            if closed():
                raise SandboxStartError(CLOSED)
            container.start()
            del waiting[container.config.service]
        for service in services:
            await_ready(service)
        for container in self.containers:
            if not container.is_ready():
                raise SandboxStartError(f"{container.config.label}: {_describe_end(container)}")


def _await_ready(container: Container, closed: Callable[[], bool]) -> None:
    """Wait, in this thread, until a service is healthy or has completed."""
    check = container.config.healthcheck
    if check is None and container.config.is_server:
        check = container.image.healthcheck
    if container.config.completes:
        work = _complete(container)
    elif check is not None and check.test[0] != "NONE":
        work = _become_healthy(container, check)
    else:
        return

    async def wait() -> str:
        problem = CLOSED
        async with anyio.create_task_group() as tasks:

            async def look() -> None:
                while not closed():  # noqa: ASYNC110  (a thread closes it)
                    await anyio.sleep(_LOOK_SECONDS)
                tasks.cancel_scope.cancel()

            tasks.start_soon(look)
            try:
                problem = await work
            except SandboxError as ex:
                problem = str(ex)
            tasks.cancel_scope.cancel()
        return problem

    if problem := anyio.run(wait):
        raise SandboxStartError(f"{container.config.label}: {problem}")


async def _complete(container: Container) -> str:
    """Run a service's command to its end; return what went wrong."""
    result = await container.run(_command(container, container.process, _COMPLETE_SECONDS))
    return _describe(result, "its command did not complete") if result.status else ""


async def _become_healthy(container: Container, check: HealthCheck) -> str:
    """Wait until a health check succeeds; return what went wrong."""
    kind, *words = check.test
    argv = ("/bin/sh", "-c", *words) if kind == "CMD-SHELL" else tuple(words)
    begun, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        result = await container.run(_command(container, argv, check.timeout))
        if result.status == 0 and not result.timed_out:
            return ""
        if not container.is_ready():
            return _describe_end(container)
        if time.monotonic() - begun > check.seconds:
            problem = _describe(result, f"not healthy within {check.seconds:.0f} seconds")
            return f"{problem}; its command said: {container.executor.said}"
        await anyio.sleep(pause)
        pause = min(2 * pause, check.interval)  # what is ready early is noticed early


def _command(container: Container, argv: tuple[str, ...], timeout: float) -> Command:
    return Command(argv=argv, cwd=container.working_dir, timeout=timeout)


def _describe_end(container: Container) -> str:
    return f"{container.executor.why_ended()}; it said: {container.executor.said}"


def _describe(result: CommandResult, what: str) -> str:
    said = (result.stdout + result.stderr).decode(errors="replace").strip()
    how = "timed out" if result.timed_out else f"status {result.status}"
    return f"{what} ({how}); it said: {said[-500:] or 'nothing'}"
