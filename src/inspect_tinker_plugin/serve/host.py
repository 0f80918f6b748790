"""The tasks of a server: fixed when it starts, run for whoever asks, so many episodes at once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Self

import aiohttp

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.processes.workers import freeze_memory_once
from inspect_tinker_plugin.serve.results import RolloutResult
from inspect_tinker_plugin.serve.samplers import Endpoint, EndpointSampler, LentSampler
from inspect_tinker_plugin.serve.service import RolloutService

logger = getLogger(__name__)

FIELDS = "fields"
"""Attribute of a log record with the fields of its event."""


STOPPING = "the server is about to stop"


class BusyError(InspectRLError):
    """The server has no place for another episode, or is about to stop."""


class TooLongError(InspectRLError):
    """An episode took longer than the server allows."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server allows."""

    max_episodes: int = 256
    """Episodes that run at once; others wait."""

    queue_timeout: float = 600.0
    """Seconds that an episode waits for a place."""

    episode_timeout: float = 3600.0
    """Seconds that an episode runs; the option ``time_limit`` ends one earlier, with a score."""


@asynccontextmanager
async def _timeout(seconds: float, among: set[asyncio.Timeout]) -> AsyncIterator[asyncio.Timeout]:
    """Limit a block as ``asyncio.timeout``, and list it among those that may be expired."""
    async with asyncio.timeout(seconds) as deadline:
        among.add(deadline)
        try:
            yield deadline
        finally:
            among.remove(deadline)


def _expire(deadlines: Iterable[asyncio.Timeout]) -> None:
    now = asyncio.get_running_loop().time()
    for each in deadlines:
        if not each.expired():
            each.reschedule(now)


