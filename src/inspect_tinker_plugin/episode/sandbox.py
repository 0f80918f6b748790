"""The sandboxes of one episode: started as Inspect starts them in their places, always released.

Places limit how many sandboxes of one provider are alive at once in this process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.docker_pool.sharing import sample_setup
from inspect_tinker_plugin.episode.cancellation import GivenUpError, bounded, uninterrupted
from inspect_tinker_plugin.episode.providers import prepare_provider
from inspect_tinker_plugin.episode.types import Metrics
from inspect_tinker_plugin.turnstile import Admission, Turnstile


class Places:
    """Counts the sandboxes of one provider that are alive, for the whole process.

    There is one count per provider, shared by all datasets. Each caller brings the bound of its
    dataset and gets a place when fewer than that are alive, first come first served: a
    training set with eight places and a test set with four have at most eight between them,
    and an episode of the test set starts when fewer than four are alive.

    Inspect's ``concurrency()`` is reset whenever an eval starts, which would lift the bound.

    Args:
        count: The bound for callers that bring none; without it such callers never wait.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._turnstile = Turnstile()

    @property
    def alive(self) -> int:
        """Places held now."""
        return self._turnstile.inside

    @asynccontextmanager
    async def place(self, bound: int | None = None) -> AsyncIterator[None]:
        """Hold a place, among fewer than ``bound`` others if that is given."""
        bound = self._count if bound is None else bound
        if bound is None:
            self._turnstile.pass_by()
        else:
            await self._turnstile.enter(_fewer_than(bound))
        try:
            yield
        finally:
            self._turnstile.leave()


def _fewer_than(bound: int) -> Admission:
    return lambda inside: inside < bound


_places: dict[str, Places] = {}
_lock = threading.Lock()


def sandbox_places(provider: str) -> Places:
    """Return this process's places for a provider."""
    with _lock:
        return _places.setdefault(provider, Places())


logger = getLogger(__name__)

START_GRACE = 60.0
"""Seconds that a cancelled episode waits for its sandbox to come up, in order to release it.

Cancelling a start half-way leaves behind what the engine goes on creating after its client is
gone: ``docker compose`` is killed, its last request is carried out nevertheless, and nobody
knows of the container or network that it makes.
"""

RELEASE_GRACE = 10.0
"""Seconds that a start or release has to end after it was cancelled for taking too long."""


@dataclass(frozen=True)
class SampleSandboxes:
    """The sandboxes of an episode, with what attribution of errors needs to know of them."""

    environments: dict[str, SandboxEnvironment]
    modules: frozenset[str]


NO_SANDBOXES = SampleSandboxes(environments={}, modules=frozenset())


class SandboxHolder:
    """Owns the sandboxes of one sample, from their start to their single release.

    Inspect is given this in place of the provider. It starts the sandboxes in their own
    task, which no cancellation reaches, and ignores Inspect's own clean-up after failed
    files or set-up: that clean-up says ``interrupted``, on which the ``docker`` provider leaves its
    containers to the end of an eval, and an episode has no eval around it.

    Args:
        provider: Inspect's provider.
        patience: Seconds that a release may take.
    """

    def __init__(self, provider: type[SandboxEnvironment], *, patience: float) -> None:
        self.__name__ = provider.__name__  # Inspect names the provider in its errors
        self._provider = provider
        self._patience = patience
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
        self._starting = asyncio.get_running_loop().create_task(
            _started(self._provider, task_name, config, metadata), context=context
        )
        environments = await asyncio.shield(self._starting)
        for variable, value in context.items():  # what a provider binds is meant for its sample
            if variable.get(None) is not value:
                variable.set(value)
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
        if starting.cancelled() or starting.exception() is not None:
            return  # a provider cleans up after a failed start itself
        cleaning = self._clean_up(starting.result())
        try:
            await bounded(cleaning, self._patience, grace=RELEASE_GRACE)
        except GivenUpError:
            raise self._too_slow(
                f"not released within {self._patience:g} s (stop_timeout)"
            ) from None

    async def _clean_up(self, environments: dict[str, SandboxEnvironment]) -> None:
        task_name, config = self._arguments
        cleanup: Callable[..., Any] = self._provider.sample_cleanup
        await cleanup(task_name, config, environments, False)

    def _too_slow(self, what: str) -> TimeoutError:
        return TimeoutError(
            f"the sandbox of provider {self.__name__} was {what}. It may still be there; its "
            "place is given to the next episode"
        )


async def _started(
    provider: type[SandboxEnvironment], task_name: str, config: Any, metadata: dict[str, str]
) -> dict[str, SandboxEnvironment]:
    start: Callable[..., Any] = provider.sample_init
    environments: dict[str, SandboxEnvironment] = await start(task_name, config, metadata)
    return environments


@asynccontextmanager
async def sample_sandboxes(
    task_name: str,
    run_dir: str,
    spec: SandboxEnvironmentSpec,
    sample: Sample,
    *,
    max_sandboxes: int | None,
    patience: float,
    metrics: Metrics,
    doing: Callable[[str], None] = lambda stage: None,
) -> AsyncIterator[SampleSandboxes]:
    """Start the sandboxes of a sample, with its files and set-up script, and release them.

    Does what ``sandboxenv_context`` of Inspect does, with three differences: no
    random delay before the start (it spreads the tasks of an eval and would only cost here),
    start and release are never interrupted, and a provider's one-time set-up happens on
    first use.

    Args:
        task_name: Name of the task.
        run_dir: The folder that the task's relative paths start from.
        spec: The sandbox.
        sample: The sample, with its files and set-up script.
        max_sandboxes: Sandboxes of this provider that may be alive at once; the provider's
            default if not given.
        patience: Seconds that the release may take.
        metrics: Receives ``sandbox/acquire_s``.
        doing: Called with a description of what is waited for.
    """
    provider = internals.registry_find_sandboxenv(spec.type)
    started = time.perf_counter()
    doing(f"preparing sandbox {spec.type!r}")
    await prepare_provider(provider, spec, sample, run_dir)
    bound = max_sandboxes if max_sandboxes is not None else provider.default_concurrency()
    places = sandbox_places(spec.type)
    doing(
        f"waiting for a place for its sandbox ({spec.type!r}, max_sandboxes={bound}, "
        f"{places.alive} alive)"
    )
    async with places.place(bound):
        doing(f"starting sandbox {spec.type!r}, with files and set-up script")
        files, setup = await _sample_files(sample)
        holder = SandboxHolder(provider, patience=patience)
        provider_like: Any = holder
        try:
            with sample_setup(files, setup) as shared:
                environments = await internals.init_sandbox_environments_sample(
                    sandboxenv_type=provider_like,
                    task_name=internals.unqualified_name(task_name),
                    config=spec.config,
                    files=files,
                    setup=setup,
                    metadata={**(sample.metadata or {}), "__sample_id__": sample.id},
                )
            await shared.finish()
            metrics["sandbox/acquire_s"] = time.perf_counter() - started
            yield SampleSandboxes(environments, _modules_of(environments))
        finally:
            await uninterrupted(holder.release)


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
