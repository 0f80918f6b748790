"""A model server with scripted words: the two APIs that return token ids, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import tinker
from aiohttp import web
from tinker_cookbook.completers import TokenCompleter


@asynccontextmanager
async def serving(policy: TokenCompleter, **fault: Any) -> AsyncIterator[str]:
    """Serve a policy; ``fault`` replaces parts of each answer.

    Yields:
        The server's address.
    """

    async def sample(prompt: list[int], params: dict[str, Any]) -> Any:
        stop = params.get("stop_token_ids") or params["stop"]
        return await policy(
            tinker.ModelInput.from_ints(prompt), stop, max_tokens=params["max_tokens"]
        )

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["return_token_ids"]
        reply = await sample(body["prompt"], body)
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": reply.tokens,
            "logprobs": {"token_logprobs": reply.logprobs},
            "finish_reason": reply.stop_reason,
            **fault,
        }
        return web.json_response({"choices": [choice], "metadata": {"weight_version": "w7"}})

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        reply = await sample(body["token_ids"], body["sampling_params"])
        content = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(reply.tokens, reply.logprobs, strict=True)
        ]
        choice = {
            "token_ids": reply.tokens,
            "logprobs": {"content": content},
            "finish_reason": reply.stop_reason,
            **fault,
        }
        return web.json_response({"request_id": "1", "choices": [choice]})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=1.0)  # replies that nobody waits for
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