class Host:
    """Runs episodes of its tasks for clients, while it is entered.

    Args:
        services: The tasks.
        sampler: The model server of all episodes; without one, each request lends its own.
        limits: What is allowed.
    """

    def __init__(
        self,
        services: Sequence[RolloutService],
        *,
        sampler: Endpoint | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.services = {service.name: service for service in services}
        if len(self.services) != len(services):
            raise ConfigError("two of the tasks have the same name; serve them from two servers")
        self.limits = limits or Limits()
        self.draining = False
        self.stopped = False
        self.waiting = 0
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._sampler = sampler
        self._ended: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[str] = Counter()
        self._places = asyncio.Semaphore(self.limits.max_episodes)
        self._door = asyncio.Lock()
        self._waits: set[asyncio.Timeout] = set()
        self._runs: set[asyncio.Timeout] = set()

    async def __aenter__(self) -> Self:
        freeze_memory_once()
        self._stack = AsyncExitStack()
        connector = aiohttp.TCPConnector(limit=0)
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def service(self, task: str) -> RolloutService:
        """Return a task by its name.

        Raises:
            ConfigError: It is not served.
        """
        if task not in self.services:
            raise ConfigError(f"no task {task!r} is served; there is {', '.join(self.services)}")
        return self.services[task]

    def drain(self) -> None:
        """Refuse episodes from now on, and those that wait."""
        self.draining = True
        _expire(self._waits)

    def stop(self) -> None:
        """End all episodes; their sandboxes are released before their clients are answered."""
        self.drain()
        self.stopped = True
        _expire(self._runs)

    async def run(
        self, task: str, sample: int | str, lent: LentSampler | None, *, size: int | None = None
    ) -> list[RolloutResult]:
        """Run a group, or the episode of a group of one, once there is a place for it.

        Args:
            task: Name of the task.
            sample: Id of the sample (a string) or its position.
            lent: The model server that the request lends.
            size: Episodes of the group, if not ``group_size``.

        Raises:
            ConfigError: There is no such task or sample, or the sampler is not allowed.
            BusyError: There was no place in time, or the server stops.
            TooLongError: It took too long.
        """
        service = self.service(task)
        service.sample(sample)
        sampler = EndpointSampler(self._endpoint(lent), self._session)
        size = service.options.group_size if size is None else size
        if size == 1 and service.options.group_reward is not None:
            raise ConfigError(f"task {task!r} is served with a group_reward: ask for groups")
        if not 1 <= size <= self.limits.max_episodes:
            at_most = counted(self.limits.max_episodes, "episode")
            raise ConfigError(f"a group has at least 1 and at most {at_most}, not {size}")
        async with AsyncExitStack() as stack:
            await self._admit(size, stack)
            started = time.monotonic()
            try:
                async with _timeout(self.limits.episode_timeout, self._runs) as deadline:
                    results = await service.run_group(sample, sampler, size=size)
            except BaseException as error:
                late = isinstance(error, TimeoutError) and deadline.expired()
                too_long = late and not self.stopped
                self._ended[task, "timeout" if too_long else "cancelled"] += size
                if too_long:
                    most = self.limits.episode_timeout
                    raise TooLongError(f"the episode was cut after {most:g} seconds") from error
                if late:
                    raise BusyError("the server has stopped") from error
                raise
            self._note(task, results, time.monotonic() - started)
            return results

    def _endpoint(self, lent: LentSampler | None) -> Endpoint:
        if self._sampler is None:
            if lent is None:
                raise ConfigError("the request lends no sampler, and the server has none")
            return lent.endpoint()
        if lent is not None:
            raise ConfigError("this server has its own sampler; requests lend none")
        return self._sampler

    async def _admit(self, size: int, stack: AsyncExitStack) -> None:
        """Wait for places; the stack gives them back.

        Raises:
            BusyError: There were none in time, or the server is about to stop.
        """
        if self.draining:
            raise BusyError(STOPPING)
        self.waiting += size
        try:
            async with _timeout(self.limits.queue_timeout, self._waits), self._door:
                for _ in range(size):
                    await self._places.acquire()
                    stack.callback(self._places.release)
        except TimeoutError as error:
            if self.draining:
                raise BusyError(STOPPING) from error
            waited = self.limits.queue_timeout
            raise BusyError(f"no place for an episode within {waited:g} seconds") from error
        finally:
            self.waiting -= size
        self.running += size
        self.idle.clear()
        stack.callback(self._leave, size)

    def _leave(self, size: int) -> None:
        self.running -= size
        if not self.running:
            self.idle.set()

    def _note(self, task: str, results: Sequence[RolloutResult], seconds: float) -> None:
        for result in results:
            outcome = "ok" if result.failure is None else result.failure.cause
            self._ended[task, outcome] += 1
            self._seconds[task] += seconds
            self._tokens[task] += sum(len(turn.tokens) for turn in result.turns)
            line = {
                "task": task,
                "sample": result.sample_id,
                "outcome": outcome,
                "reward": result.reward,
                "turns": len(result.turns),
                "seconds": round(seconds, 3),
                "running": self.running,
            }
            if result.failure is not None:
                line["failure"] = result.failure.message
            logger.info("episode", extra={FIELDS: line})

    def metrics(self) -> str:
        """Return the figures in Prometheus' text format; each worker has its own."""
        worker = f'worker="{os.getpid()}"'
        lines = [
            "# TYPE inspect_rl_episodes_running gauge",
            f"inspect_rl_episodes_running{{{worker}}} {self.running}",
            "# TYPE inspect_rl_episodes_waiting gauge",
            f"inspect_rl_episodes_waiting{{{worker}}} {self.waiting}",
            "# TYPE inspect_rl_episodes_total counter",
        ]
        for (task, outcome), count in self._ended.items():
            labels = f'{worker},task={json.dumps(task, ensure_ascii=False)},outcome="{outcome}"'
            lines.append(f"inspect_rl_episodes_total{{{labels}}} {count}")
        sums: dict[str, Mapping[str, float]] = {
            "episode_seconds_total": self._seconds,
            "sampled_tokens_total": self._tokens,
        }
        for name, counts in sums.items():
            lines.append(f"# TYPE inspect_rl_{name} counter")
            lines += [
                f"inspect_rl_{name}{{{worker},task={json.dumps(task, ensure_ascii=False)}}} {count}"
                for task, count in counts.items()
            ]
        return "\n".join(lines) + "\n"
