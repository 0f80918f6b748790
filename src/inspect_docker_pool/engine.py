"""One Docker engine through its SDK: blocking calls in a few threads, with typed errors.

The engine's attached streams are frames of standard output and error over one socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio
import sniffio

from inspect_docker_pool.errors import (
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxStartError,
)
from inspect_docker_pool.threads import Workers

if TYPE_CHECKING:
    from docker import APIClient

P = ParamSpec("P")
T = TypeVar("T")

ENGINE = "http+docker://"
"""The SDK's address of an engine on a unix socket."""

_CALL_THREADS = 16
_START_THREADS = 4
"""Container starts at once; more would only wait for each other."""
_REMOVAL_THREADS = 4
_BUILD_THREADS = 4
"""Builds and pulls at once. They take processor time that running episodes need as well."""


async def settled(future: Future[T]) -> T:
    """Wait for a thread's result under asyncio or trio."""
    if sniffio.current_async_library() == "asyncio":
        return await asyncio.wrap_future(future)
    while not future.done():  # noqa: ASYNC110  (the event is a thread's)
        await anyio.sleep(0.005)
    return future.result()


class Engine:
    """Calls one engine. Thread-safe; usable from any number of event loops.

    Each kind of work has its own threads, so that a command in a running episode never
    waits for builds, starts or removals.
    """

    def __init__(self, *, timeout: float = 120) -> None:
        self._timeout = timeout
        self._local = threading.local()
        self._lock = threading.Lock()
        self._calls = Workers("docker_pool", _CALL_THREADS)
        self.starts = Workers("docker_pool_start", _START_THREADS)
        self.project_starts = Workers("docker_pool_project", 2 * _START_THREADS)
        self.removals = Workers("docker_pool_remove", _REMOVAL_THREADS)
        self.builds = Workers("docker_pool_build", _BUILD_THREADS)
        self._clients: weakref.WeakSet[APIClient] = weakref.WeakSet()
        self._version: str | None = None
        self._facts: dict[str, Any] | None = None
        self._storage_quota: bool | None = None

    @property
    def api(self) -> APIClient:
        """The SDK's client for the calling thread."""
        client: APIClient | None = getattr(self._local, "client", None)
        if client is None:
            client = self.connect(self._timeout)
            self._local.client = client
            with self._lock:
                self._clients.add(client)
        return client

    def connect(self, timeout: float) -> APIClient:
        """Make a client for the caller, who must close it.

        Args:
            timeout: seconds in which some answer must come, again and again.
        """
        import docker

        try:
            _knock()
            kind, adapter = _client_types()
            client = kind(
                version=self._version,
                timeout=max(1, int(timeout)),
                **_environment(),
            )
            self._version = client.api_version
            first = client.get_adapter(ENGINE)
            if hasattr(first, "socket_path"):
                first.close()  # with the connection that asked for the version
                client.mount(ENGINE, adapter(f"http+unix://{first.socket_path}", client.timeout))
            made: APIClient = client
            return made
        except (docker.errors.DockerException, OSError) as ex:
            raise SandboxEngineError(
                f"cannot reach the Docker engine at {engine_address()}: {ex}. Start it, or set "
                "DOCKER_HOST to an engine that this process may use"
            ) from ex

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a short call in one of the threads that serve running episodes."""
        return self._calls.submit(call, *args, **kwargs)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a blocking call; typed errors as in :func:`engine_errors`."""
        return await settled(self.submit(call, *args, **kwargs))

    def storage_quota(self, image: str, labels: dict[str, str]) -> bool:
        """Return whether the engine can limit the size of a container's layer (asked once)."""
        if self._storage_quota is None:
            import docker

            try:
                probe = self.api.create_container(
                    image,
                    ["true"],
                    labels=labels,
                    host_config=self.api.create_host_config(storage_opt={"size": "1g"}),
                )
            except docker.errors.NotFound:
                raise  # the image is gone, which says nothing about the engine
            except docker.errors.APIError:
                self._storage_quota = False
            else:
                self.api.remove_container(probe["Id"], force=True)
                self._storage_quota = True
        return self._storage_quota

    @property
    def facts(self) -> dict[str, Any]:
        """The engine's description of itself (asked once)."""
        if self._facts is None:
            self._facts = dict(self.api.info())
        return self._facts

    @property
    def not_found_status(self) -> int:
        """Exit status that the engine's own exec gives for a command that does not exist.

        Engines before 28 overwrite it (https://github.com/moby/moby/pull/48552).
        """
        major = str(self.facts.get("ServerVersion")).partition(".")[0]
        return 126 if major.isdigit() and int(major) < 28 else 127

    @property
    def filters_calls(self) -> bool:
        """Whether the engine filters the system calls of containers by default."""
        options = [str(option) for option in self.facts.get("SecurityOptions") or ()]
        return any(
            option.startswith("name=seccomp") and "profile=unconfined" not in option
            for option in options
        )

    def close(self, seconds: float = 5.0) -> None:
        """Stop the threads and close the connections. The engine can be used again.

        Args:
            seconds: how long to wait for calls that an engine does not answer.
        """
        for workers in (self.builds, self.starts, self.project_starts, self.removals, self._calls):
            workers.close(seconds)
        with self._lock:
            clients = list(self._clients)
            self._clients.clear()
        for client in clients:
            client.close()
        self._local = threading.local()


def _knock() -> None:
    # The SDK leaves its socket open when nobody answers on the engine's side.
    scheme, _, path = engine_address().partition("://")
    if scheme == "unix":
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(10)
            probe.connect(path)


