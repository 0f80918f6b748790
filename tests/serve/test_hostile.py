"""What odd clients send, and what policies write, ends neither the server nor others' episodes."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.rl.policies import Words
from tests.rl.tasks import arithmetic
from tests.serve.engine import serving
from tests.serve.server import Served, hosted
from tests.waiting import until


async def test_a_text_without_utf8_is_no_lost_episode() -> None:
    async with serving(Words(["1"])) as url, hosted(arithmetic()) as served:
        lent = {"url": url, "policy_version": "\ud800", "form": "generate"}
        body = {"task": "arithmetic", "sample": 0, "size": 1, "sampler": lent}
        status, answer = await served.post("/v1/rollouts", body)
    [rollout] = answer["rollouts"]
    assert (status, rollout["failure"]) == (200, None)
    assert rollout["branches"][0]["spans"][0]["policy_version"] == "\ud800"


def test_headers_may_be_any_bytes() -> None:
    head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: \xff\r\n"
    assert b" 200 OK" in exchange(head)


def test_a_body_that_does_not_arrive_in_time_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.serve.app.MAX_SECONDS", 0)
    head = b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    assert b" 400 Bad Request" in exchange(head)


def exchange(head: bytes) -> bytes:
    """Send the head of a request to a server, and return the first line of the answer."""

    async def run() -> bytes:
        async with hosted(arithmetic()) as served:
            address = urlsplit(served.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(head + b"\r\n")
            line = await reader.readline()
            writer.close()
            return line

    return asyncio.run(run())


async def test_a_session_with_too_many_messages_ends_with_its_episode() -> None:
    async def flood(served: Served) -> None:
        socket = await served.client.ws_connect(f"{served.url}/ws")
        call = {"tool_name": "run_rollout", "arguments": {}}
        for _ in range(20):
            await socket.send_json({"type": "step", "data": call})
        closed = await socket.receive()
        assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)

    slow = Words(["1"], delay_s=60)
    async with serving(slow) as url, hosted(arithmetic(), sampler=url) as served:
        await flood(served)
        await until(lambda: not served.host.running)
