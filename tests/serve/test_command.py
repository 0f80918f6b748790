"""The command itself, as a process: its workers, and how it stops."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from tests.agents.sandboxed import free_port
from tests.rl.policies import TOKENIZER, Words
from tests.serve.engine import serving

TASK = f"{Path(__file__).parents[1]}/rl/tasks.py@arithmetic"


async def get(url: str) -> tuple[int, str]:
    # A connection of its own, which any of the workers may take.
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.status, await answer.text()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
async def test_workers_share_an_address_and_sigterm_waits_for_their_episodes(workers: int) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    policy = Words(["1"], delay_s=2)
    async with serving(policy) as engine, aiohttp.ClientSession() as client:
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inspect_tinker_plugin", "serve", TASK),
            *("--port", str(port), "--sampler", engine, "--workers", str(workers)),
            *("--tokenizer", str(TOKENIZER), "--renderer", "qwen3_instruct"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert server.stderr is not None
        try:
            log = ""
            while not (
                log.count("Application startup complete") == workers and "Uvicorn running" in log
            ):
                line = await server.stderr.readline()
                assert line, log
                log += line.decode()
            seen: set[str] = set()
            while len(seen) < workers:
                _, text = await get(f"{url}/metrics")
                seen |= set(re.findall(r'episodes_running{worker="(\d+)"}', text))
            body = {"task": "arithmetic", "sample": "s0", "size": 1}
            running = [
                asyncio.ensure_future(client.post(f"{url}/v1/rollouts", json=body))
                for _ in range(4)
            ]
            while len(policy.prompts) < 4:  # noqa: ASYNC110 - the policy has no event for it
                await asyncio.sleep(0.01)
            server.send_signal(signal.SIGTERM)
            for answer in await asyncio.gather(*running):
                rollouts = (await answer.json())["rollouts"]
                assert [each["reward"] for each in rollouts] == [1.0]
            await server.stderr.read()
            assert await server.wait() in (0, 128 + signal.SIGTERM)
        finally:
            if server.returncode is None:
                server.kill()
                await server.wait()
