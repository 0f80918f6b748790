"""Finds, pulls or builds an image, and reads from it what a container needs to know.

Builds and pulls that make no progress are ended, with an error that says why.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from inspect_docker_pool.budget import ImageBudget
from inspect_docker_pool.config import Build, ContainerConfig
from inspect_docker_pool.engine import Engine, engine_address, quietly, typed
from inspect_docker_pool.errors import (
    SandboxConfigError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
)
from inspect_docker_pool.lease import Lease
from inspect_docker_pool.threads import Ticker

BEGIN_SECONDS = 300.0
"""Seconds until an engine begins to answer: to a pull, it answers after the registry did."""

ASK_SECONDS = 60.0
"""Seconds of silence after which the engine is asked whether it lives."""

ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 0.5


class EngineWork:
    """One build or pull with its own connection, watched while it runs.

    Args:
        engine: runs it; when it is closed, the work is cut off, which also ends it there.
        what: a description of the work, for messages.
        silence: seconds without output after which it is ended although the engine lives.

    Raises:
        SandboxEngineError: on leaving: the engine stopped answering.
        SandboxImageError: on leaving: there was no output for too long.
    """

    def __init__(self, engine: Engine, what: str, silence: float) -> None:
        self._engine = engine
        self._what = what
        self._silence = silence
        self._last = time.monotonic()
        self._asked = self._last
        self._socket: socket.socket | None = None
        self._responses: list[Any] = []
        self._fault: SandboxError | None = None
        self._ticker = Ticker("docker_pool_progress", _LOOK_SECONDS, self._look)
        self.client = engine.connect(BEGIN_SECONDS, answered=self._watch)

    def _watch(self, response: Any) -> None:
        self._responses.append(response)
        file = getattr(getattr(response.raw, "_fp", None), "fp", None)
        found = getattr(getattr(file, "raw", None), "_sock", None)
        if isinstance(found, socket.socket):
            found.settimeout(None)  # from here on it is watched
            self._socket = found

    def events(self, stream: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the engine's output, and record that there was some."""
        for event in stream:
            self._last = time.monotonic()
            yield event

    def cut(self, fault: SandboxError) -> None:
        """End the work from another thread."""
        self._fault = self._fault or fault
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._engine.streams.add(self)
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.streams.discard(self)
        self._ticker.stop(1)
        for response in self._responses:  # one that was not read to its end keeps its socket
            response.close()
        self.client.close()
        if self._fault is not None:
            raise self._fault from error

    def _look(self) -> None:
        now = time.monotonic()
        silent = now - self._last
        if silent > self._silence:
            self.cut(SandboxImageError(f"{self._what}: there was no progress for {silent:.0f} s"))
        elif now - max(self._last, self._asked) > ASK_SECONDS:
            if not quietly(self._ask):
                self.cut(
                    SandboxEngineError(
                        f"{self._what}: the Docker engine at {engine_address()} does not answer"
                    )
                )
            self._asked = time.monotonic()

    def _ask(self) -> None:
        client = self._engine.connect(ANSWER_SECONDS)
        try:
            client.ping()
        finally:
            client.close()


BUILD_SILENCE_SECONDS = 3600
"""Seconds that a build step may print nothing, on an engine that otherwise answers."""

PULL_SILENCE_SECONDS = 600
"""Seconds that a pull may make no progress."""


@dataclass(frozen=True)
class Image:
    """The pool's knowledge of an image."""

    id: str
    user: str
    working_dir: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    architecture: str
    """As the engine names it: ``amd64``, ``arm64``, …"""


def reference_of(config: ContainerConfig) -> str:
    """Return the name under which the engine knows a configuration's image."""
    if config.build is not None:
        return config.image or f"inspect-pool/{_slug(config.build)}:latest"
    return config.image or ""


