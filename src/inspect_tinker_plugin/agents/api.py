"""The model APIs that agent programs speak: a request becomes a call of Inspect's bridge.

Does on this side of the sandbox what Inspect's own proxy does inside: the same paths, the
same checks, the same errors. Inspect's bridge translates the requests and answers them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from inspect_tinker_plugin.agents import streaming

PROVIDER_ERROR = "__inspect_provider_error__"
"""The key under which Inspect's bridge returns an error that is meant for the program."""

_MCP_VERSION = "2025-03-26"
_PING_SECONDS = 5.0

Send = Callable[[bytes], Awaitable[None]]
"""Sends a client some bytes of a body."""

Call = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Calls a method of the bridge by name; raises :class:`CallFailedError` if that fails."""


class CallFailedError(Exception):
    """The bridge could not carry out a call at all."""


@dataclass(frozen=True)
class Request:
    """One HTTP request of a program."""

    method: str
    path: str
    """Decoded, without the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(frozen=True)
class Response:
    """The answer to a program's request."""

    status: int
    body: bytes = b""
    content_type: str = "application/json; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[Send], Awaitable[None]] | None = None
    """Writes the body piece by piece, for a stream."""


def _json(status: int, body: object, **headers: str) -> Response:
    return Response(status, json.dumps(body).encode(), headers=headers)


@dataclass(frozen=True)
class Api:
    """One API: its method in the bridge, required parts of a request, and its form of errors."""

    method: str
    required: tuple[str, ...]
    missing: Callable[[str], dict[str, Any]]
    error: Callable[[int, str, Mapping[str, Any]], dict[str, Any]]


def _openai_missing(name: str) -> dict[str, Any]:
    return {
        "error": {
            "message": f"Missing required parameter: '{name}'.",
            "type": "invalid_request_error",
            "param": name,
            "code": "missing_required_parameter",
        }
    }


def _openai_error(status: int, message: str, body: Mapping[str, Any]) -> dict[str, Any]:
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **body}}


_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def _anthropic_missing(name: str) -> dict[str, Any]:
    message = f"Missing required parameter: '{name}'."
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def _anthropic_error(status: int, message: str, body: Mapping[str, Any]) -> dict[str, Any]:
    usual = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = _ANTHROPIC_ERRORS.get(status, usual)
    return {"type": "error", "error": {"type": kind, "message": message}}


_GOOGLE_ERRORS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


def _google_error(status: int, message: str, body: Mapping[str, Any]) -> dict[str, Any]:
    said = {"code": status, "message": message, "status": _GOOGLE_ERRORS.get(status, "UNKNOWN")}
    return {"error": said}


_CHAT = Api("generate_completions", ("model", "messages"), _openai_missing, _openai_error)
_RESPONSES = Api("generate_responses", ("model", "input"), _openai_missing, _openai_error)
_ANTHROPIC = Api("generate_anthropic", ("model", "messages"), _anthropic_missing, _anthropic_error)
_GOOGLE = Api("generate_google", (), _openai_missing, _google_error)

_APIS = {
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _ANTHROPIC,
}


