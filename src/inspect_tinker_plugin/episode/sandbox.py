"""The sandboxes of one episode: started as Inspect starts them in their places, always released.

Places limit how many sandboxes of one provider are alive at once in this process. Each provider is
prepared once per process, and cleaned up at interpreter exit.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import anyio
from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.episode.boundaries import CANCEL_GRACE, Operations
from inspect_tinker_plugin.episode.task import PreparedTask
from inspect_tinker_plugin.processes.loops import (
    GivenUpError,
    Places,
    run_bounded,
    run_uninterrupted,
)
from inspect_tinker_plugin.processes.workers import kill_processes_in

logger = getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Startup:
    """What one provider sets up once per process before its first sandbox."""

    spec: SandboxEnvironmentSpec
    run_dir: str
    env: tuple[tuple[str, str], ...]


class SandboxLifecycle:
    """Providers of this process: each is started once, and cleaned up at interpreter exit.

    Inspect keeps what a provider must clean up (running compose projects, generated
    files) on a state object that an eval owns; here, one such object serves the process.
    """

    def __init__(self) -> None:
        self.state = internals.SandboxLifecycleState()
        self._started: dict[_Startup, asyncio.Task[None]] = {}
        self._waiting: Counter[asyncio.Task[None]] = Counter()
        self._pid = os.getpid()
        atexit.register(self.shutdown)

    async def ensure_started(self, startup: _Startup) -> None:
        """Run a provider's ``task_init`` once; concurrent callers wait for the same run.

        It runs in its own task: a caller that is cancelled does not end it for the others. The
        last one does, and waits for it: a command that is being started when the loop ends is
        waited for without end (CPython's ``_connect_pipes`` is cancelled with everything else).
        """
        started, loop = self._started.get(startup), asyncio.get_running_loop()
        elsewhere = started is not None and not started.done() and started.get_loop() is not loop
        if started is None or elsewhere or started.cancelling():
            self._started[startup] = started = loop.create_task(self._start(startup))
            started.add_done_callback(lambda task: self._forget_failed(startup, task))
        if started.done():
            started.result()  # it may belong to another loop
            return
        self._waiting[started] += 1
        try:
            await asyncio.shield(started)
        finally:
            self._waiting[started] -= 1
            if not self._waiting[started]:
                del self._waiting[started]
                if started.cancel():
                    await run_uninterrupted(lambda: asyncio.wait([started], timeout=RELEASE_GRACE))

    async def _start(self, startup: _Startup) -> None:
        provider = internals.registry_find_sandboxenv(startup.spec.type)
        await InSurroundings(
            provider.task_init("startup", startup.spec.config), startup.run_dir, dict(startup.env)
        )

    def _forget_failed(self, startup: _Startup, task: asyncio.Task[None]) -> None:
        """Let the next caller try again."""
        if _has_failed(task) and self._started.get(startup) is task:
            del self._started[startup]

    def shutdown(self) -> None:
        """Run every provider's ``task_cleanup``; nothing may be left behind at exit."""
        started, self._started = self._started, {}
        if os.getpid() != self._pid:
            return
        for startup, task in started.items():
            if not task.done() or _has_failed(task):
                continue
            try:
                asyncio.run(self._cleanup(startup))
            except Exception as error:
                logger.warning("could not clean up sandbox %r: %s", startup.spec.type, error)

    async def _cleanup(self, startup: _Startup) -> None:
        internals._lifecycle_state.set(self.state)
        provider = internals.registry_find_sandboxenv(startup.spec.type)
        with internals.chdir(startup.run_dir):
            await provider.task_cleanup("shutdown", startup.spec.config, True)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


_lifecycle: SandboxLifecycle | None = None


def sandbox_lifecycle() -> SandboxLifecycle:
    """Return the lifecycle of this process, made on first use (and again after a fork)."""
    global _lifecycle
    if _lifecycle is None or _lifecycle._pid != os.getpid():
        _lifecycle = SandboxLifecycle()
    return _lifecycle


async def prepare_provider(
    provider: type[SandboxEnvironment], spec: SandboxEnvironmentSpec, sample: Sample, run_dir: str
) -> None:
    """Bind the process's provider state to this context; start the provider on first use."""
    lifecycle = sandbox_lifecycle()
    internals._lifecycle_state.set(lifecycle.state)
    # The working directory belongs to the whole process, so it is changed only when necessary.
    relative = isinstance(spec.config, str) and not os.path.isabs(spec.config)
    found = provider.task_init_environment(spec.config, sample.metadata or {})
    env = await (InSurroundings(found, run_dir, {}) if relative else found)
    startup = _Startup(spec=spec, run_dir=run_dir, env=tuple(sorted(env.items())))
    await lifecycle.ensure_started(startup)


surroundings = threading.RLock()
"""Held while the working directory or environment is another: threads have their own loops."""


@dataclass(frozen=True)
class InSurroundings(Awaitable[T]):
    """Runs work with its own working directory and environment, which no other task sees.

    Both belong to the whole process. They are changed only while the work itself runs, and
    restored whenever it waits, so whatever runs in between finds its own.
    """

    work: Awaitable[T]
    folder: str
    env: dict[str, str]

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self.work.__await__()
        thrown: BaseException | None = None
        while True:
            with surroundings, ExitStack() as stack:
                stack.enter_context(internals.chdir(self.folder))
                stack.enter_context(internals.environ_vars(self.env))
                try:
                    waits_for = next(steps) if thrown is None else steps.throw(thrown)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
            try:
                yield waits_for
                thrown = None
            except BaseException as error:
                thrown = error


_places: dict[str, Places] = {}
_lock = threading.Lock()


def sandbox_places(provider: str) -> Places:
    """Return this process's places for a provider, shared by all of its datasets.

    Inspect's ``concurrency()`` is reset whenever an eval starts, which would lift the bound.
    """
    with _lock:
        return _places.setdefault(provider, Places())


START_GRACE = 60.0
"""Seconds that a cancelled episode waits for its sandbox to come up, in order to release it:
killed half-way, ``docker compose`` leaves behind what the engine goes on creating for it."""

RELEASE_GRACE = 10.0
"""Seconds that a start or release has to end after it was cancelled for taking too long."""


@dataclass(frozen=True)
class SampleSandboxes:
    """The sandboxes of an episode, with the operations that run in them."""

    environments: dict[str, SandboxEnvironment] = field(default_factory=dict)
    operations: Operations = field(default_factory=Operations)


CUT_OFF_GRACE = 2.5
"""Seconds that a command of ``local`` has to end after its time-out; Inspect kills it after two."""


class OnThisMachine:
    """Ends what a ``local`` sandbox leaves running, and removes its set-up script.

    A command that is cut off ends with its children, for whose end Inspect waits if they hold its
    output open; the episode ends what else runs in the sandbox's folder.

    Args:
        script: The set-up script, which Inspect removes only when it has run well.
    """

    def __init__(self, script: bytes | None) -> None:
        self._script = script
        self._watched: dict[str, SandboxEnvironment] = {}
        self._files: list[Path] = []

    def watch(self, environment: SandboxEnvironment) -> None:
        """Note from now on what is written and started."""
        execute, write = environment.exec, environment.write_file
        folder: str = vars(environment)["directory"].name

        async def exec(cmd: list[str], *args: Any, **options: Any) -> Any:
            work = asyncio.ensure_future(execute(cmd, *args, **options))
            began, timeout = time.time(), options.get("timeout")  # which Inspect gives by name
            try:
                await _wait_or_kill(work, folder, began, timeout)
            except asyncio.CancelledError:
                work.cancel()
                try:
                    with anyio.CancelScope(shield=True):
                        await _wait_or_kill(work, folder, began, 0)
                finally:
                    work.cancel()  # again, if this was given up: see bounded()
                raise
            return work.result()

        async def write_file(file: str, contents: str | bytes) -> None:
            if contents is self._script:
                self._files.append(Path(file))
            await write(file, contents)

        self._watched[folder] = environment
        vars(environment).update(exec=exec, write_file=write_file)

    def clean_up(self) -> None:
        """Kill the processes and remove the script."""
        for folder, environment in self._watched.items():
            for name in ("exec", "write_file"):  # which refer to the environment
                vars(environment).pop(name, None)
            kill_processes_in(folder)
        for file in self._files:
            file.unlink(missing_ok=True)


async def _wait_or_kill(
    work: asyncio.Future[Any], folder: str, began: float, timeout: float | None
) -> None:
    """Wait for a command; kill what has run in its folder for longer than its time-out."""
    allowed = None if timeout is None else timeout + CUT_OFF_GRACE
    await asyncio.wait([work], timeout=allowed)
    while allowed is not None and not work.done():
        kill_processes_in(folder, since=began, until=time.time() - allowed)
        await asyncio.wait([work], timeout=0.5)
    if not work.cancelled():
        work.exception()  # which the caller may not ask for


class SandboxHolder:
    """Owns the sandboxes of one sample, from their start to their single release.

    Inspect is given this in place of the provider. It starts the sandboxes in their own
    task, which no cancellation reaches, and ignores Inspect's own clean-up after failed
    files or set-up: that clean-up says ``interrupted``, on which the ``docker`` provider leaves its
    containers to the end of an eval, and an episode has no eval around it.
    """

    def __init__(
        self, provider: type[SandboxEnvironment], *, patience: float, script: bytes | None = None
    ) -> None:
        self.__name__ = provider.__name__  # Inspect names the provider in its errors
        self._provider = provider
        self._patience = patience
        self._here = (
            OnThisMachine(script) if provider.__name__ == "LocalSandboxEnvironment" else None
        )
        self._arguments: tuple[str, Any] = ("", None)
        self._starting: asyncio.Task[dict[str, SandboxEnvironment]] | None = None
        self._released = False
        self._lock = asyncio.Lock()

    async def sample_init(
        self, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Start the sandboxes; if the caller is cancelled, ``release()`` removes them."""
        self._arguments = (task_name, config)
        context = copy_context()
        start: Any = self._provider.sample_init(task_name, config, metadata)
        self._starting = asyncio.get_running_loop().create_task(start, context=context)
        environments = await asyncio.shield(self._starting)
        for variable, value in context.items():  # what a provider binds is meant for its sample
            if variable.get(None) is not value:
                variable.set(value)
        for environment in environments.values():
            if self._here is not None:
                self._here.watch(environment)
        return environments

    async def sample_cleanup(self, *_: object) -> None:
        """Do nothing: ``release()`` cleans up."""

    async def release(self) -> None:
        """Release what was started, once; a second time only after a cancellation half-way.

        Raises:
            TimeoutError: It took too long and was abandoned.
            Exception: What the provider raised.
        """
        async with self._lock:
            if self._released:
                return
            try:
                await self._release()
            except Exception:
                self._released = True
                raise
            finally:
                if self._here is not None:
                    self._here.clean_up()
            self._released = True

    async def _release(self) -> None:
        starting = self._starting
        if starting is None:
            return
        # A provider may declare that its start can be cancelled at any point and leaves nothing.
        cancellable = getattr(self._provider, "start_is_cancellable", False)
        if not starting.done() and not cancellable:
            await asyncio.wait([starting], timeout=START_GRACE)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting], timeout=RELEASE_GRACE)
            if not starting.done():
                raise self._too_slow(f"still starting {RELEASE_GRACE:g} s after it was cancelled")
        if _has_failed(starting):
            return  # a provider cleans up after a failed start itself
        cleaning: Any = self._provider.sample_cleanup(*self._arguments, starting.result(), False)
        try:
            await run_bounded(cleaning, self._patience, grace=RELEASE_GRACE)
        except GivenUpError:
            raise self._too_slow(
                f"not released within {self._patience:g} s (stop_timeout)"
            ) from None

    def _too_slow(self, what: str) -> TimeoutError:
        return TimeoutError(
            f"the sandbox of provider {self.__name__} was {what}. It may still be there; its "
            "place is given to the next episode"
        )


@asynccontextmanager
async def sample_sandboxes(
    task: PreparedTask,
    spec: SandboxEnvironmentSpec,
    sample: Sample,
    *,
    metrics: Metrics,
    doing: Callable[[str], None],
    beyond_bound: bool = False,
) -> AsyncIterator[SampleSandboxes]:
    """Start the sandboxes of a sample, with its files and set-up script, and release them.

    Does what ``sandboxenv_context`` of Inspect does, with three differences: no
    random delay before the start (it spreads the tasks of an eval and would only cost here),
    start and release are never interrupted, and a provider's one-time set-up happens on
    first use.
    """
    provider = internals.registry_find_sandboxenv(spec.type)
    started = time.perf_counter()
    doing(f"preparing sandbox {spec.type!r}")
    await prepare_provider(provider, spec, sample, task.run_dir)
    bound = task.options.max_sandboxes
    if beyond_bound:
        bound = None
    elif bound is None:
        bound = provider.default_concurrency()
    places = sandbox_places(spec.type)
    doing(
        f"waiting for a place for its sandbox ({spec.type!r}, max_sandboxes={bound}, "
        f"{places.alive} alive)"
    )
    async with places.place(bound):
        doing(f"starting sandbox {spec.type!r}, with files and set-up script")
        files, setup = await _sample_files(sample)
        holder = SandboxHolder(provider, patience=task.options.stop_timeout, script=setup)
        operations = Operations()
        provider_like: Any = holder
        try:
            share_setup = getattr(provider, "share_setup", lambda *_: nullcontext())
            exceed = (
                getattr(provider, "exceed_bounds", nullcontext) if beyond_bound else nullcontext
            )
            with exceed(), share_setup(files, setup) as shared:
                environments = await internals.init_sandbox_environments_sample(
                    sandboxenv_type=provider_like,
                    task_name=internals.registry_unqualified_name(task.name),
                    config=spec.config,
                    files=files,
                    setup=setup,
                    metadata={**(sample.metadata or {}), "__sample_id__": sample.id},
                )
            if shared is not None:
                await shared.finish()
            metrics["sandbox/acquire_s"] = time.perf_counter() - started
            with operations.watch(environments.values()):
                yield SampleSandboxes(environments, operations)
        finally:
            await run_uninterrupted(lambda: _leave(holder, operations))


async def _leave(holder: SandboxHolder, operations: Operations) -> None:
    """Release the sandboxes, and see to it that nothing is running in them any more.

    What is left running is cancelled first: it may hold what the release waits for, as Inspect's
    limit of subprocesses does. The rest ends because the sandbox is gone.
    """
    operations.cut_off()
    await operations.wait_for_all(CANCEL_GRACE)
    try:
        await holder.release()
    finally:
        if not await operations.wait_for_all(RELEASE_GRACE):
            logger.warning(
                "%s of a sandbox of provider %s still ran %g s after its release",
                counted(operations.running, "operation"),
                holder.__name__,
                RELEASE_GRACE,
            )


async def _sample_files(sample: Sample) -> tuple[dict[str, bytes], bytes | None]:
    files: dict[str, bytes] = {}
    for path, contents in internals.resolve_sample_files(sample.files or {}).items():
        files[path] = await internals.read_sandboxenv_file(contents)
    setup: bytes | None = None
    if sample.setup:
        setup = await internals.read_sandboxenv_file(sample.setup)
        if not setup.decode().strip().startswith("#!"):
            setup = b"#!/usr/bin/env bash\n\n" + setup
    return files, setup
