"""Clients that vanish, however many, leave nothing of their episodes."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.rl.policies import Words
from tests.rl.tasks import agent
from tests.serve.engine import serving
from tests.serve.server import Served, hosted
from tests.serve.test_service import CALL, SUBMIT
from tests.waiting import until
from tinker_cookbook.completers import TokensWithLogprobs

from inspect_tinker_plugin.rl.env import InspectEnv


class Closed(Words):
    """A policy that answers once it is opened."""

    def __init__(self, lines: Sequence[str | Callable[[str], str]]) -> None:
        super().__init__(lines)
        self.asked = 0
        self.opened = asyncio.Event()

    async def __call__(self, *asked: Any, **more: Any) -> TokensWithLogprobs:
        self.asked += 1
        await self.opened.wait()
        return await super().__call__(*asked, **more)


def read_then_answer(prompt: str) -> str:
    return SUBMIT if "<tool_response>" in prompt else CALL


async def ask(served: Served, task: str) -> float | None:
    """Ask for an episode; whoever is cancelled closes the connection."""
    status, answer = await served.post("/v1/rollouts", {"task": task, "sample": 0, "size": 1})
    assert status == 200, answer
    reward: float | None = answer["rollouts"][0]["reward"]
    return reward


async def ask_in_a_session(served: Served, task: str) -> None:
    async with served.client.ws_connect(f"{served.url}/ws") as socket:
        call = {"tool_name": "run_rollout", "arguments": {"split": task}}
        await socket.send_json({"type": "step", "data": {"type": "call_tool", **call}})
        await socket.receive()


async def vanish(*clients: asyncio.Task[Any]) -> None:
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


@pytest.mark.slow
async def test_a_hundred_clients_of_which_most_vanish_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    count = 32

    async def round_of_clients(served: Served, policy: Closed) -> None:
        policy.asked = 0
        policy.opened.clear()
        stay = [asyncio.create_task(ask(served, "agent")) for _ in range(count)]
        leave: list[asyncio.Task[Any]] = [
            asyncio.create_task(way(served, "agent"))
            for way in (ask, ask_in_a_session)
            for _ in range(count)
        ]
        await until(lambda: policy.asked == 3 * count)
        await vanish(*leave)
        policy.opened.set()
        assert await asyncio.gather(*stay) == [1.0] * count
        await until(lambda: not served.host.running)

    def envs() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is InspectEnv}

    process, before = psutil.Process(), envs()
    policy = Closed([read_then_answer])
    async with serving(policy) as url, hosted(agent(), sampler=url) as served:

        def left() -> tuple[int, int, int]:
            return len(asyncio.all_tasks()), process.num_fds(), len(os.listdir(tmp_path))

        found = []
        for _ in range(2):
            async with aiohttp.ClientSession() as client:
                await round_of_clients(replace(served, client=client), policy)
            found.append(left())
        # a connection is closed some turns of the loop after its end
        await until(lambda: all(now <= was for now, was in zip(left(), found[0], strict=True)))
        assert served.host.waiting == 0
        await until(lambda: not envs() - before)
