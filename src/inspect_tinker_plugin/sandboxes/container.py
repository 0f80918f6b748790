"""Start one container, talk to it, remove it."""

from __future__ import annotations

import io
import tarfile
import threading
import time
import uuid
from typing import Any

from inspect_tinker_plugin.errors import SandboxDiedError, SandboxError
from inspect_tinker_plugin.sandboxes.config import ContainerConfig, is_keep_alive
from inspect_tinker_plugin.sandboxes.direct import DirectExec
from inspect_tinker_plugin.sandboxes.engine import Engine, quietly, typed
from inspect_tinker_plugin.sandboxes.executor import Executor, Unsuitable, odd_names, script
from inspect_tinker_plugin.sandboxes.hardening import host_options
from inspect_tinker_plugin.sandboxes.image import Image
from inspect_tinker_plugin.sandboxes.job import Job, Outcome
from inspect_tinker_plugin.sandboxes.metrics import SLOW_EXECS, STARTED, measure
from inspect_tinker_plugin.sandboxes.owner import KEPT, Owner
from inspect_tinker_plugin.sandboxes.stream import AttachedSocket

START_SECONDS = 60.0
"""How long a container may take to come up, its entry point's work included."""

_FOLDER = ".inspect-pool"
_NOBODY = 59123
"""Owner of the executor's shell: no user of an image, so that only 'execute' is allowed."""

_REACHING = frozenset({"ALL", "SYS_PTRACE", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "BPF"})
"""Capabilities with which a command could read the executor's channel."""


class Container:
    """One running container. Made by :meth:`start`, removed by :meth:`remove`."""

    def __init__(self, engine: Engine, owner: Owner, config: ContainerConfig, image: Image) -> None:
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
        environment = {**dict(image.environment), **dict(config.environment)}
        self._odd = {key: environment[key] for key in odd_names(environment)}
        self._networks: list[str] = []
        self._executor: Executor | None = None
        self._removal = threading.Lock()
        self._removed = False

    @classmethod
    def start(
        cls, engine: Engine, owner: Owner, config: ContainerConfig, image: Image
    ) -> Container:
        """Create and start a container, in this thread.

        Raises:
            SandboxStartError: it did not come up; nothing is left of it.
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
        return self.config.user or self.image.user or "root"

    @property
    def working_dir(self) -> str:
        return self.config.working_dir or self.image.working_dir

    @property
    def command(self) -> tuple[str, ...] | None:
        """The container's own command, the image's unless the configuration has one."""
        if self.config.command is None and self.config.entrypoint is None:
            return self.image.command
        return self.config.command

    @property
    def executor(self) -> Executor | None:
        """The kept-open executor, if this container has one that works."""
        executor = self._executor
        return executor if executor is not None and executor.usable else None

    @property
    def executor_status(self) -> str:
        """Why commands do or do not go through the kept-open executor."""
        if self._executor is None:
            return "the container runs a command of its own"
        return "in use" if self._executor.usable else self._executor.reason

    async def run(self, job: Job) -> Outcome:
        """Run a command, through the executor if it can take it; errors as in ``direct.py``."""
        if job.user is None or self._is_default(job.user):
            executor = self.executor
            if executor is not None:
                try:
                    return await executor.run(job)
                except Unsuitable:
                    pass
                except ConnectionError:
                    await self._engine.run(self.direct.check)
                    raise SandboxDiedError(
                        "the connection to the sandbox broke while a command ran",
                        container=self.id,
                    ) from None
        measure(SLOW_EXECS)
        return await self.direct.run(job)

    @property
    def direct(self) -> DirectExec:
        return DirectExec(self._engine, self.id, self._odd)

    def looks_ready(self) -> bool | None:
        """Tell without waiting whether a warm container lives; ``None``: ask the engine."""
        if self._executor is not None and self._executor.usable:
            return self._executor.is_open()
        return None

    def is_ready(self) -> bool:
        """Look, in this thread, whether a warm container still lives."""
        known = self.looks_ready()
        if known is not None:
            return known
        try:
            self.direct.check()
        except SandboxError:
            return False
        return True

    def kill(self, fault: str) -> None:
        """End the container at once; later commands fail with ``fault``."""
        self.fault = fault
        quietly(self._engine.api.kill, self.id)

    def keep(self) -> None:
        """Leave the container behind on purpose, marked so that no reaper takes it."""
        self.kept = True
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

    def _is_default(self, user: str) -> bool:
        same = {self.user}
        if self.user in ("root", "0"):
            same |= {"root", "0"}
        return user in same

    def _start(self) -> None:
        api = self._engine.api
        command, entrypoint, execute = self._command()
        quota = self._engine.storage_quota(self.image.id, self._owner.labels())
        host = host_options(self.config, storage_quota=quota)
        networks = [self._network(network) for network in self.config.networks]
        if networks:
            host["network_mode"] = networks[0]
        created = api.create_container(
            self.image.id,
            command,
            entrypoint=entrypoint,
            name=self.name,
            labels=self._owner.labels(),
            environment=dict(self.config.environment),
            working_dir=self.config.working_dir,
            user=self.config.user,
            hostname=self.config.hostname,
            platform=self.config.platform,
            stdin_open=execute,
            # A TERM would only end the command that runs, as if it had failed by itself.
            stop_signal="SIGKILL" if execute else None,
            host_config=api.create_host_config(init=not execute and self.config.init, **host),
        )
        self.id = created["Id"]
        for network in networks[1:]:
            api.connect_container_to_network(self.id, network)
        if not execute:
            api.start(self.id)
            self.direct.check()
            return
        api.put_archive(self.id, "/", _shell_archive(self.image.shell))
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        channel = AttachedSocket(api.attach_socket(self.id, streams))
        self._executor = Executor(self._engine, self.id, channel)
        api.start(self.id)
        self._executor.greet(START_SECONDS)
        if self._odd:
            self._executor.usable = False
            self._executor.reason = f"a shell would drop the variable {next(iter(self._odd))!r}"
        if self._reachable():
            self._executor.usable = False
            self._executor.reason = "the container's capabilities reach into other processes"

    def _command(self) -> tuple[list[str] | None, list[str] | None, bool]:
        config = self.config
        entrypoint = None if config.entrypoint is None else list(config.entrypoint)
        effective = config.command
        if effective is None and config.entrypoint is None:
            effective = self.image.command
        execute = is_keep_alive(effective) and not config.hardening.read_only
        if execute:
            text = script("executor.sh") + "\n" + script("executor_main.sh")
            return [f"/{_FOLDER}/sh", "-c", text], entrypoint, True
        return None if config.command is None else list(config.command), entrypoint, False

    def _reachable(self) -> bool:
        added = set(self.config.hardening.cap_add)
        return bool(added & _REACHING) or not self.config.hardening.seccomp

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


def _shell_archive(shell: bytes) -> bytes:
    """Pack the executor's shell: anyone may run it and nobody read or change it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo(_FOLDER)
        folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o555, _NOBODY, _NOBODY
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{_FOLDER}/sh")
        file.mode, file.uid, file.gid, file.size = 0o111, _NOBODY, _NOBODY, len(shell)
        tar.addfile(file, io.BytesIO(shell))
    return buffer.getvalue()
