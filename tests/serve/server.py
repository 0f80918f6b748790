"""A server of tasks on a real socket, in the loop of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from inspect_ai import Task
from tests.rl.policies import renderer

from inspect_tinker_plugin.serve.app import create_app
from inspect_tinker_plugin.serve.host import Host, Limits
from inspect_tinker_plugin.serve.samplers import Endpoint
from inspect_tinker_plugin.serve.service import RolloutService


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    host: Host
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url + path) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def hosted(
    *tasks: Task,
    sampler: str | None = None,
    limits: Limits | None = None,
    token: str | None = None,
    with_renderer: str = "qwen3_instruct",
    patience: float = 300.0,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve tasks, with the model server at an address."""
    host = Host(
        [RolloutService(task, renderer(with_renderer), **options) for task in tasks],
        sampler=None if sampler is None else Endpoint(url=sampler),
        limits=limits,
    )
    app = create_app(host, token=token, patience=patience)
    config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    # Only started and shut down: the signals of the test's process stay its own.
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        async with aiohttp.ClientSession() as client:
            yield Served(f"http://127.0.0.1:{port}", host, client)
    finally:
        server.should_exit = True
        await server.shutdown()