@cache
def _client_types() -> tuple[Any, Any]:
    """Define a client of the SDK and its connections. The SDK is imported late."""
    import docker
    from docker.transport import UnixHTTPAdapter

    class Client(docker.APIClient):
        def send(self, request: Any, **options: Any) -> Any:
            # The SDK gives pulls and builds no time-out at all.
            return super().send(request, **{**options, "timeout": self.timeout})

    class Adapter(UnixHTTPAdapter):
        """Keeps idle connections for the engine, not for each URL, which names a container."""

        def get_connection(self, url: str | bytes, proxies: Any = None) -> Any:
            return super().get_connection(ENGINE, proxies)

    return Client, Adapter


def _environment() -> dict[str, Any]:
    from docker.utils import kwargs_from_env

    return dict(kwargs_from_env())


def engine_address() -> str:
    """Return the address that the SDK will use, for messages."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def typed(ex: BaseException, what: str, container: str | None = None) -> SandboxError:
    """Turn an error of the SDK into one of this package's sandbox errors."""
    import docker

    if isinstance(ex, SandboxError):
        return ex
    if isinstance(ex, docker.errors.ImageNotFound):
        return SandboxImageError(f"{what}: the image is gone from the engine: {ex.explanation}")
    if isinstance(ex, docker.errors.NotFound) and container is not None:
        return SandboxDiedError(f"{what}: the container is gone: {ex}", container=container)
    if isinstance(ex, docker.errors.APIError):
        if ex.status_code == 409 and container is not None:
            return SandboxDiedError(
                f"{what}: the container is not running: {ex.explanation}", container=container
            )
        text = f"{what}: {ex.explanation or ex}"
        if container is not None:  # in mid-episode: nothing was to be started
            return SandboxEngineError(text, container=container)
        return SandboxStartError(text)
    if isinstance(ex, (OSError, docker.errors.DockerException)):
        return SandboxEngineError(
            f"{what}: the Docker engine at {engine_address()} does not answer: {ex}",
            container=container,
        )
    return SandboxError(f"{what}: {ex}", container=container)


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Run a clean-up call; it is no error if the object or the engine is already gone."""
    import docker

    try:
        call(*args, **kwargs)
    except docker.errors.NotFound:
        return True
    except (docker.errors.DockerException, OSError, SandboxError):
        return False
    return True


STDOUT, STDERR = 1, 2
_CHUNK = 256 * 1024


class Frames:
    """Splits the engine's multiplexed bytes into pieces of the two streams."""

    def __init__(self) -> None:
        self._stream = 0
        self._left = 0
        self._header = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield ``(stream, bytes)`` for the given bytes."""
        view = memoryview(data)
        while view:
            if self._left == 0:
                need = 8 - len(self._header)
                self._header += bytes(view[:need])
                view = view[need:]
                if len(self._header) == 8:
                    self._stream, self._left = struct.unpack(">BxxxL", self._header)
                    self._header = b""
                continue
            piece = bytes(view[: self._left])
            view = view[len(piece) :]
            self._left -= len(piece)
            yield self._stream, piece


class AttachedSocket:
    """A hijacked connection to the engine, used without blocking from any event loop.

    Only one task may receive and one thread may send at a time.
    """

    def __init__(self, wrapped: Any) -> None:
        raw = getattr(wrapped, "_sock", wrapped)
        if type(raw) is not socket.socket:
            raise SandboxEngineError(
                "docker_pool speaks to engines on a unix socket or plain TCP; this one uses "
                f"{type(raw).__name__}. Forward it to a local socket (ssh -L) and set DOCKER_HOST"
            )
        self._wrapped = wrapped  # closing the wrapper's response would close the socket
        self._socket = raw
        self._frames = Frames()
        self.closed = False

    def receive_blocking(self, timeout: float) -> list[tuple[int, bytes]]:
        """Wait in this thread for some output; empty at the end of the stream."""
        self._socket.settimeout(timeout)
        return self._parse(self._socket.recv(_CHUNK))

    def receive_now(self) -> list[tuple[int, bytes]] | None:
        """Return available output: empty at the end of the stream, ``None`` if none came yet."""
        try:
            self._socket.setblocking(False)
            return self._parse(self._socket.recv(_CHUNK))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return []

    def send_now(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as possible without waiting; return how many bytes.

        Raises:
            BrokenPipeError: the other side is gone.
        """
        try:
            self._socket.setblocking(False)
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as ex:
            raise BrokenPipeError(str(ex)) from ex

    async def wait(self, *, writable: bool) -> None:
        """Wait until something can be received, or, if asked, sent."""
        if not writable:
            await anyio.wait_readable(self._socket)
            return
        async with anyio.create_task_group() as tasks:

            async def first(ready: Callable[[socket.socket], Awaitable[None]]) -> None:
                await ready(self._socket)
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, anyio.wait_readable)
            tasks.start_soon(first, anyio.wait_writable)

    def is_open(self) -> bool:
        """Return, without waiting, whether the connection is open on the other side."""
        if self.closed:
            return False
        try:
            self._socket.setblocking(False)
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._socket.close()
            self._wrapped.close()

    def _parse(self, data: bytes) -> list[tuple[int, bytes]]:
        if not data:
            return []
        # A frame header alone is no output, but must not be taken for the end either.
        return list(self._frames.feed(data)) or [(STDOUT, b"")]
