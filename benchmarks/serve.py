"""Episodes of a server against the same in one process, and what vanishing clients leave.

1,024 episodes of a one-turn task are in flight in one process. Bar: its loop is late by at most
50 ms at the 99th percentile; on a busy machine its own CPU time between two beats says that. Their
model server is another process and answers after a second. Then clients vanish in the middle of
theirs. ``python -m benchmarks.serve [EPISODES]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from statistics import quantiles
from typing import Any

import aiohttp
from aiohttp import web

PATIENCE = 1.0
"""Seconds until the model server answers."""


async def model_server(reply: list[int]) -> None:
    """Answer every prompt with the same reply, and print the port first."""
    choice = {
        "token_ids": reply,
        "logprobs": {"token_logprobs": [0.0] * len(reply)},
        "finish_reason": "stop",
    }
    answer = json.dumps({"choices": [choice]})

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(PATIENCE)
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def clients(url: str, episodes: int, vanish: bool) -> None:
    """Ask for so many episodes at once, in a process of their own; vanishing ones leave early."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(number: int) -> bool:
            body = {"task": "one_turn", "sample": number % 64, "size": 1}
            async with session.post(f"{url}/v1/rollouts", json=body) as answer:
                [rollout] = (await answer.json())["rollouts"]
                return rollout["failure"] is None

        asked = [asyncio.create_task(ask(number)) for number in range(episodes)]
        if vanish:
            await asyncio.wait(asked, timeout=PATIENCE)
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return
        started = time.perf_counter()
        fine = sum(await asyncio.gather(*asked))
        print(fine, time.perf_counter() - started, flush=True)


@contextlib.asynccontextmanager
async def lateness() -> AsyncIterator[list[tuple[float, float]]]:
    """Measure by how much the loop is late, every 5 ms, in seconds of the clock and of the CPU."""
    late: list[tuple[float, float]] = []

    async def beat() -> None:
        while True:
            due, busy = time.perf_counter() + 0.005, time.thread_time()
            await asyncio.sleep(0.005)
            late.append((time.perf_counter() - due, time.thread_time() - busy))

    beating = asyncio.create_task(beat())
    try:
        yield late
    finally:
        beating.cancel()


async def measure(episodes: int) -> None:
    """Print the table."""
    import uvicorn  # here, so that the processes of clients do not load all this
    from benchmarks import sides

    from inspect_tinker_plugin import freeze_memory
    from inspect_tinker_plugin.serve.app import create_app
    from inspect_tinker_plugin.serve.host import Host, Limits
    from inspect_tinker_plugin.serve.samplers import Endpoint, EndpointSampler
    from inspect_tinker_plugin.serve.service import RolloutService

    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name, "model"),
        json.dumps(sides.encode_reply(sides.ANSWER)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert engine.stdout is not None
    port = (await engine.stdout.readline()).decode().strip()
    lent = Endpoint(url=f"http://127.0.0.1:{port}")
    task = sides.one_turn_task(65)
    service = RolloutService(task, sides.RENDERER, group_size=1)
    host = Host([service], sampler=lent, limits=Limits(max_episodes=episodes))
    config = uvicorn.Config(create_app(host), port=0, log_level="error", backlog=4096)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            sampler = EndpointSampler(lent, session)
            await service.run_group(0, sampler)
            freeze_memory()
            started = time.perf_counter()
            async with lateness() as late:
                await asyncio.gather(
                    *(service.run_group(number % 64, sampler) for number in range(episodes))
                )
            show("in one process", episodes, time.perf_counter() - started, late)
        asker = await run_clients(url, episodes, "ask")
        while not host.running:  # noqa: ASYNC110 - until the clients have started
            await asyncio.sleep(0.01)
        most = 0
        async with lateness() as late:
            while asker.returncode is None:
                most = max(most, host.running)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asker.wait(), 0.05)
        fine, seconds = (await asker.stdout.read()).decode().split()
        show("over the network", int(fine), float(seconds), late)
        print(f"most in flight: {most}; {fine} have a reward")
        before = len(asyncio.all_tasks())
        for _ in range(3):
            await (await run_clients(url, episodes // 2, "vanish")).wait()
        while host.running or host.waiting:  # noqa: ASYNC110 - they have no common event
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        left = len(asyncio.all_tasks()) - before
        print(f"after {3 * (episodes // 2)} vanished: {host.running} episodes, {left} tasks left")
    finally:
        server.should_exit = True
        await server.shutdown()
        engine.kill()
        await engine.wait()


async def run_clients(url: str, episodes: int, how: str) -> Any:
    command = [sys.executable, "-m", __spec__.name, how, url, str(episodes)]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


def show(name: str, episodes: int, seconds: float, late: list[tuple[float, float]]) -> None:
    clock, cpu = ([1000 * each for each in kind] for kind in zip(*late, strict=True))
    print(
        f"{name:<18} {episodes / seconds:5.0f} episodes/s   loop late: p99 "
        f"{quantiles(clock, n=100)[-1]:.1f} ms by the clock, {quantiles(cpu, n=100)[-1]:.1f} ms of "
        f"its own CPU (most {max(cpu):.1f})",
        flush=True,
    )


def main(how: str = "1024", *more: str) -> None:
    if how == "model":
        asyncio.run(model_server(json.loads(more[0])))
    elif how in ("ask", "vanish"):
        asyncio.run(clients(more[0], int(more[1]), how == "vanish"))
    else:
        asyncio.run(measure(int(how)))


if __name__ == "__main__":
    main(*sys.argv[1:])
