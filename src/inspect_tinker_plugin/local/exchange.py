"""HTTP requests and answers as values, for the layer that rewrites both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from inspect_tinker_plugin.local.wire import WireError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REWRITTEN = {b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"}


@dataclass(frozen=True)
class HttpAnswer:
    """One HTTP answer."""

    status: int
    body: bytes
    content_type: str = "application/json"

    @classmethod
    def of(cls, value: object, status: int = 200) -> HttpAnswer:
        return cls(status, json.dumps(value).encode())

    @classmethod
    def refuse(cls, why: str, status: int = 400) -> HttpAnswer:
        return cls.of({"detail": why}, status)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass
class Request:
    """One HTTP request whose body has been read."""

    scope: Scope
    body: bytes

    def header(self, name: str) -> str:
        wanted = name.encode()
        return next((v.decode() for k, v in self.scope["headers"] if k == wanted), "")

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body or b"{}")
        if not isinstance(value, dict):
            raise WireError("expected a JSON object")
        return value


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def call(app: App, scope: Scope, path: str, body: bytes) -> HttpAnswer:
    """Send one request to the wrapped application and collect its answer."""
    headers = [(k, v) for k, v in scope["headers"] if k not in _REWRITTEN]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", str(len(body)).encode()))
    inner = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
    status = 500
    kind = "application/json"
    parts: list[bytes] = []
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # to SkyRL, the client is still connected
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, kind
        if message["type"] == "http.response.start":
            status = message["status"]
            found = dict(message.get("headers", ()))
            kind = found.get(b"content-type", b"application/json").decode()
        else:
            parts.append(message.get("body", b""))

    await app(inner, receive, send)
    return HttpAnswer(status, b"".join(parts), kind)
