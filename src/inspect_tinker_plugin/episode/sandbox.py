"""The sandboxes of one episode: started as Inspect starts them, released whatever happens."""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.episode.places import sandbox_places
from inspect_tinker_plugin.episode.types import Metrics

logger = getLogger(__name__)


@dataclass(frozen=True)
class _Startup:
    """What one provider has to set up once a process before its first sandbox."""

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
        self._started: dict[_Startup, asyncio.Future[None]] = {}
        self._pid = os.getpid()
        atexit.register(self.shutdown)

    async def ensure_started(self, startup: _Startup) -> None:
        """Run a provider's ``task_init`` once; concurrent callers wait for the first."""
        pending = self._started.get(startup)
        if pending is not None and (pending.done() or _same_loop(pending)):
            await asyncio.shield(pending)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started[startup] = future
        try:
            await self._start(startup)
        except BaseException as error:
            del self._started[startup]
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()
            else:
                future.cancel()
            raise
        future.set_result(None)

    async def _start(self, startup: _Startup) -> None:
        provider = internals.registry_find_sandboxenv(startup.spec.type)
        with internals.chdir(startup.run_dir), internals.environ_vars(dict(startup.env)):
            await provider.task_init("startup", startup.spec.config)

    def shutdown(self) -> None:
        """Run every provider's ``task_cleanup``; at exit nothing may be left behind."""
        started, self._started = self._started, {}
        if os.getpid() != self._pid:
            return
        for startup, future in started.items():
            if not future.done() or future.cancelled() or future.exception() is not None:
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


def _same_loop(future: asyncio.Future[None]) -> bool:
    return future.get_loop() is asyncio.get_running_loop()


_lifecycle: SandboxLifecycle | None = None


def sandbox_lifecycle() -> SandboxLifecycle:
    """Return the lifecycle of this process, made on first use (and again after a fork)."""
    global _lifecycle
    if _lifecycle is None or _lifecycle._pid != os.getpid():
        _lifecycle = SandboxLifecycle()
    return _lifecycle


async def settle(work: Callable[[], Awaitable[object]]) -> None:
    """Run cleanup to its end although the caller is being cancelled.

    The work runs in a task of its own. A cancellation that hits that task itself (the loop
    is shutting down) starts it once more; cleanup is idempotent.
    """

    async def run() -> None:
        try:
            await work()
        except asyncio.CancelledError:
            await work()

    task = asyncio.ensure_future(run())
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            interrupted = error
        except Exception:
            break
    if interrupted is not None:
        raise interrupted
    task.result()


@dataclass(frozen=True)
class SampleSandboxes:
    """What an episode knows of its sandboxes."""

    environments: dict[str, SandboxEnvironment]
    modules: frozenset[str]


NO_SANDBOXES = SampleSandboxes(environments={}, modules=frozenset())


@asynccontextmanager
async def sample_sandboxes(
    task_name: str,
    run_dir: str,
    spec: SandboxEnvironmentSpec,
    sample: Sample,
    *,
    max_sandboxes: int | None,
    metrics: Metrics,
) -> AsyncIterator[SampleSandboxes]:
    """Start the sandboxes of a sample, with its files and set-up script, and release them.

    Follows ``sandboxenv_context`` of Inspect in what it does, with three differences: no
    random delay before the start (it spreads tasks of one eval; here it would only cost),
    release is never skipped or interrupted, and a provider's one-time set-up happens on
    first use.
    """
    lifecycle = sandbox_lifecycle()
    internals._lifecycle_state.set(lifecycle.state)
    provider = internals.registry_find_sandboxenv(spec.type)
    started = time.perf_counter()
    await lifecycle.ensure_started(await _startup_of(provider, spec, sample, run_dir))
    async with _places(provider, spec.type, max_sandboxes):
        files, setup = await _sample_files(sample)
        environments = await internals.init_sandbox_environments_sample(
            sandboxenv_type=provider,
            task_name=internals.unqualified_name(task_name),
            config=spec.config,
            files=files,
            setup=setup,
            metadata={**(sample.metadata or {}), "__sample_id__": sample.id},
        )
        metrics["sandbox/acquire_s"] = time.perf_counter() - started
        try:
            yield SampleSandboxes(environments, _modules_of(environments))
        finally:

            async def release() -> None:
                # `interrupted` would make the docker provider leave its containers
                # running until the end of an eval, which an episode does not have.
                await internals.cleanup_sandbox_environments_sample(
                    type=spec.type,
                    task_name=task_name,
                    config=spec.config,
                    environments=environments,
                    interrupted=False,
                )

            await settle(release)


async def _startup_of(
    provider: type[SandboxEnvironment], spec: SandboxEnvironmentSpec, sample: Sample, run_dir: str
) -> _Startup:
    # The working directory is the process's own, so it is changed only when it has to be.
    relative = isinstance(spec.config, str) and not os.path.isabs(spec.config)
    with internals.chdir(run_dir) if relative else nullcontext():
        env = await provider.task_init_environment(spec.config, sample.metadata or {})
    return _Startup(spec=spec, run_dir=run_dir, env=tuple(sorted(env.items())))


def _places(
    provider: type[SandboxEnvironment], name: str, max_sandboxes: int | None
) -> AbstractAsyncContextManager[Any]:
    limit = max_sandboxes if max_sandboxes is not None else provider.default_concurrency()
    if limit is None:
        return nullcontext()
    return sandbox_places(name, limit).place()


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


def _modules_of(environments: dict[str, SandboxEnvironment]) -> frozenset[str]:
    """Modules whose frames in a traceback mean that the sandbox itself failed."""
    return frozenset(
        type(internals.unproxied(environment)).__module__ for environment in environments.values()
    )
