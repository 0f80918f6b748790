"""Starts one container, runs commands and reads and writes files in it, and removes it."""

from __future__ import annotations

import errno
import functools
import io
import os
import posixpath
import tarfile
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import anyio
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentLimits

from inspect_docker_pool.command import (
    AttachedSocket,
    Call,
    Command,
    CommandResult,
    FailedAt,
    Flag,
    How,
    RequestKind,
    Setup,
    lost,
    raise_misuse,
    result_of,
)
from inspect_docker_pool.config import (
    ContainerConfig,
    Mount,
    Network,
    capability_mask,
    command_capabilities,
    host_options,
    is_keep_alive,
)
from inspect_docker_pool.engine import Engine, engine_errors, quietly
from inspect_docker_pool.errors import (
    SandboxConfigError,
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxMisusedError,
    SandboxSlowError,
)
from inspect_docker_pool.executor import Executor, ExecutorSilent, OpenCommand
from inspect_docker_pool.image import Image

FOLDER = "/.inspect-pool"
PROGRAM = f"{FOLDER}/executor"

_NOBODY = 59123
"""Owner of the program: not a user of any image."""

NATIVE = files(__package__) / "native"


@functools.cache
def pack_program(architecture: str, folder: str) -> bytes:
    """Pack the executor for a container: anyone may run it, and nobody may change it."""
    name = f"executor-{architecture}"
    if not (NATIVE / name).is_file():
        raise SandboxConfigError(
            f"docker_pool runs amd64 and arm64 images, not {architecture}; use Inspect's plain "
            "'docker' sandbox"
        )
    program = (NATIVE / name).read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        place = tarfile.TarInfo(posixpath.relpath(FOLDER, folder))
        place.type, place.mode, place.uid, place.gid = tarfile.DIRTYPE, 0o555, _NOBODY, _NOBODY
        tar.addfile(place)
        file = tarfile.TarInfo(posixpath.relpath(PROGRAM, folder))
        file.mode, file.uid, file.gid, file.size = 0o555, _NOBODY, _NOBODY, len(program)
        tar.addfile(file, io.BytesIO(program))
    return buffer.getvalue()


_FILE_SECONDS = 600.0
START_SECONDS = 60.0
"""Seconds that a container may take to start."""

_DIAGNOSIS_SECONDS = 10.0
"""Seconds that the engine may take to report the state of a container."""


