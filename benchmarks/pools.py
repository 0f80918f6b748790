"""What episodes in `docker_pool` cost each other, and what they share.

    python benchmarks/pools.py [--image IMAGE] [--builds N] [--setup SECONDS] [--group G]

Each row is a ratio of two measurements of one run: commands while images are built against
commands before; a group that shares its set-up against one set-up; images built for one
sample each against one after the other, and made ahead of their batch against made when it
comes; a warm container against the stock provider alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import docker
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentSpec

from inspect_docker_pool.compose import parse_config
from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.environment import DockerPoolSandboxEnvironment as Pooled
from inspect_docker_pool.manager import close_all, pool_manager
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.inspect_internals import registry_find_sandboxenv
from inspect_tinker_plugin.rl.prewarm import Ahead


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _dockerfiles(folder: Path, image: str, count: int, seconds: float) -> list[str]:
    made = []
    for number in range(count):
        path = folder / str(number) / "Dockerfile"
        path.parent.mkdir()
        path.write_text(f"FROM {image}\nRUN sleep {seconds} && echo {uuid.uuid4()} > /which\n")
        made.append(str(path))
    return made


def _compose(folder: Path, image: str) -> str:
    path = folder / "compose.yaml"
    path.write_text(
        f"services:\n  default:\n    image: {image}\n    x-local: true\n    init: true\n"
        "    command: tail -f /dev/null\n    network_mode: none\n    stop_grace_period: 1s\n"
    )
    return str(path)


async def _beside_builds(image: str, paths: list[str]) -> tuple[float, float, float]:
    """Give the p99 of a command before and during builds, and how long those took."""
    config = DockerPoolConfig(image=image, warm=0)
    environments = await Pooled.sample_init("bench", config, {})
    sandbox = environments["default"]

    async def commands(until: Any) -> list[float]:
        times: list[float] = []
        while not until(len(times)):
            begun = time.perf_counter()
            await sandbox.exec(["true"])
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(0.02)
        return times

    idle = await commands(lambda count: count >= 200)
    begun = time.perf_counter()
    builds = [asyncio.create_task(Pooled.task_init("bench", path)) for path in paths]
    busy = await commands(lambda _: all(build.done() for build in builds))
    await asyncio.gather(*builds)
    took = time.perf_counter() - begun
    await Pooled.sample_cleanup("bench", config, environments, False)
    return _quantile(idle, 0.99), _quantile(busy, 0.99), took


async def _next_batch(image: str, paths: list[str], ahead_for: float | None) -> float:
    """Give the seconds until every sample of a batch has its sandbox, an image for each.

    Args:
        image: of the batch before.
        paths: a Dockerfile per sample.
        ahead_for: seconds that the batch before takes, if images are made ahead meanwhile.
    """
    configs = [DockerPoolConfig(file=path, warm=0) for path in paths]
    all_configs = [DockerPoolConfig(image=image, warm=0), *configs]
    given = [SandboxEnvironmentSpec("docker_pool", config) for config in all_configs]
    task = Task(dataset=[Sample(id=n, input="x", sandbox=spec) for n, spec in enumerate(given)])
    first, *rest = task.dataset
    if ahead_for is not None:
        Ahead(
            prepared=EpisodeRunner(task),
            samples_of=lambda batch: rest if batch else [first],
            batches=2,
            batch_size=len(rest),
            group_size=1,
        ).start(task)
        await asyncio.sleep(ahead_for)
    begun = time.perf_counter()
    taken = await asyncio.gather(*(Pooled.sample_init("bench", c, {}) for c in configs))
    took = time.perf_counter() - begun
    for config, environments in zip(configs, taken, strict=True):
        await Pooled.sample_cleanup("bench", config, environments, False)
    return took


async def _group(image: str, seconds: float, size: int) -> float:
    """Give the seconds until all episodes of a group have been set up."""
    script = f"#!/bin/sh\nsleep {seconds}; echo {uuid.uuid4()} > /root/made\n"
    task = Task(
        dataset=[Sample(id=1, input="x", setup=script)],
        sandbox=SandboxEnvironmentSpec("docker_pool", DockerPoolConfig(image=image, warm=2)),
    )
    runner = EpisodeRunner(task)
    episodes = [runner.episode(task.dataset[0], epoch=n + 1) for n in range(size)]
    begun = time.perf_counter()
    # Its solver asks the model at once: set-up is over when that happens.
    await asyncio.gather(*(episode.start() for episode in episodes))
    took = time.perf_counter() - begun
    await asyncio.gather(*(episode.close() for episode in episodes))
    return took


async def _warm(image: str, rounds: int) -> tuple[float, float]:
    """Give the median seconds to a sandbox of the stock provider, alone, and to a warm one."""
    stock: Any = registry_find_sandboxenv("docker")
    times: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        compose = _compose(Path(folder), image)
        config = DockerPoolConfig(image=image, warm=1)
        await stock.task_init("bench", compose)
        pool = await pool_manager().prepare(parse_config(config))
        pool.tend()
        for _ in range(rounds):
            while not pool.state.idle:  # noqa: ASYNC110  (threads start them)
                await asyncio.sleep(0.02)
            for kind, given, into in ((stock, compose, times[0]), (Pooled, config, times[1])):
                begun = time.perf_counter()
                environments = await kind.sample_init("bench", given, {})
                into.append(time.perf_counter() - begun)
                await kind.sample_cleanup("bench", given, environments, False)
        await stock.task_cleanup("bench", compose, True)
    return _quantile(times[0], 0.5), _quantile(times[1], 0.5)


async def _measure(options: argparse.Namespace) -> None:
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {options.image}\n")
    print(f"{'':52}{'before':>10}{'after':>10}{'ratio':>8}{'target':>8}")

    def line(name: str, before: float, after: float, target: float) -> None:
        print(f"{name:52}{before:>9.3f}s{after:>9.3f}s{after / before:>8.3f}{target:>8}")

    with tempfile.TemporaryDirectory() as folder:
        paths = _dockerfiles(Path(folder), options.image, options.builds, options.step)
        idle, busy, took = await _beside_builds(options.image, paths)
        line(f"exec p99, idle / beside {options.builds} builds", idle, busy, 2)
        serial = options.builds * options.step
        line(f"{options.builds} images, one per sample / their steps in a row", serial, took, 0.6)
    with tempfile.TemporaryDirectory() as folder:
        paths = _dockerfiles(Path(folder), options.image, options.builds, options.step)
        half = options.builds // 2
        needed = await _next_batch(options.image, paths[:half], None)
        ahead = await _next_batch(options.image, paths[half:], 1.5 * needed + options.step)
        line(f"a batch of {half} images, made when needed / ahead", needed, ahead, 0.3)
    line("a sandbox, stock alone / warm", *await _warm(options.image, 8), 0.1)
    one = await _group(options.image, options.setup, 1)
    group = await _group(options.image, options.setup, options.group)
    line(f"set-up of one episode / of a group of {options.group}", one, group, 1.5)


def _built() -> set[str]:
    """Return the names of the images that pools have built on this engine."""
    images = docker.from_env().images.list("inspect-pool/*")
    return {tag for image in images for tag in image.tags}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--image", default="inspect-rl-test/python:1")
    parser.add_argument("--builds", type=int, default=20)
    parser.add_argument("--step", type=float, default=2, help="seconds that a build takes")
    parser.add_argument("--setup", type=float, default=5, help="seconds of a set-up script")
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args()
    before = _built()
    try:
        asyncio.run(_measure(options))
    finally:
        close_all()
        for name in _built() - before:
            docker.from_env().images.remove(name)


if __name__ == "__main__":
    main()
