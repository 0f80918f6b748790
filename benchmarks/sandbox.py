"""Compare docker_pool, Inspect's own docker provider and the bare Docker SDK in one run.

    python benchmarks/sandbox.py [--image IMAGE] [--episodes N] [--concurrency N]

An episode starts a sandbox, runs one command, writes and reads 1 KB and releases the
sandbox. All sides use the same image and machine, one after the other; the container that
the pool starts ahead for later episodes is paid within the measured time. Then: a sandbox with two
servers beside it, and what a clean sandbox for scorers adds to an episode (``sandbox/fresh_s``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec, sandbox

from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.manager import close_all, pool_manager
from inspect_tinker_plugin import EpisodeOptions, EpisodeResult, EpisodeRunner
from inspect_tinker_plugin.inspect_internals import registry_find_sandboxenv

Times = dict[str, list[float]]
_KILOBYTE = "x" * 1024


async def prewarm(config: DockerPoolConfig, count: int) -> None:
    """Wait until this many containers are ready."""
    pool = await pool_manager().prepare(parse_config(config))
    pool.expect(count)
    while pool.state.idle < count:  # noqa: ASYNC110  (threads start them)
        await asyncio.sleep(0.02)


class Side:
    """One provider under measurement."""

    def __init__(self, name: str, type: str, config: Any) -> None:
        self.name = name
        self._class: Any = registry_find_sandboxenv(type)
        self._config = config

    async def prepare(self) -> None:
        await self._class.task_init("bench", self._config)

    async def finish(self) -> None:
        await self._class.task_cleanup("bench", self._config, True)

    @contextlib.asynccontextmanager
    async def taken(self, times: Times) -> AsyncIterator[SandboxEnvironment]:
        async with _timed(times, "acquire"):
            environments = await self._class.sample_init("bench", self._config, {})
        try:
            yield environments["default"]
        finally:
            async with _timed(times, "release"):
                await self._class.sample_cleanup("bench", self._config, environments, False)


@contextlib.asynccontextmanager
async def _timed(times: Times, name: str) -> AsyncIterator[None]:
    begun = time.perf_counter()
    yield
    times[name].append(time.perf_counter() - begun)


async def _operations(sandbox: SandboxEnvironment, times: Times) -> None:
    async with _timed(times, "exec"):
        await sandbox.exec(["echo", "hello"])
    async with _timed(times, "write"):
        await sandbox.write_file("file.txt", _KILOBYTE)
    async with _timed(times, "read"):
        await sandbox.read_file("file.txt")


async def _throughput(side: Side, episodes: int, concurrency: int) -> tuple[float, Times]:
    """Run episodes at once and measure how many finish a minute."""
    times: Times = defaultdict(list)
    gate = asyncio.Semaphore(concurrency)

    async def episode() -> None:
        async with gate, side.taken(times) as sandbox:
            await _operations(sandbox, times)

    begun = time.perf_counter()
    await asyncio.gather(*(episode() for _ in range(episodes)))
    return 60 * episodes / (time.perf_counter() - begun), times


async def _alone(side: Side, repeats: int) -> Times:
    """Time single operations in one sandbox, with nothing beside them."""
    times: Times = defaultdict(list)
    for _ in range(4):
        async with side.taken(times):
            pass
    async with side.taken(defaultdict(list)) as sandbox:
        await _operations(sandbox, defaultdict(list))
        await asyncio.sleep(1)  # its replacement has started by then
        for _ in range(repeats):
            await _operations(sandbox, times)
        # As a tool server or an agent's proxy does: a process that stays, without output.
        await sandbox.exec(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null &"])
        for _ in range(repeats):
            async with _timed(times, "beside"):
                await sandbox.exec(["echo", "hello"])
    return times


async def _warm_acquire(side: Side, config: Any, size: int, rounds: int) -> Times:
    """Take as many sandboxes at once as were warmed before."""
    times: Times = defaultdict(list)

    async def take() -> None:
        async with side.taken(times):
            pass

    for _ in range(rounds):
        await prewarm(config, size)
        await asyncio.gather(*(take() for _ in range(size)))
    return times


async def _acquire_alone(side: Side, repeats: int) -> Times:
    """Take sandboxes one after the other, cold."""
    times: Times = defaultdict(list)
    await side.prepare()
    for _ in range(repeats):
        async with side.taken(times):
            pass
    return times


def _with_servers(folder: Path, image: str) -> str:
    """Write a compose file: a sandbox and two servers with health checks."""
    serve = "import socket, time; s = socket.create_server(('', 80)); time.sleep(9999)"
    ask = "import socket; socket.create_connection(('localhost', 80), 1)"
    common = {"image": image, "x-local": True, "init": True, "stop_grace_period": "1s"}
    server = {
        **common,
        "command": ["python3", "-c", serve],
        "healthcheck": {"test": ["CMD", "python3", "-c", ask], "interval": "1s"},
    }
    default = {**common, "command": "tail -f /dev/null"}
    path = folder / "servers-compose.yaml"
    services = {"default": default, "one": server, "two": server}
    path.write_text(yaml.safe_dump({"services": services, "networks": {"default": None}}))
    return str(path)


@solver
def _writes() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().write_file("answer.txt", _KILOBYTE)
        return state

    return solve


@scorer(metrics=[mean()])
def _reads() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float(await sandbox().read_file("answer.txt") == _KILOBYTE))

    return score


async def _clean_scoring(type: str, config: Any, episodes: int, *, warm: bool) -> list[float]:
    """Run episodes one after the other; return what their clean sandboxes cost."""
    spec = SandboxEnvironmentSpec(type, config)
    task = Task(dataset=[Sample(id=1, input="x")], solver=_writes(), scorer=_reads(), sandbox=spec)
    options = EpisodeOptions(score_sandbox="fresh", score_files=["answer.txt"])
    runner, costs = EpisodeRunner(task, options=options), []
    for _ in range(episodes):
        if warm:
            await prewarm(config, 2)
        episode = runner.episode(task.dataset[0])
        result = await episode.start()
        await episode.close()
        assert isinstance(result, EpisodeResult)
        assert result.score_values() == {"_reads": 1.0}, result.error
        costs.append(result.metrics["sandbox/fresh_s"])
    return costs


def _bare(image: str, repeats: int) -> Times:
    """Do with the SDK alone what an episode needs, one after the other."""
    api = pool_manager().engine.api
    times: Times = defaultdict(list)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - begun)
        return result

    def start() -> str:
        host = api.create_host_config(network_mode="none")
        container = api.create_container(image, ["tail", "-f", "/dev/null"], host_config=host)["Id"]
        api.start(container)
        return str(container)

    def run(container: str) -> None:
        api.exec_start(api.exec_create(container, ["echo", "hello"])["Id"])

    for _ in range(repeats):
        container = timed("acquire", start)
        timed("exec", partial(run, container))
        timed("release", partial(api.remove_container, container, force=True, v=True))
    return times


def _ms(values: list[float], quantile: float = 0.5) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


async def _measure(options: argparse.Namespace) -> None:
    config = DockerPoolConfig(image=options.image, warm=options.concurrency)
    pool = Side("docker_pool", "docker_pool", config)
    with tempfile.TemporaryDirectory() as folder:
        compose = Path(folder) / "compose.yaml"
        compose.write_text(
            f"services:\n  default:\n    image: {options.image}\n    x-local: true\n"
            "    command: tail -f /dev/null\n    init: true\n    network_mode: none\n"
            "    stop_grace_period: 1s\n"
        )
        stock = Side("docker", "docker", str(compose))
        found: dict[str, tuple[float, Times, Times]] = {}
        for side, episodes in ((stock, options.stock_episodes), (pool, options.episodes)):
            with contextlib.redirect_stdout(io.StringIO()):
                await side.prepare()
                if side is pool:  # as where the dataset is built, ahead of the first batch
                    await prewarm(config, options.concurrency)
                alone = await _alone(side, options.repeats)
                rate, loaded = await _throughput(side, episodes, options.concurrency)
            found[side.name] = (rate, loaded, alone)
            if side is stock:
                await side.finish()
        warm = await _warm_acquire(pool, config, options.concurrency, 5)
        servers = _with_servers(Path(folder), options.image)
        several_stock, several = Side("", "docker", servers), Side("", "docker_pool", servers)
        with contextlib.redirect_stdout(io.StringIO()):
            cold = await _acquire_alone(several_stock, 5)
            await several_stock.finish()
            stock_clean = await _clean_scoring("docker", str(compose), 5, warm=False)
        ready = await _warm_acquire(several, servers, 1, 5)
        never = DockerPoolConfig(image=options.image, warm=0, pids=511)  # another pool
        more = {
            "acquire p50, with 2 servers": (cold["acquire"], ready["acquire"]),
            "clean scoring p50, warm": (
                stock_clean,
                await _clean_scoring("docker_pool", config, 10, warm=True),
            ),
            "clean scoring p50, cold": (
                stock_clean,
                await _clean_scoring("docker_pool", never, 10, warm=False),
            ),
        }
    bare = await asyncio.to_thread(_bare, options.image, 10)
    _report(options, found, warm, bare, more)


def _report(
    options: argparse.Namespace,
    found: dict[str, tuple[float, Times, Times]],
    warm: Times,
    bare: Times,
    more: dict[str, tuple[list[float], list[float]]],
) -> None:
    (stock_rate, stock_loaded, stock), (pool_rate, pool_loaded, pool) = (
        found["docker"],
        found["docker_pool"],
    )
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {options.image}")
    print(f"{options.concurrency} episodes at once; times in ms\n")
    print(f"{'':34}{'docker':>10}{'bare SDK':>10}{'docker_pool':>13}{'ratio':>9}")

    def line(name: str, first: float, second: float | None, third: float, ratio: float) -> None:
        middle = "-" if second is None else f"{second:.1f}"
        print(f"{name:34}{first:>10.1f}{middle:>10}{third:>13.1f}{ratio:>9.3f}")

    line("episodes per minute", stock_rate, None, pool_rate, pool_rate / stock_rate)
    rows: list[tuple[str, list[float], list[float] | None, list[float], float]] = [
        ("acquire p50, under load", stock_loaded["acquire"], None, pool_loaded["acquire"], 0.5),
        ("acquire p99, under load", stock_loaded["acquire"], None, pool_loaded["acquire"], 0.99),
        ("acquire p50, warm", stock["acquire"], bare["acquire"], warm["acquire"], 0.5),
        ("acquire p99, warm", stock["acquire"], bare["acquire"], warm["acquire"], 0.99),
        ("release p50, under load", stock_loaded["release"], None, pool_loaded["release"], 0.5),
        ("exec p50, alone", stock["exec"], bare["exec"], pool["exec"], 0.5),
        ("exec p50, a process alive", stock["beside"], None, pool["beside"], 0.5),
        ("write 1 KB p50, alone", stock["write"], None, pool["write"], 0.5),
        ("read 1 KB p50, alone", stock["read"], None, pool["read"], 0.5),
        ("exec p50, under load", stock_loaded["exec"], None, pool_loaded["exec"], 0.5),
        *((name, first, None, second, 0.5) for name, (first, second) in more.items()),
    ]
    for name, first, second, third, quantile in rows:
        middle = None if second is None else _ms(second, quantile)
        before, after = _ms(first, quantile), _ms(third, quantile)
        line(name, before, middle, after, after / before)
    whole = statistics.median(map(sum, zip(*bare.values(), strict=True)))
    print(f"\nbare SDK, one create-start-exec-remove: {1000 * whole:.0f} ms")
    targets = {
        "warm acquire p50 under 50 ms": _ms(warm["acquire"]) < 50,
        "episodes per minute at least 6 times": pool_rate >= 6 * stock_rate,
        "with 2 servers at most 0.25": (
            _ms(more["acquire p50, with 2 servers"][1])
            <= 0.25 * _ms(more["acquire p50, with 2 servers"][0])
        ),
        "exec p50 at most 0.1": _ms(pool["exec"]) <= 0.1 * _ms(stock["exec"]),
        "exec with a process alive at most 0.1": (
            _ms(pool["beside"]) <= 0.1 * _ms(stock["beside"])
        ),
        "write at most 0.1": _ms(pool["write"]) <= 0.1 * _ms(stock["write"]),
        "read at most 0.1": _ms(pool["read"]) <= 0.1 * _ms(stock["read"]),
    }
    for name, reached in targets.items():
        print(f"{'reached' if reached else 'MISSED':8} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", default="inspect-rl-test/python:1")
    parser.add_argument("--episodes", type=int, default=120, help="of docker_pool")
    parser.add_argument("--stock-episodes", type=int, default=24, help="of docker")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15, help="operations timed alone")
    options = parser.parse_args()
    try:
        asyncio.run(_measure(options))
    finally:
        close_all()


if __name__ == "__main__":
    main()
