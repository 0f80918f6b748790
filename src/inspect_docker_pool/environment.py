"""The Inspect sandbox ``docker_pool``: a fresh, hardened container that is already running."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, overload

from inspect_ai.util import (
    ComposeConfig,
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from pydantic import BaseModel

from inspect_docker_pool.command import Command, CommandResult
from inspect_docker_pool.compose import (
    CONFIG_FILES,
    forget_compose_files,
    parse_config,
    sample_variables,
    used_variables,
)
from inspect_docker_pool.config import DockerPoolConfig, ProjectConfig
from inspect_docker_pool.container import Container
from inspect_docker_pool.context import (
    EXEC,
    EXECS,
    SampleSetup,
    SandboxMetrics,
    current_setup,
    exceed_bounds,
    measure,
    record_sandbox_metrics,
    sample_setup,
)
from inspect_docker_pool.engine import postpone
from inspect_docker_pool.errors import SandboxConfigError, SandboxError
from inspect_docker_pool.executor import OpenCommand
from inspect_docker_pool.manager import PoolManager, pool_manager
from inspect_docker_pool.pool import Pool
from inspect_docker_pool.project import Project
from inspect_docker_pool.snapshot import Tape, record_on_tape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ahead:
    """What samples of one configuration take; made before they ask for it."""

    config: ProjectConfig
    manager: PoolManager = field(compare=False, repr=False)

    def make(self) -> Future[Pool]:
        """Begin to build or pull the image."""
        return self.manager.make_ahead(self.config)

    def expect(self, count: int) -> None:
        """Start containers for future callers; with 0 nobody waits for them any more."""
        if pool := self.manager.known(self.config):
            pool.expect(count)


class Loan:
    """A project that an episode has. One that is simply dropped is given back, too."""

    def __init__(self, manager: PoolManager, pool: Pool, project: Project) -> None:
        self.manager = manager
        self.project = project
        self._pool = pool
        # The garbage collector runs anywhere, also in a thread that holds a lock of the pools.
        self._finalizer = weakref.finalize(self, postpone, partial(pool.release, project))
        self._finalizer.atexit = False  # the manager closes everything at exit

    def end(self) -> None:
        """Give the project back. Safe to call again."""
        if self._finalizer.detach():
            self._pool.release(self.project)

    def has_ended(self) -> bool:
        return not (self._finalizer.alive or self.project.kept)


@sandboxenv(name="docker_pool")
class DockerPoolSandboxEnvironment(SandboxEnvironment):
    """The container of one of an episode's services. Docs: ``docs/sandboxes.md``."""

    start_is_cancellable = True
    """A caller that is cancelled leaves the queue, and no container is started for it."""

    @classmethod
    def config_files(cls) -> list[str]:
        return list(CONFIG_FILES)

    @classmethod
    def is_docker_compatible(cls) -> bool:
        return True

    @classmethod
    def default_concurrency(cls) -> int | None:
        # The pool has its own maximum, with fair waiting. A number here would also make
        # Inspect delay every episode by up to a second, to interleave tasks.
        return None

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        if "services" in config:
            return ComposeConfig(**config)
        return DockerPoolConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        forget_compose_files()
        pool = await pool_manager().prepare(parse_config(config))
        pool.tend()

    @classmethod
    def record_metrics(cls) -> contextlib.AbstractContextManager[SandboxMetrics]:
        return record_sandbox_metrics()

    @classmethod
    def share_setup(
        cls, files: Mapping[str, bytes], script: bytes | None
    ) -> contextlib.AbstractContextManager[SampleSetup]:
        return sample_setup(files, script)

    @classmethod
    def exceed_bounds(cls) -> contextlib.AbstractContextManager[None]:
        return exceed_bounds()

    @classmethod
    def look_ahead(
        cls,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, Any],
        *,
        files: bool,
        script: bool,
    ) -> tuple[Ahead, bool]:
        parsed = parse_config(config, sample_variables(metadata))
        manager = pool_manager()
        shared = manager.snapshots.expects(parsed, script=script, files=files)
        return Ahead(parsed, manager), shared

    @classmethod
    async def task_init_environment(
        cls, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, str]:
        return used_variables(config, sample_variables(metadata))

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        manager = pool_manager()
        parsed = parse_config(config, sample_variables(metadata))
        setup = current_setup()
        if setup is None:
            return cls._sandboxes(Loan(manager, *await manager.acquire(parsed)))
        part = await manager.snapshots.join(parsed, setup)
        sandboxes = cls._sandboxes(Loan(manager, part.pool, part.project))
        default = sandboxes[parsed.default.service].as_type(cls)
        default.tape = part.tape
        part.sandbox = default
        setup.join(part)
        return sandboxes

    @classmethod
    def _sandboxes(cls, loan: Loan) -> dict[str, SandboxEnvironment]:
        containers = [c for c in loan.project.containers if not c.config.completes]
        return {container.config.service: cls(loan, container) for container in containers}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            environment.as_type(cls).release()

    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool
    ) -> None:
        manager = pool_manager()
        for pool in manager.pools():
            if not cleanup:
                await _keep(manager, pool)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        from inspect_docker_pool.lease import cleanup

        manager = pool_manager()
        removed = await manager.engine.run(cleanup, manager.engine, id)
        print(f"docker_pool: {removed} container{'' if removed == 1 else 's'} removed")

    def __init__(self, loan: Loan, container: Container) -> None:
        super().__init__()
        self._loan = loan
        self._container = container
        self.tape: Tape | None = None
        """Set during a set-up that the episodes of a group share."""

    @property
    def container(self) -> Container:
        """The container behind this sandbox, for diagnosis."""
        return self._container

    def release(self) -> None:
        """Give back all containers of the episode; they are removed in the background."""
        self._loan.end()

    @record_on_tape
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if not cmd:
            return ExecResult(False, 1, "", "requires at least 1 argument: the command\n")
        stdin = input.encode() if isinstance(input, str) else input
        if cmd[0].endswith("/inspect-sandbox-tools") and stdin:
            self._refuse_other_user(stdin)
        command = self._command(cmd, cwd, env, user)
        with self._measure_call():
            outcome = await self._container.run(replace(command, stdin=stdin, timeout=timeout))
        return _result(outcome, timeout)

    async def open_command(
        self,
        cmd: list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> OpenCommand | None:
        """Start a command, to be read and written while it runs.

        Its output is taken as it comes; of what is not read, the last 64 MiB are kept, and of
        standard error the first 10.
        It ends with :meth:`OpenCommand.close`, or with the container.

        Args:
            cmd: its words.
            cwd: its folder; the container's own if not given.
            env: its environment, beside the container's.
            user: who runs it; the container's user if not given.

        Returns:
            The command; ``None`` during a set-up that is shared, in which commands are recorded.
        """
        if self.tape is not None:
            return None
        return await self._container.open(self._command(cmd, cwd, env, user))

    @record_on_tape
    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with self._measure_call():
            await self._container.write_file(self._path(file), data)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        return await self._read_file(file, text)

    @record_on_tape
    async def _read_file(self, file: str, text: bool) -> str | bytes:
        with self._measure_call():
            data = await self._container.read_file(self._path(file), file)
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if self._loan.has_ended():
            # Removal takes a moment, in which the engine still calls the container running.
            raise ConnectionError("the sandbox was given back and is being removed")
        try:
            await self._loan.manager.engine.run(self._container.check)
            ports = await self._loan.manager.engine.run(self._container.ports)
        except SandboxError as ex:
            raise ConnectionError(f"the sandbox is not running: {ex}") from ex
        name = self._container.name
        user_of_commands = user or self._container.user
        # The container's own user is root, which is the executor's before it becomes another.
        login = [] if user_of_commands in ("root", "0") else ["--user", user_of_commands]
        connection = {
            "type": "docker",
            "command": shlex.join(["docker", "exec", "-it", *login, name, "/bin/sh", "-l"]),
            "vscode_command": None
            if user
            else ["remote-containers.attachToRunningContainer", name],
            "ports": ports or None,
            "container": name,
        }
        return SandboxConnection.model_validate(connection)

    def default_polling_interval(self) -> float:
        return 0.2

    def _command(
        self, cmd: list[str], cwd: str | None, env: dict[str, str] | None, user: str | None
    ) -> Command:
        return Command(
            argv=tuple(cmd),
            cwd=self._path(cwd) if cwd else self._container.working_dir,
            env=dict(env or {}),
            user=user or None,
            limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
        )

    def _refuse_other_user(self, request: bytes) -> None:
        """Refuse a request that Inspect's program in the container become a user that it cannot.

        Its answer would be the tool's result, and every episode's tool silently useless.
        """
        try:
            params = json.loads(request)["params"]
            user = params.get("_run_as") or params.get("user")
        except (ValueError, TypeError, LookupError, AttributeError):
            return  # no request of Inspect's
        if isinstance(user, str) and not self._container.can_become(user):
            raise SandboxConfigError(
                f"{self._container.config.source}: user={user!r} of exec_remote(), bash_session() "
                "or text_editor() needs `cap_add: [SETUID, SETGID]`"
            )

    def _path(self, path: str) -> str:
        if path.startswith("/"):
            return path
        return f"{self._container.working_dir.rstrip('/')}/{path}"

    @contextlib.contextmanager
    def _measure_call(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            measure(EXEC, time.monotonic() - begun)
            measure(EXECS)


def _result(outcome: CommandResult, timeout: int | None) -> ExecResult[str]:
    stdout = outcome.stdout.decode(errors="replace")
    stderr = outcome.stderr.decode(errors="replace")
    if outcome.overflowed:
        raise OutputLimitExceededError(
            limit_str=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR,
            truncated_output=stdout + stderr,
        )
    if outcome.timed_out:
        error = TimeoutError(f"Command timed out after {timeout} seconds")
        if stdout or stderr:
            # Inspect shows this to the model beside the message.
            error.truncated_output = stdout + stderr  # type: ignore[attr-defined]
        raise error
    result = ExecResult(
        success=outcome.status == 0, returncode=outcome.status, stdout=stdout, stderr=stderr
    )
    if outcome.denied:
        raise PermissionError(f"Permission denied executing command: {result}")
    return result


async def _keep(manager: PoolManager, pool: Pool) -> None:
    """Leave the containers in use running, and print how to reach and remove them."""
    for project in pool.projects_in_use():
        await manager.engine.run(project.keep)
        for container in project.containers:
            logger.warning(
                "docker_pool: container %s was left running: docker exec -it %s /bin/sh; remove "
                "it with: inspect sandbox cleanup docker_pool %s",
                *[container.name] * 3,
            )