class Container:
    """One service's container. A :class:`Project` starts and removes it."""

    def __init__(
        self,
        engine: Engine,
        labels: dict[str, str],
        config: ContainerConfig,
        image: Image,
        project: str,
    ) -> None:
        self.config = config
        self.image = image
        self.name = f"{project}-{config.service}" if config.is_server else project
        self.id = ""
        self.fault: str | None = None
        """Why the pool killed this container, if it did."""
        self._engine = engine
        self._labels = labels
        self._project = project
        self._executor: Executor | None = None
        self._capabilities = command_capabilities(config)
        self._not_found = 127
        self._quota = False

    @property
    def user(self) -> str:
        """The user that commands run as unless they ask for another."""
        return self.config.user or self.image.user or "0"

    def can_become(self, user: str) -> bool:
        """Whether a process that runs as the container's user can become another one."""
        same = user == self.user or {user, self.user} <= {"root", "0"}
        return same or {"SETUID", "SETGID"} <= self._capabilities

    @property
    def working_dir(self) -> str:
        return self.config.working_dir or self.image.working_dir

    @property
    def command(self) -> tuple[str, ...]:
        """The container's own command: the configuration's, else the image's."""
        if self.config.command is None and self.config.entrypoint is None:
            return self.image.command
        return self.config.command or ()

    @property
    def process(self) -> tuple[str, ...]:
        """The words of the container's own process."""
        entrypoint = self.config.entrypoint
        return (*(self.image.entrypoint if entrypoint is None else entrypoint), *self.command)

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

    async def write_file(self, path: str, contents: bytes) -> None:
        """Write a file as the container's user; parents are made.

        Raises:
            IsADirectoryError: the path is a directory.
            PermissionError: the user may not write there.
            OSError: the kernel's own reason, or the path is no regular file (``EINVAL``). Nothing
                is raised only if the file then had these contents.
        """
        path = str(PurePosixPath(path))
        words = (self.user, path, str(len(contents)))
        call = await self.request(
            RequestKind.WRITE, words, stdin=contents, timeout=_FILE_SECONDS, limit=0
        )
        _check_file(call, path, "writing")

    async def read_file(self, path: str, name: str) -> bytes:
        """Read a regular file, following links, whoever owns it.

        The executor reads it, so that no program of the container, which a policy may have
        replaced, is involved.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: as their names say.
            OutputLimitExceededError: larger than Inspect's limit for reads.
            OSError: the kernel's own reason, or not a regular file (``EINVAL``).
        """
        if posixpath.basename(path.rstrip("/")) in (".", "..", ""):
            raise _file_error(errno.EISDIR, name)
        call = await self.request(
            RequestKind.READ,
            ("0", str(PurePosixPath(path))),
            timeout=_FILE_SECONDS,
            limit=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE,
        )
        _check_file(call, name, "reading")
        return bytes(call.out.data)

    async def request(self, kind: RequestKind, words: tuple[str, ...], **options: Any) -> Call:
        """Send a request to the executor; the call holds its end. Raises as :meth:`run`."""
        try:
            call = await self.executor.call(kind, words, **options)
        except (ConnectionError, ExecutorSilent) as ex:
            raise await self.failure(ex) from ex
        if call.end is not None and Flag.UNSTOPPED in call.end.flags:
            quietly(self._engine.submit, self.kill, "a command in it could not be stopped")
        return call

    async def open(self, command: Command) -> OpenCommand:
        """Start a command to be read and written while it runs. Raises as :meth:`run`.

        Its limit is that of the standard error that was not read yet; more is dropped.
        """
        executor = self.executor
        words = (command.user or self.user, command.cwd, *command.argv)
        try:
            call = executor.open(words, env=_environment(command), said=command.limit)
        except ConnectionError as ex:
            raise await self.failure(ex) from ex
        return OpenCommand(executor, call, self.failure, lambda: self._result_of(call, command))

    async def failure(self, ex: ConnectionError | ExecutorSilent) -> SandboxError:
        """Return what a failed request means, or raise it where the container's state says it."""
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
        with engine_errors("exec", self.id):
            state = self._engine.api.inspect_container(self.id)["State"]
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

    def get(self, what: str, *, stream: bool = False, **params: Any) -> Any:
        """Return the engine's response about the container, in this thread.

        Raises:
            SandboxEngineError: the engine does not answer, or refuses.
        """
        api = self._engine.api
        url = f"{api.base_url}/v{api.api_version}/containers/{self.id}/{what}"
        with engine_errors(f"{self.config.source}: {what}", self.id):
            response = api.get(url, params=params, stream=stream, timeout=api.timeout)
            response.raise_for_status()
        return response

    def ports(self) -> list[dict[str, Any]]:
        """Describe, as Inspect does, which ports of the engine's host lead here, in this thread."""
        if not self.config.ports:
            return []
        settings = self.get("json").json()["NetworkSettings"]
        return [
            {
                "container_port": int(port.partition("/")[0]),
                "protocol": port.partition("/")[2],
                "mappings": [
                    {"host_ip": end["HostIp"], "host_port": int(end["HostPort"])} for end in ends
                ],
            }
            for port, ends in (settings["Ports"] or {}).items()
            if ends
        ]

    def is_ready(self) -> bool:
        """Return, without waiting, whether it lives and its own command, if any, still runs."""
        return self._executor is not None and self._executor.is_ready()

    @property
    def executor(self) -> Executor:
        """The channel to its process 1, once it was started."""
        assert self._executor is not None, "the container was not started"
        return self._executor

    def kill(self, fault: str) -> None:
        """End the container immediately; later commands fail with ``fault``."""
        self.fault = fault
        quietly(self._engine.api.kill, self.id)

    def keep(self, suffix: str) -> None:
        """Leave the container behind on purpose, with a name that no reaper takes."""
        if self._executor is not None:
            quietly(self._executor.keep)
        quietly(self._engine.api.rename, self.id, self.name + suffix)
        self.name += suffix

    def remove(self) -> bool:
        """Remove it, in this thread; return false when the engine did not answer."""
        if self._executor is not None:
            self._executor.close()
        return not self.id or quietly(
            self._engine.api.remove_container, self.id, force=True, v=True
        )

    def start(self) -> None:
        """Create and start the container, in this thread."""
        with engine_errors(f"{self.config.label}: container start"):
            self._start()

    def _start(self) -> None:
        api = self._engine.api
        config = self.config
        self._not_found = self._engine.not_found_status
        quota = self._quota = self._engine.storage_quota(self.image.id, self._labels)
        host = host_options(config, storage_quota=quota)
        mounts = [self._mount(mount) for mount in config.mounts]
        if config.hardening.read_only:
            # Put the program on a volume of its own instead, which is removed with the container.
            mounts.append({"Type": "volume", "Target": FOLDER})
        host["mounts"] = mounts
        ends = [(self._name_of(net), self._end_of(net)) for net in config.networks]
        self.id = self.name  # if the engine's answer is lost
        if ends:
            host["network_mode"] = ends[0][0]
        created = api.create_container(
            self.image.id,
            entrypoint=[PROGRAM],
            name=self.name,
            labels=self._labels,
            environment=[k if v is None else f"{k}={v}" for k, v in config.environment],
            working_dir=config.working_dir,
            user="0:0",  # of the executor, which starts commands as their own users
            hostname=config.hostname,
            platform=config.platform,
            stdin_open=True,
            stop_signal="SIGKILL",
            # The engine would run the image's own as the executor's user.
            healthcheck={"test": ["NONE"]},
            ports=[tuple(port.split("/")) for port in config.ports],
            networking_config={
                "EndpointsConfig": {
                    name: api.create_endpoint_config(**end) for name, end in ends[:1]
                }
            },
            host_config=api.create_host_config(**host),
        )
        self.id = created["Id"]
        for name, end in ends[1:]:
            api.connect_container_to_network(self.id, name, **end)
        folder = FOLDER if config.hardening.read_only else "/"
        api.put_archive(self.id, folder, pack_program(self.image.architecture, folder))
        streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        self._executor = Executor(AttachedSocket(api.attach_socket(self.id, streams)))
        api.start(self.id)
        self._executor.greet(self._setup(), START_SECONDS, self.id, config.label)

    def _setup(self) -> Setup:
        config, image = self.config, self.image
        command = self.process
        entrypoint = command[: len(command) - len(self.command)]
        holds = config.completes or is_keep_alive(self.command)
        if holds:  # what completes is run when the container is up
            command = (*entrypoint, PROGRAM, "hold") if entrypoint and not config.completes else ()
        environment = {**dict(image.environment), **dict(config.environment)}
        return Setup(
            capabilities=capability_mask(self._capabilities),
            has_home=environment.get("HOME") is not None,
            user=self.user,
            folder=self.working_dir,
            command=command,
            holds=holds,
            bounded=config.limits.disk is not None and not self._quota,
        )

    def _name_of(self, network: Network) -> str:
        return network.name if network.external else f"{self._project}-{network.name}"

    def _end_of(self, network: Network) -> dict[str, Any]:
        # On a network of others it would answer for the containers of other projects.
        own = () if network.external else (self.config.service,)
        return {"aliases": [*own, *network.aliases]}

    def _mount(self, mount: Mount) -> dict[str, Any]:
        source = f"{self._project}-{mount.source}" if mount.own else mount.source
        described = {"Type": mount.kind, "Target": mount.target, "ReadOnly": mount.read_only}
        return {**described, "Source": source} if source else described


def _environment(command: Command) -> list[bytes]:
    return [
        f"{key}={value}".encode("utf-8", "surrogateescape") for key, value in command.env.items()
    ]


def _check_file(call: Call, name: str, doing: str) -> None:
    """Raise unless a file was written or read completely."""
    end = call.end
    assert end is not None
    raise_misuse(end)
    if end.stage is FailedAt.SIZE or Flag.OVERFLOWED in end.flags:
        too_large = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
        raise OutputLimitExceededError(limit_str=too_large, truncated_output=None)
    if end.how is How.DONE:
        return
    if Flag.TIMED_OUT in end.flags:
        raise SandboxSlowError(f"{doing} {name} took more than {_FILE_SECONDS:.0f} seconds")
    raise _file_error(end.error, name) if end.how is How.NOT_STARTED else lost()


def _file_error(number: int, name: str) -> OSError:
    reason = "Not a regular file" if number == errno.EINVAL else os.strerror(number)
    kind = PermissionError if number == errno.EROFS else OSError
    # With a full stop, as in Inspect's Docker provider; the model sees this text.
    return kind(number, f"{reason}.", name)  # Python makes it the subclass of its number