class ModelApi:
    """Answers the requests of one bridge's programs."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def answer(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            CallFailedError: the bridge could not carry it out.
        """
        path, method = request.path, request.method
        if method == "OPTIONS":
            return Response(405, content_type="text/plain", headers={"Allow": "GET, POST"})
        if path.startswith("/mcp/") and method == "GET":
            return Response(405, headers={"Allow": "POST", "MCP-Protocol-Version": _MCP_VERSION})
        api = _APIS.get(path)
        if path.startswith(("/v1beta/models/", "/models/")):
            api = _GOOGLE
        if method != "POST" or (api is None and not path.startswith("/mcp/")):
            return refused(404, f"Path {path} not found", "not_found")
        if not _is_json(request.headers.get("content-type", "")):
            return refused(415, "Content-Type must be application/json", "invalid_request_error")
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return refused(400, "Request body must be a JSON object", "invalid_request_error")
        if api is None:
            return await self._tools(path, body)
        for name in api.required:
            if name not in body or (name == "model" and not _is_name(body[name])):
                return _json(400, api.missing(name))
        return await self._generate(api, request, body)

    async def _generate(self, api: Api, request: Request, body: Any) -> Response:
        streams = bool(body.get("stream", False))
        if api is _CHAT:
            body["parallel_tool_calls"] = False  # see `streaming._deltas`
        if api is _GOOGLE:
            streams = ":streamGenerateContent" in request.path
            found = re.search(r"models/([^/:]+)", request.path)
            if found is None:
                return _json(400, _google_error(400, "Missing required model in request path.", {}))
            body["model"] = found.group(1)
        arguments = {"json_data": body}
        if api is not _GOOGLE:
            arguments["headers"] = dict(request.headers)
        if api is _ANTHROPIC and streams:
            return _stream(lambda send: self._message(arguments, send))
        reply = await self._call(api.method, arguments)
        if error := _provider_error(reply):
            return _json(error.status, api.error(error.status, error.message, error.body))
        if isinstance(reply, str):
            reply = json.loads(reply)
        if not streams:
            return _json(200, reply)
        return _stream(lambda send: _send_all(_events(api, reply, body), send))

    async def _message(self, arguments: dict[str, Any], send: Send) -> None:
        """Stream a message that is not there yet, and show that it is being worked on."""
        id = f"msg_{uuid.uuid4().hex[:24]}"
        await send(streaming.named(streaming.message_start(id, arguments["json_data"]["model"])))
        outcome: list[Any] = []
        done = anyio.Event()

        async def ask() -> None:
            try:
                outcome.append(await self._call(_ANTHROPIC.method, arguments))
            except CallFailedError as ex:
                outcome.append(ex)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not done.is_set():
                with anyio.move_on_after(_PING_SECONDS):
                    await done.wait()
                if not done.is_set():
                    await send(streaming.named(streaming.PING))
        reply = outcome[0]
        if isinstance(reply, CallFailedError):
            raise reply
        if error := _provider_error(reply):
            shown = _anthropic_error(error.status, error.message, error.body)
            await send(streaming.named(shown))
            return
        await _send_all(map(streaming.named, streaming.message_events(reply)), send)

    # host tools, by the Model Context Protocol

    async def _tools(self, path: str, body: Any) -> Response:
        server = path.removeprefix("/mcp/").split("/")[0]
        id, method = body.get("id"), body.get("method")
        if method == "notifications/initialized":
            return Response(202)
        try:
            if method == "initialize":
                about = {
                    "protocolVersion": _MCP_VERSION,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": server, "version": "1.0.0"},
                }
                return _rpc(id, result=about)
            if method == "tools/list":
                tools = await self._call("list_tools", {"server": server})
                return _rpc(id, result={"tools": tools})
            if method != "tools/call":
                return _rpc(id, error={"code": -32601, "message": f"Unknown method: {method}"})
            asked = body.get("params", {})
            if not asked.get("name"):
                return _rpc(id, error={"code": -32602, "message": "Missing 'name' in params"})
            arguments = {
                "server": server,
                "tool": asked["name"],
                "arguments": asked.get("arguments", {}),
            }
            said = await self._call("call_tool", arguments)
        except (CallFailedError, AttributeError) as ex:
            return _rpc(id, error={"code": -32603, "message": str(ex)})
        content = [{"type": "text", "text": said}] if isinstance(said, str) else said
        return _rpc(id, result={"content": content})


@dataclass(frozen=True)
class _ProviderError:
    status: int
    message: str
    body: Mapping[str, Any]


def _provider_error(reply: Any) -> _ProviderError | None:
    """Return the error that a program receives instead of a reply."""
    if not isinstance(reply, dict) or PROVIDER_ERROR not in reply:
        return None
    said = reply[PROVIDER_ERROR]
    body = said.get("body")
    # 400, as from Inspect's proxy: a program would repeat a request after a server's error.
    status = said.get("status") or 400
    sound = status if 200 <= status < 600 else 500
    return _ProviderError(sound, said["message"], body if body else {})


def _events(api: Api, reply: Any, body: Any) -> Iterator[bytes]:
    if api is _RESPONSES:
        yield from map(streaming.named, streaming.response_events(reply))
    elif api is _GOOGLE:
        yield streaming.data_only(reply)
    else:
        options = body.get("stream_options") or {}
        events = streaming.completion_events(
            reply, with_usage=lambda: bool(options.get("include_usage"))
        )
        yield from map(streaming.data_only, events)
        yield b"data: [DONE]\n\n"


async def _send_all(events: Iterable[bytes], send: Send) -> None:
    """Send events at once; if one of them cannot be made, those before it."""
    made = bytearray()
    try:
        for event in events:
            made += event
    finally:
        await send(bytes(made))


def _stream(write: Callable[[Send], Awaitable[None]]) -> Response:
    return Response(
        200,
        content_type="text/event-stream; charset=utf-8",
        headers={"Cache-Control": "no-cache"},
        write=write,
    )


def refused(status: int, message: str, kind: str = "invalid_request_error") -> Response:
    """Refuse a request as a model API does."""
    return _json(status, {"error": {"message": message, "type": kind, "code": status}})


def failure(fault: BaseException) -> Response:
    """Answer a request that has brought about an exception."""
    return refused(500, str(fault) or type(fault).__name__, "internal_error")


def _rpc(id: object, **outcome: object) -> Response:
    body = json.dumps({"jsonrpc": "2.0", "id": id, **outcome}).encode()
    version = {"MCP-Protocol-Version": _MCP_VERSION}
    return Response(200, body, content_type="application/json", headers=version)


def _is_json(content_type: str) -> bool:
    return content_type.split(";")[0].strip() == "application/json"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
