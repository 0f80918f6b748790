"""A command through the engine's own exec: for what the kept-open executor cannot take.

Other users, parallel commands, long input, images where the executor's channel could be
reached. A small shell wrapper waits for a word before it starts the command, so that no
output can come before the SDK has handed over its socket, and tells its process id, so
that the command's tree can be killed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import anyio
from inspect_ai.util import SandboxUnavailableError

from inspect_tinker_plugin.errors import SandboxDiedError, SandboxError
from inspect_tinker_plugin.sandboxes.engine import Engine, quietly, settled, typed
from inspect_tinker_plugin.sandboxes.executor import GRACE_SECONDS, odd_names, script
from inspect_tinker_plugin.sandboxes.job import Capture, Job, Outcome
from inspect_tinker_plugin.sandboxes.stream import STDERR, AttachedSocket

SHELL = "/bin/sh"
_WRAPPER = r"""
IFS= read -r _g || exit 125
unset _g
case $1 in
*/*) if [ -e "$1" ] && { [ -d "$1" ] || [ ! -x "$1" ]; }; then
  printf '\036d%s %s\n' "$0" "$$"; printf 'exec: "%s": permission denied\n' "$1" >&2; exit 126
fi ;;
esac
printf '\036p%s %s\n' "$0" "$$"
exec "$@"
"""

_TERMINATE = "kill -s TERM -- -$P 2>/dev/null; :"
_KILL_TREE = "_tree"


@dataclass
class _Running:
    """One exec of the engine."""

    id: str
    channel: AttachedSocket
    nonce: str
    out: Capture
    err: Capture
    head: bytearray = field(default_factory=bytearray)
    pid: int | None = None
    denied: bool = False

    def feed(self, stream: int, piece: bytes) -> None:
        if stream == STDERR:
            self.err.add(piece)
        elif self.pid is not None:
            self.out.add(piece)
        else:
            self.head += piece
            first, newline, rest = bytes(self.head).partition(b"\n")
            for kind in (b"p", b"d"):
                mark = b"\x1e" + kind + self.nonce.encode() + b" "
                if newline and first.startswith(mark):
                    self.pid, self.denied = int(first[len(mark) :]), kind == b"d"
                    self.out.add(rest)

    @property
    def overflowed(self) -> bool:
        return self.out.overflowed or self.err.overflowed


class DirectExec:
    """The engine's exec for one container."""

    def __init__(self, engine: Engine, container: str, odd: Mapping[str, str]) -> None:
        self._engine = engine
        self._container = container
        self._odd = odd
        """Variables of the container that the wrapper's shell would drop."""

    async def run(self, job: Job) -> Outcome:
        """Run a command.

        Raises:
            SandboxDiedError: the container is not running.
            SandboxUnavailableError: the container runs but the engine could start nothing
                in it (out of processes, for example).
            SandboxEngineError: the engine does not answer.
        """
        started = await self._start(job)
        if isinstance(started, Outcome):
            return started
        timed_out = False
        try:
            with anyio.move_on_after(job.timeout) as scope:
                await self._communicate(started, job.stdin)
            timed_out = scope.cancelled_caught
            if timed_out or started.overflowed:
                await self._kill(started, job.user, gently=timed_out)
            return await self._outcome(started, timed_out, job.user)
        except BaseException as ex:
            if not isinstance(ex, (SandboxError, SandboxUnavailableError)):
                with anyio.CancelScope(shield=True):
                    await self._abandon(started, job.user)
            raise
        finally:
            started.channel.close()

    async def _start(self, job: Job) -> _Running | Outcome:
        future = self._engine.submit(self._start_blocking, job)
        try:
            return await settled(future)
        except SandboxError:
            raise
        except BaseException:
            # Without its word the wrapper never starts the command.
            future.add_done_callback(_hang_up)
            raise

    def _start_blocking(self, job: Job) -> _Running | Outcome:
        import docker

        nonce = secrets.token_hex(16)
        odd = {**self._odd, **{key: job.env[key] for key in odd_names(job.env)}}
        setting = ["/usr/bin/env", *(f"{key}={value}" for key, value in odd.items())]
        command = [*(setting if odd else ()), *job.command]
        api = self._engine.api
        try:
            created = api.exec_create(
                self._container,
                [SHELL, "-c", _WRAPPER, nonce, *command],
                stdin=True,
                user=job.user or "",
                environment=job.env or None,
                workdir=job.cwd,
            )
            wrapped = api.exec_start(created["Id"], socket=True)
        except docker.errors.APIError as ex:
            text = str(ex.explanation or ex)
            if "unable to find user" in text or "unable to find group" in text:
                return Outcome(status=126, stdout=b"", stderr=text.encode())
            raise self._diagnose(text) from ex
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "exec", self._container) from ex
        limits = Capture(job.limit), Capture(job.limit)
        return _Running(created["Id"], AttachedSocket(wrapped), nonce, *limits)

    async def _communicate(self, running: _Running, stdin: bytes | None) -> None:
        channel = running.channel

        async def write() -> None:
            try:
                await channel.send(b"go\n" + (stdin or b""))
            except BrokenPipeError:
                return  # the command ended without reading all
            channel.end_input()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            while pieces := await channel.receive():
                for stream, piece in pieces:
                    running.feed(stream, piece)
                if running.overflowed:
                    break
            tasks.cancel_scope.cancel()

    async def _outcome(self, running: _Running, timed_out: bool, user: str | None) -> Outcome:
        status = await self._engine.run(self._status, running)
        if not timed_out and not running.overflowed:
            if running.pid is None:
                said = (bytes(running.head) + bytes(running.err.data)).decode(errors="replace")
                return await self._engine.run(self._not_started, said.strip(), user)
            if status > 128 and not running.out.data and not running.err.data:
                await self._engine.run(self.check)
        return Outcome(
            status=status,
            stdout=bytes(running.out.data),
            stderr=bytes(running.err.data),
            timed_out=timed_out,
            overflowed=running.overflowed,
            denied=running.denied,
        )

    def _status(self, running: _Running) -> int:
        import docker

        try:
            status = self._engine.api.exec_inspect(running.id)["ExitCode"]
        except docker.errors.NotFound as ex:
            raise self._diagnose(str(ex)) from ex
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "exec", self._container) from ex
        return 137 if status is None else int(status)

    def check(self) -> None:
        """Look, in this thread, whether the container runs.

        Raises:
            SandboxDiedError: it does not; the message says why as far as the engine knows.
            SandboxEngineError: the engine does not answer.
        """
        import docker

        try:
            state = self._engine.api.inspect_container(self._container)["State"]
        except docker.errors.NotFound as ex:
            raise SandboxDiedError(
                "the container is gone: somebody removed it", container=self._container
            ) from ex
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "exec", self._container) from ex
        if not state["Running"]:
            why = "out of memory" if state["OOMKilled"] else f"exit status {state['ExitCode']}"
            raise SandboxDiedError(
                f"the container ended ({why}) while an episode used it. Raise its memory or "
                "process limit if the task needs more; otherwise run the episode again",
                container=self._container,
            )

    def _not_started(self, said: str, user: str | None) -> Outcome:
        """Tell a request that nobody could fulfil from a sandbox that does not work."""
        if not said and user:
            said = self._refusal(user)
        if "chdir to cwd" in said or "unable to find" in said:
            return Outcome(status=126, stdout=b"", stderr=said.encode())
        raise self._diagnose(said)

    def _refusal(self, user: str) -> str:
        """Ask what the engine has against a user; the SDK's socket loses that message."""
        import docker

        api = self._engine.api
        try:
            probe = api.exec_create(self._container, [SHELL, "-c", ":"], user=user)
            api.exec_start(probe["Id"], detach=True)
        except docker.errors.APIError as ex:
            return str(ex.explanation or ex)
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "exec", self._container) from ex
        return ""

    def _diagnose(self, text: str) -> Exception:
        try:
            self.check()
        except SandboxError as ex:
            return ex
        return SandboxUnavailableError(f"the sandbox could not start a command: {text}")

    async def _kill(self, running: _Running, user: str | None, *, gently: bool) -> None:
        ended = anyio.Event()

        async def drain() -> None:
            # The engine handles a container's events one by one, and the end of this exec
            # only once its output is taken: unread output would block the kill as well.
            while pieces := await running.channel.receive():
                for stream, piece in pieces:
                    running.feed(stream, piece)
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            for step in ([_TERMINATE] if gently else []) + [_KILL_TREE]:
                try:
                    done = await self._engine.run(self._kill_blocking, running, user, step)
                except SandboxError:
                    done = False
                if done:
                    with anyio.move_on_after(GRACE_SECONDS):
                        await ended.wait()
            stopped = done  # of the last step, which leaves nothing of the tree
            tasks.cancel_scope.cancel()
        if not stopped:
            await self._engine.run(quietly, self._kill_container)
            raise SandboxDiedError(
                "a command could not be stopped, so its container was killed",
                container=self._container,
            )

    async def _abandon(self, running: _Running, user: str | None) -> None:
        try:
            await self._kill(running, user, gently=False)
        except SandboxError:
            return

    def _kill_blocking(self, running: _Running, user: str | None, step: str) -> bool:
        if running.pid is None:
            return False
        api = self._engine.api
        text = f"P=$1\n{script('executor.sh')}\n{step}"
        try:
            created = api.exec_create(
                self._container, [SHELL, "-c", text, "sh", str(running.pid)], user=user or ""
            )
            api.exec_start(created["Id"])
            return bool(api.exec_inspect(created["Id"])["ExitCode"] == 0)
        except Exception as ex:
            raise typed(ex, "kill", self._container) from ex

    def _kill_container(self) -> None:
        self._engine.api.kill(self._container)


def _hang_up(future: Future[_Running | Outcome]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    started = future.result()
    if isinstance(started, _Running):
        started.channel.close()
