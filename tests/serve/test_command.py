"""The command itself, as a process: its workers, and how it stops."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.agents.sandboxed import free_port
from tests.commands import Command
from tests.rl.policies import TOKENIZER, Words
from tests.serve.engine import serving
from tests.waiting import has_ended, until

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.serve.app import run_server

TASK = f"{Path(__file__).parents[1]}/rl/tasks.py@arithmetic"
RENDERED = ("--tokenizer", str(TOKENIZER), "--renderer", "qwen3_instruct")


async def get(url: str) -> tuple[int, str]:
    # A connection of its own, which any of the workers may take.
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await answer.text()


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inspect_tinker_plugin", "serve", *arguments),
        *RENDERED,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a background job
    )
    try:
        yield server
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


async def read_until(server: asyncio.subprocess.Process, text: str, times: int) -> str:
    assert server.stderr is not None
    log = ""
    while log.count(text) < times:
        line = await server.stderr.readline()
        assert line, log
        log += line.decode()
    return log


@pytest.mark.slow
@pytest.mark.nightly
async def test_workers_end_when_their_parent_is_killed() -> None:
    port = str(free_port())
    async with command(TASK, "--port", port, "--workers", "2") as server:
        await read_until(server, "Application startup complete", 2)
        workers = psutil.Process(server.pid).children()
        server.kill()
        await until(lambda: all(map(has_ended, workers)), seconds=180)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(port)))


@pytest.mark.forks
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_a_task_that_cannot_be_served_is_an_error_of_the_command(
    workers: str, tmp_path: Path
) -> None:
    task = TASK.replace("arithmetic", "missing")
    words = ["serve", task, "--port", "0", "--workers", workers, *RENDERED]
    done = Command(*words, cwd=tmp_path).wait(300)
    assert done.returncode == 1
    assert re.search("^Error: .*missing", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.nightly
async def test_the_exit_code_of_a_background_job_names_the_signal() -> None:
    async with command(TASK, "--port", "0") as server:
        await read_until(server, "Application startup complete", 1)
        server.terminate()
        _, log = await server.communicate()
    assert server.returncode == 128 + signal.SIGTERM, log
    assert b"Error" not in log


@pytest.mark.parametrize("when", ["before", "while the tasks are loaded"])
async def test_an_address_that_another_server_has_is_an_error(when: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        load: Any = other.listen
        if when == "before":
            other.listen()
            load = partial(pytest.fail, "loaded")
        port = other.getsockname()[1]
        where: Any = {"host": "127.0.0.1", "port": port, "workers": 1, "opened": print}
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be opened: Address"):
            run_server(load, token=None, patience=1, **where)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_workers_share_an_address_and_sigterm_waits_for_their_episodes(workers: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    policy = Words(["1"], delay_s=2)
    async with (
        serving(policy) as engine,
        aiohttp.ClientSession() as client,
        command(
            *(TASK, "--port", str(port), "--sampler", engine, "--workers", str(workers))
        ) as server,
    ):
        log = await read_until(server, "Application startup complete", workers)
        assert "serving on" in log
        seen: set[str] = set()
        while len(seen) < workers:
            _, text = await get(f"{url}/metrics")
            seen |= set(re.findall(r'episodes_running{worker="(\d+)"}', text))
        body = {"task": "arithmetic", "sample": "s0", "size": 1}

        async def ask() -> Any:
            async with client.post(f"{url}/v1/rollouts", json=body) as answer:
                return await answer.json()

        running = [asyncio.ensure_future(ask()) for _ in range(4)]
        while len(policy.prompts) < 4:  # noqa: ASYNC110 - the policy has no event for it
            await asyncio.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        for answer in await asyncio.gather(*running):
            assert [each["reward"] for each in answer["rollouts"]] == [1.0]
        await server.communicate()
        assert server.returncode == 128 + signal.SIGTERM