@dataclass(eq=False)
class _Flight:
    """One search for an image, shared by all who need it in the meantime."""

    key: tuple[object, ...]
    urgent: bool
    result: Future[Image] = field(default_factory=Future)
    job: Future[None] | None = None
    """The build or pull, once it is known to be needed."""


class Images:
    """Images of one engine; each is made once, however many wait for it, and examined once.

    Builds and pulls run in the engine's build threads, a few at once and one
    per image; images that somebody waits for come before those made ahead of need.
    """

    def __init__(self, engine: Engine, owner: Lease, budget: ImageBudget) -> None:
        self._engine = engine
        self._owner = owner
        self._budget = budget
        self._known: dict[str, Image] = {}
        self._flights: dict[tuple[object, ...], _Flight] = {}
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def resolve(
        self, config: ContainerConfig, *, refresh: bool = False, urgent: bool = True
    ) -> Future[Image]:
        """Make sure that the image exists; returns immediately.

        Args:
            config: names the image or how to build it.
            refresh: build or pull again as the configuration says, as at the start of a task.
            urgent: whether somebody waits for it.

        Returns:
            The image to come, or a ``SandboxImageError`` (missing and not to be pulled, or
            the build failed) or ``SandboxEngineError`` (the engine does not answer).
        """
        key = (reference_of(config), config.build, config.pull, config.platform, refresh)
        with self._lock:
            flight = self._flights.get(key)
            if flight is not None:
                if urgent and not flight.urgent:
                    flight.urgent = True
                    if flight.job is not None:
                        self._engine.builds.hurry(flight.job)
                return flight.result
            flight = self._flights[key] = _Flight(key, urgent)
            # One waiter may give up; the others still want it.
            flight.result.set_running_or_notify_cancel()
        try:
            looking = self._engine.starts.submit(self._look, flight, config, refresh)
        except RuntimeError as ex:  # the interpreter is shutting down
            self._land(flight, SandboxEngineError(f"image: {ex}"))
        else:
            looking.add_done_callback(lambda job: self._dropped(flight, job))
        return flight.result

    def _look(self, flight: _Flight, config: ContainerConfig, refresh: bool) -> None:
        """Build or pull in another thread if necessary; else examine the image, in this thread."""
        try:
            if not self._must_make(config, refresh):
                self._land(flight, self._examine(reference_of(config)))
                return
            with self._lock:
                builds = self._engine.builds
                submit = builds.submit if flight.urgent else builds.submit_later
                flight.job = submit(self._make, flight, config)
            flight.job.add_done_callback(lambda job: self._dropped(flight, job))
        except BaseException as ex:  # the boundary: passed to all waiters
            self._land(flight, ex)

    def _make(self, flight: _Flight, config: ContainerConfig) -> None:
        reference = reference_of(config)
        with self._lock:
            making = self._making[reference]
        try:
            with making:  # another configuration may build or pull under the same name
                # An image that was there before is somebody else's, unless its name is the pool's.
                before = self._examine(reference).id if self._exists(reference) else None
                ours = before is None or reference.startswith("inspect-pool/")
                what = f"{config.source}: the {'build' if config.build else 'pull'} of {reference}"
                silence = BUILD_SILENCE_SECONDS if config.build else PULL_SILENCE_SECONDS
                with EngineWork(self._engine, what, silence) as progress:
                    if config.build is not None:
                        self._build(config, config.build, reference, progress)
                    else:
                        self._pull(reference, config, progress)
                image = self._examine(reference)
                if ours or self._budget.counts(reference):
                    quietly(self._budget.made, reference, image.id, before=before)
                    if not flight.urgent:
                        self._budget.await_use(reference)
            self._land(flight, image)
        except BaseException as ex:  # the boundary: passed to all waiters
            self._land(flight, ex)

    def _dropped(self, flight: _Flight, job: Future[None]) -> None:
        if job.cancelled():
            self._land(flight, SandboxEngineError("the sandbox pools were closed"))

    def _land(self, flight: _Flight, result: Image | BaseException) -> None:
        with self._lock:
            if self._flights.get(flight.key) is not flight:
                return
            del self._flights[flight.key]
        if isinstance(result, Image):
            flight.result.set_result(result)
            return
        error = result if isinstance(result, SandboxError) else typed(result, "image")
        error.__cause__ = error.__cause__ or (None if error is result else result)
        flight.result.set_exception(error)

    def _must_make(self, config: ContainerConfig, refresh: bool) -> bool:
        reference = reference_of(config)
        missing = not self._exists(reference)
        if config.build is not None:
            return missing or refresh
        if missing and config.pull == "never":
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and may not be "
                "pulled; build or load it first"
            )
        return missing or (refresh and config.pull == "always")

    def _build(self, config: ContainerConfig, build: Build, tag: str, progress: EngineWork) -> None:
        import docker

        log: list[str] = []
        try:
            made = progress.client.build(
                path=build.context,
                dockerfile=build.dockerfile,
                buildargs=dict(build.args),
                target=build.target or "",
                nocache=build.no_cache,
                pull=build.pull,
                tag=tag,
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in progress.events(made):
                log.append(str(event.get("stream") or event.get("error") or ""))
                if "error" in event:
                    raise SandboxImageError(
                        f"{config.source}: the build failed: {event['error']}\n"
                        + "".join(log)[-4000:]
                    )
        except (docker.errors.APIError, TypeError, OSError) as ex:
            if isinstance(ex, ConnectionError):
                raise typed(ex, "build") from ex
            raise SandboxImageError(f"{config.source}: the build failed: {ex}") from ex
        except docker.errors.DockerException as ex:
            raise SandboxImageError(f"{config.source}: the build failed: {ex}") from ex

    def _pull(self, reference: str, config: ContainerConfig, progress: EngineWork) -> None:
        import docker

        try:
            name, _, tag = reference.partition("@") if "@" in reference else (reference, "", "")
            pulled = progress.client.pull(
                name, tag=tag or None, platform=config.platform, stream=True, decode=True
            )
            for event in progress.events(pulled):
                if "error" in event:
                    raise SandboxImageError(
                        f"{config.source}: pulling {reference!r} failed: {event['error']}"
                    )
        except docker.errors.APIError as ex:
            raise SandboxImageError(
                f"{config.source}: image {reference!r} is not on the engine and could not be "
                f"pulled: {ex.explanation or ex}"
            ) from ex
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "pull") from ex

    def _exists(self, reference: str) -> bool:
        import docker

        try:
            self._inspect(reference)
        except docker.errors.NotFound:
            return False
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, "image") from ex
        return True

    def _inspect(self, reference: str) -> dict[str, Any]:
        facts: dict[str, Any] = self._engine.api.inspect_image(reference)  # type: ignore[no-untyped-call]  # the stubs miss its signature
        return facts

    def _examine(self, reference: str) -> Image:
        import docker

        try:
            facts = self._inspect(reference)
            with self._lock:
                known = self._known.get(facts["Id"])
            if known is None:
                known = _describe(facts)
                with self._lock:
                    self._known[known.id] = known
            return known
        except (OSError, docker.errors.DockerException) as ex:
            raise typed(ex, f"image {reference!r}") from ex


def _describe(facts: dict[str, Any]) -> Image:
    config = facts.get("Config") or {}
    if facts.get("Os", "linux") != "linux":
        raise SandboxConfigError(f"docker_pool runs Linux images, not {facts['Os']}")
    return Image(
        id=facts["Id"],
        user=config.get("User") or "",
        working_dir=config.get("WorkingDir") or "/",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        command=tuple(config.get("Cmd") or ()),
        environment=tuple(
            (key, value) for key, _, value in (v.partition("=") for v in config.get("Env") or ())
        ),
        architecture=str(facts.get("Architecture") or "amd64"),
    )


def _slug(build: Build) -> str:
    import hashlib

    return hashlib.sha256(repr(build).encode()).hexdigest()[:16]
