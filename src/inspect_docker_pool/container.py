"""Starts one container, runs commands in it, and removes it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from inspect_ai.util import ExecResult

from inspect_docker_pool import program
from inspect_docker_pool.command import (
    Call,
    Command,
    CommandResult,
    Flag,
    RequestKind,
    Setup,
    result_of,
)
from inspect_docker_pool.config import (
    ContainerConfig,
    capability_mask,
    command_capabilities,
    host_options,
    is_keep_alive,
    reaches_executor,
)
from inspect_docker_pool.engine import AttachedSocket, Engine, quietly, typed
from inspect_docker_pool.errors import (
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxMisusedError,
)
from inspect_docker_pool.executor import Executor, ExecutorSilent
from inspect_docker_pool.image import Image
from inspect_docker_pool.lease import KEPT, Lease
from inspect_docker_pool.metrics import STARTED, measure

_NOTED_SECONDS = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Seconds between looks at a container that is said to be paused: the engine notes late that it is
no longer."""

Failure = Callable[[ConnectionError | ExecutorSilent], Awaitable[SandboxError]]
"""Decides what a failed request means for its container."""


class OpenCommand:
    """A running command; one task reads it."""

    def __init__(
        self, executor: Executor, call: Call, failure: Failure, result: Callable[[], CommandResult]
    ) -> None:
        self._failure = failure
        self._executor = executor
        self._call = call
        self._result = result

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for some of its standard output and error; nothing of both at its end.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: the container is lost.
        """
        try:
            return await self._executor.read(self._call)
        except (ConnectionError, ExecutorSilent) as ex:
            raise await self._failure(ex) from ex

    async def send(self, data: bytes) -> None:
        """Write to its standard input, without waiting until it is read.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: the container is lost.
        """
        try:
            await self._executor.write(self._call, data)
        except ConnectionError as ex:
            raise await self._failure(ex) from ex

    async def end_input(self) -> None:
        """End its standard input, behind what was sent.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: the container is lost.
        """
        try:
            self._executor.end_input(self._call)
        except ConnectionError as ex:
            raise await self._failure(ex) from ex

    def result(self) -> ExecResult[bytes]:
        """Return how it ended, with the output that was not received yet.

        Raises:
            SandboxMisusedError: commands in the container kept this one from running.
        """
        end = self._result()
        return ExecResult(end.status == 0, end.status, end.stdout, end.stderr)

    async def close(self) -> None:
        """End it with everything that it started. Safe to call again."""
        await self._executor.leave(self._call)


START_SECONDS = 60.0
"""Seconds that a container may take to start."""

_DIAGNOSIS_SECONDS = 10.0
"""Seconds that the engine may take to report the state of a container."""


class Container:
    """One running container. Made by :meth:`start`, removed by :meth:`remove`."""

    def __init__(self, engine: Engine, owner: Lease, config: ContainerConfig, image: Image) -> None:
        self.config = config
        self.image = image
        self.name = f"inspect-pool-{owner.id}-{uuid.uuid4().hex[:8]}"
        self.id = ""
        self.fault: str | None = None
        """Why the pool killed this container, if it did."""
        self.kept = False
        self.ready_at = 0.0
        """Monotonic time at which it could take its first command."""
        self._engine = engine
        self._owner = owner
        self._networks: list[str] = []
        self._executor: Executor | None = None
        self._capabilities = command_capabilities(config)
        self._not_found = 127
        self._removal = threading.Lock()
        self._holding = threading.Lock()
        self._removed = False

    @classmethod
    def start(
        cls, engine: Engine, owner: Lease, config: ContainerConfig, image: Image
    ) -> Container:
        """Create and start a container, in this thread.

        Raises:
            SandboxStartError: it did not start; nothing of it is left.
            SandboxEngineError: the engine does not answer.
        """
        container = cls(engine, owner, config, image)
        try:
            container._start()
        except BaseException as ex:
            container.remove()
            if isinstance(ex, Exception) and not isinstance(ex, SandboxError):
                raise typed(ex, f"{config.source}: container start") from ex
            raise
        container.ready_at = time.monotonic()
        measure(STARTED)
        return container

    @property
    def user(self) -> str:
        """The user that commands run as unless they ask for another."""
        return self.config.user or self.image.user or "0"

    @property
    def working_dir(self) -> str:
        return self.config.working_dir or self.image.working_dir

    @property
    def command(self) -> tuple[str, ...] | None:
        """The container's own command: the configuration's, else the image's."""
        if self.config.command is None and self.config.entrypoint is None:
            return self.image.command
        return self.config.command

    @property
    def executor_status(self) -> str:
        """Whether commands can reach the executor that runs them."""
        if reaches_executor(self._capabilities):
            return "in use, but the container's capabilities reach into other processes"
        return "in use"

    async def run(self, command: Command) -> CommandResult:
        """Run a command.

        Raises:
            SandboxDiedError: the container is not running.
            SandboxMisusedError: earlier commands in the container keep this one from running.
            SandboxEngineError: the engine does not answer.
        """
        call = await self.request(
            RequestKind.EXEC,
            (command.user or self.user, command.cwd, *command.argv),
            env=_environment(command),
            stdin=command.stdin or None,
            timeout=command.timeout,
            limit=command.limit,
        )
        return self._result_of(call, command)

    def _result_of(self, call: Call, command: Command) -> CommandResult:
        try:
            return result_of(call, command, not_found=self._not_found)
        except SandboxMisusedError as ex:
            ex.container = self.id
            raise

    async def request(self, kind: RequestKind, words: tuple[str, ...], **options: Any) -> Call:
        """Send a request to the executor; the returned call holds its end.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: as for :meth:`run`.
        """
        executor = self._executor
        assert executor is not None, "the container was not started"
        try:
            call = await executor.call(kind, words, **options)
        except (ConnectionError, ExecutorSilent) as ex:
            raise await self.failure(ex) from ex
        if call.end is not None and Flag.UNSTOPPED in call.end.flags:
            quietly(self._engine.submit, self.kill, "a command in it could not be stopped")
        return call

    async def open(self, command: Command) -> OpenCommand:
        """Start a command to be read and written while it runs.

        Its limit is that of the standard error that was not read yet; more is dropped.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: as for :meth:`run`.
        """
        executor = self._executor
        assert executor is not None, "the container was not started"
        words = (command.user or self.user, command.cwd, *command.argv)
        try:
            call = executor.open(words, env=_environment(command), said=command.limit)
        except ConnectionError as ex:
            raise await self.failure(ex) from ex
        return OpenCommand(executor, call, self.failure, lambda: self._result_of(call, command))

    async def failure(self, ex: ConnectionError | ExecutorSilent) -> SandboxError:
        """Return what a failed request means, once the state of the container is known.

        Raises:
            SandboxDiedError, SandboxMisusedError, SandboxEngineError: as for :meth:`run`.
        """
        await self._diagnose()
        if isinstance(ex, ConnectionError):
            return SandboxDiedError(
                "the engine closed the connection to the sandbox, which ends it", container=self.id
            )
        quietly(self._engine.submit, self.kill, "its executor did not answer")
        return SandboxMisusedError(
            "the sandbox did not answer in time: its processes leave it no processor time or "
            "memory",
            container=self.id,
        )

    async def _diagnose(self) -> None:
        """Find out what happened to the container, within a limited time."""
        with anyio.move_on_after(_DIAGNOSIS_SECONDS):
            await self._engine.run(self.check)
            return
        raise SandboxEngineError(
            "the Docker engine does not answer, and a command's end cannot be known",
            container=self.id,
        )

    def check(self) -> None:
        """Check, in this thread, whether the container runs.

        Raises:
            SandboxMisusedError: it ended because commands in it used up its resources.
            SandboxDiedError: it ended for another reason, or is gone.
            SandboxEngineError: the engine does not answer, or has paused it.
        """
        state = self._state()
        if state.get("Paused"):  # "running", too; nothing that runs in it can do that
            raise SandboxEngineError(
                "the container is paused: somebody has paused it while an episode used it",
                container=self.id,
            )
        if state["Running"]:
            return
        if self.fault is not None:
            raise SandboxMisusedError(
                f"the pool stopped this sandbox: {self.fault}", container=self.id
            )
        if state["OOMKilled"]:
            raise SandboxMisusedError(
                "the container ran out of memory and ended while an episode used it. Raise its "
                "memory limit if the task needs more",
                container=self.id,
            )
        raise SandboxDiedError(
            f"the container ended (exit status {state['ExitCode']}) while an episode used it",
            container=self.id,
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing run in the container while this thread looks into it.

        Raises:
            SandboxDiedError: the container is not running.
            SandboxEngineError: the engine cannot pause it, or does not answer.
        """
        import docker

        api = self._engine.api
        with self._holding:
            for wait in (*_NOTED_SECONDS, None):
                self._state()  # in case the engine has yet to note that it was held before
                try:
                    api.pause(self.id)
                    break
                except (OSError, docker.errors.DockerException) as ex:
                    # Processes that come and go can hinder the engine, not for long.
                    if wait is None or not isinstance(ex, docker.errors.APIError):
                        raise typed(ex, "pausing it", self.id) from ex
                    time.sleep(wait)
            try:
                yield
            finally:
                for wait in _NOTED_SECONDS:
                    if quietly(api.unpause, self.id):
                        break
                    time.sleep(wait)

    def _state(self) -> dict[str, Any]:
        """Return what the engine says about the container, in this thread."""
        import docker

        for wait in (*_NOTED_SECONDS, None):
            try:
                state: dict[str, Any] = self._engine.api.inspect_container(self.id)["State"]
            except docker.errors.NotFound as ex:
                raise SandboxDiedError(
                    "the container is gone: somebody removed it", container=self.id
                ) from ex
            except (OSError, docker.errors.DockerException) as ex:
                raise typed(ex, "exec", self.id) from ex
            if wait is None or not state.get("Paused"):
                break
            time.sleep(wait)
        return state

    def is_ready(self) -> bool:
        """Return, without waiting, whether a warm container still lives."""
        return self._executor is not None and self._executor.is_open()

    def kill(self, fault: str) -> None:
        """End the container immediately; later commands fail with ``fault``."""
        self.fault = fault
        quietly(self._engine.api.kill, self.id)

    def keep(self) -> None:
        """Leave the container behind on purpose, marked so that no reaper takes it."""
        self.kept = True
        if self._executor is not None:
            quietly(self._executor.keep)
        quietly(self._engine.api.rename, self.id, self.name + KEPT)
        self.name += KEPT

    def remove(self) -> bool:
        """Remove container and networks, in this thread. Safe to call again.

        Returns:
            Whether nothing is left; false when the engine did not answer.
        """
        with self._removal:
            if self._removed:
                return True
            if self._executor is not None:
                self._executor.close()
            api = self._engine.api
            done = not self.id or quietly(api.remove_container, self.id, force=True, v=True)
            for network in list(self._networks):
                if quietly(api.remove_network, network):
                    self._networks.remove(network)
            self._removed = done and not self._networks
            return self._removed

    def _start(self) -> None:
        api = self._engine.api
        config = self.config
        self._not_found = self._engine.not_found_status
        quota = self._engine.storage_quota(self.image.id, self._owner.labels())
        host = host_options(config, storage_quota=quota)
        networks = [self._network(network) for network in config.networks]
        if networks:
            host["network_mode"] = networks[0]
        if config.hardening.read_only:
            # Put the program on a volume of its own instead, which is removed with the container.
            volume = {"Type": "volume", "Target": program.FOLDER}
            host["mounts"] = [*host.get("mounts", []), volume]
        created = api.create_container(
            self.image.id,
            entrypoint=[program.PATH],
            name=self.name,
            labels=self._owner.labels(),
            environment=dict(config.environment),
            working_dir=config.working_dir,
            user="0:0",  # of the executor, which starts commands as their own users
            hostname=config.hostname,
            platform=config.platform,
            stdin_open=True,
            stop_signal="SIGKILL",
            host_config=api.create_host_config(**host),
        )
        self.id = created["Id"]
        for network in networks[1:]:
            api.connect_container_to_network(self.id, network)
        folder = program.FOLDER if config.hardening.read_only else "/"
        api.put_archive(self.id, folder, program.archive(self.image.architecture, folder))
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        self._executor = Executor(AttachedSocket(api.attach_socket(self.id, streams)))
        api.start(self.id)
        self._executor.greet(self._setup(), START_SECONDS, self.id)

    def _setup(self) -> Setup:
        config, image = self.config, self.image
        entrypoint = image.entrypoint if config.entrypoint is None else config.entrypoint
        command = self.command or ()
        holds = is_keep_alive(command)
        if holds and entrypoint:
            command = (program.PATH, "hold")
        environment = {**dict(image.environment), **dict(config.environment)}
        return Setup(
            capabilities=capability_mask(self._capabilities),
            has_home="HOME" in environment,
            user=self.user,
            folder=self.working_dir,
            command=() if holds and not entrypoint else (*entrypoint, *command),
            holds=holds,
        )

    def _network(self, network: Any) -> str:
        api = self._engine.api
        if network.external:
            return str(network.name)
        name = f"{self.name}-{network.name}"
        api.create_network(
            name, driver="bridge", internal=network.internal, labels=self._owner.labels()
        )
        self._networks.append(name)
        return name


def _environment(command: Command) -> list[bytes]:
    return [
        f"{key}={value}".encode("utf-8", "surrogateescape") for key, value in command.env.items()
    ]
