"""One Docker engine through its SDK: blocking calls in a few threads, with typed errors."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import anyio
import sniffio

from inspect_docker_pool.errors import (
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxStartError,
)

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
_IMAGE_THREADS = 32
"""Searches for images at once; most of them wait while a few build or pull."""

CLOSED = "the sandbox pools were closed"


async def wait_for_thread(future: Future[T]) -> T:
    """Wait for a thread's result under asyncio or trio."""
    if sniffio.current_async_library() == "asyncio":
        return await asyncio.wrap_future(future)
    while not future.done():  # noqa: ASYNC110  (the event is a thread's)
        await anyio.sleep(0.005)
    return future.result()


class _Job(Generic[T]):
    """A call, and the future for its result, which no waiter can cancel for the others."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()

    def run(self) -> None:
        try:
            result = self.call()
        except BaseException as ex:  # the boundary: passed to the waiter
            self.future.set_exception(ex)
        else:
            self.future.set_result(result)


_postponed: SimpleQueue[Callable[[], object]] = SimpleQueue()


def undo(error: BaseException | None, work: Callable[[], object]) -> None:
    """Undo what a coroutine has begun, when it ends with an error or otherwise.

    A coroutine that nothing refers to any more is closed by a garbage collection, in whatever
    thread that runs, perhaps one that holds the lock which ``work`` takes. So the work of a closed
    one is left to the pools' keeper.
    """
    cause = error
    while cause is not None and not isinstance(cause, GeneratorExit):
        cause = cause.__context__  # anyio's scopes raise another error outside of their loop
    if cause is None:
        work()
    else:
        postpone(work)


def postpone(work: Callable[[], object]) -> None:
    """Leave work to the pools' keeper. Safe in any thread, whatever locks it holds."""
    _postponed.put(work)


def do_postponed() -> None:
    """Do what was postponed."""
    while True:
        try:
            work = _postponed.get_nowait()
        except Empty:
            return
        work()


class Workers:
    """Up to ``most`` daemon threads, started on demand.

    Not a ``ThreadPoolExecutor``: the interpreter joins that one's threads at exit, with all
    queued calls, and an engine that does not answer would delay the exit.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._wake = threading.Condition()
        self._urgent: deque[_Job[Any]] = deque()
        self._later: deque[_Job[Any]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closing = False
        self._pid = os.getpid()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call before all calls that can wait."""
        return self._add(self._urgent, partial(call, *args, **kwargs))

    def submit_later(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call when nothing urgent waits."""
        return self._add(self._later, partial(call, *args, **kwargs))

    def close(self, seconds: float) -> None:
        """Fail queued calls and wait this long for running ones. Can be used again afterwards."""
        with self._wake:
            self._closing = True
            dropped = [*self._urgent, *self._later]
            self._urgent.clear()
            self._later.clear()
            threads = list(self._threads)
            self._wake.notify_all()
        for job in dropped:
            job.future.set_exception(SandboxEngineError(CLOSED))
        deadline = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._wake:
            self._closing = False

    def _add(self, queue: deque[_Job[Any]], call: Callable[[], T]) -> Future[T]:
        job = _Job(call)
        if os.getpid() != self._pid:  # what a forked child has inherited is its parent's
            job.future.set_exception(SandboxEngineError("the sandbox belongs to another process"))
            return job.future
        with self._wake:
            queue.append(job)
            if len(self._urgent) + len(self._later) <= self._idle:
                self._wake.notify()
            elif len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is shutting down
                    queue.remove(job)
                    raise
                self._threads.add(thread)
        return job.future

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            del job  # a waiting thread must not keep a caller's objects alive

    def _next(self) -> _Job[Any] | None:
        with self._wake:
            while not (self._urgent or self._later):
                if self._closing:
                    self._threads.discard(threading.current_thread())
                    return None
                self._idle += 1
                try:
                    self._wake.wait()
                finally:
                    self._idle -= 1
            return (self._urgent or self._later).popleft()


class Ticker:
    """Makes a call every given number of seconds in its own daemon thread."""

    def __init__(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self._seconds = seconds
        self._call = call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the calls; wait this long for a running one."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self._call()
            except Exception:
                continue  # the engine is away; callers get the typed error


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
        self.images = Workers("docker_pool_image", _IMAGE_THREADS)
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
        from docker.utils import kwargs_from_env

        try:
            # Once it was there, an engine that is away is the error of the call that needs it.
            if self._version is None:
                _knock()
            kind, adapter = _client_types()
            client = kind(version=self._version, timeout=max(1, int(timeout)), **kwargs_from_env())
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
        """Await a blocking call."""
        return await wait_for_thread(self.submit(call, *args, **kwargs))

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
        for workers in (self.images, self.starts, self.project_starts, self.removals, self._calls):
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


def engine_address() -> str:
    """Return the address that the SDK will use, for messages."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def translate_error(ex: BaseException, what: str, container: str | None = None) -> SandboxError:
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


@contextmanager
def engine_errors(what: str, container: str | None = None) -> Iterator[None]:
    """Turn errors inside, which are mostly the SDK's, into sandbox errors."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as ex:
        raise translate_error(ex, what, container) from ex


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
