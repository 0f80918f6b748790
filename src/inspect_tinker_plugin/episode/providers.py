"""Sandbox providers of this process: each prepared once, and cleaned up at interpreter exit."""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Awaitable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec

from inspect_tinker_plugin import inspect_internals as internals

logger = getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Startup:
    """What one provider sets up once per process before its first sandbox."""

    spec: SandboxEnvironmentSpec
    run_dir: str
    env: tuple[tuple[str, str], ...]


class SandboxLifecycle:
    """Provider state of this process: started once, cleaned up at interpreter exit.

    Inspect keeps what a provider must clean up (running compose projects, generated
    files) on a state object that an eval owns. Episodes have no eval around them, so one
    such object serves the process; each process of a pool has its own.
    """

    def __init__(self) -> None:
        self.state = internals.SandboxLifecycleState()
        self._started: dict[_Startup, asyncio.Task[None]] = {}
        self._pid = os.getpid()
        atexit.register(self.shutdown)

    async def ensure_started(self, startup: _Startup) -> None:
        """Run a provider's ``task_init`` once; concurrent callers wait for the same run.

        It runs in its own task: a caller that is cancelled does not end it for the others.
        """
        started = self._started.get(startup)
        if started is None or (not started.done() and not _same_loop(started)):
            started = asyncio.ensure_future(self._start(startup))
            self._started[startup] = started
            started.add_done_callback(lambda task: self._forget_failed(startup, task))
        if not started.done():
            await asyncio.shield(started)
        else:
            started.result()

    async def _start(self, startup: _Startup) -> None:
        provider = internals.registry_find_sandboxenv(startup.spec.type)
        await in_surroundings(
            provider.task_init("startup", startup.spec.config), startup.run_dir, dict(startup.env)
        )

    def _forget_failed(self, startup: _Startup, task: asyncio.Task[None]) -> None:
        """Let the next caller try again."""
        failed = task.cancelled() or task.exception() is not None
        if failed and self._started.get(startup) is task:
            del self._started[startup]

    def shutdown(self) -> None:
        """Run every provider's ``task_cleanup``; nothing may be left behind at exit."""
        started, self._started = self._started, {}
        if os.getpid() != self._pid:
            return
        for startup, task in started.items():
            if not task.done() or task.cancelled() or task.exception() is not None:
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


def _same_loop(task: asyncio.Task[None]) -> bool:
    return task.get_loop() is asyncio.get_running_loop()


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
    env = await (in_surroundings(found, run_dir, {}) if relative else found)
    await lifecycle.ensure_started(
        _Startup(spec=spec, run_dir=run_dir, env=tuple(sorted(env.items())))
    )


def in_surroundings(work: Awaitable[T], folder: str, env: dict[str, str]) -> Awaitable[T]:
    """Run work with its own working directory and environment, which no other task sees.

    Both belong to the whole process. They are changed only while the work itself runs, and
    restored whenever it waits, so whatever runs in between finds its own.
    """
    return _Surroundings(work, folder, env)


@dataclass(frozen=True)
class _Surroundings(Awaitable[T]):
    work: Awaitable[T]
    folder: str
    env: dict[str, str]

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self.work.__await__()
        thrown: BaseException | None = None
        while True:
            with ExitStack() as stack:
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
