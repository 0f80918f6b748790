"""The model APIs that agent programs speak: an HTTP request becomes a call of Inspect's bridge.

Does on this side of the sandbox what Inspect's own proxy does inside: the same paths, checks and
errors, one request per connection. Inspect's bridge translates the requests and answers them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import anyio
import h11

from inspect_tinker_plugin.agents import dialects

logger = logging.getLogger(__name__)

PROVIDER_ERROR = "__inspect_provider_error__"
"""The key under which Inspect's bridge returns an error that is meant for the program."""

MAX_HEAD = 64 * 1024
MAX_BODY = 50 * 1024**2
MAX_BODIES = 128 * 1024**2
"""Bytes of all requests that are being answered: programs may send any number at a time."""

_READ_SECONDS = 300.0
_PING_SECONDS = 5.0
_MCP_VERSION = "2025-03-26"
_APIS = {
    "/v1/chat/completions": dialects.CHAT,
    "/v1/responses": dialects.RESPONSES,
    "/v1/messages": dialects.ANTHROPIC,
}

Send = Callable[[bytes], Awaitable[None]]
"""Sends a client some bytes of a body."""

Call = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Calls a method of the bridge by name; raises :class:`CallFailedError` if that fails."""


class CallFailedError(Exception):
    """The bridge could not carry out a call."""


class Client(Protocol):
    """A connection of a program, as anyio's streams are; with their exceptions."""

    async def receive(self) -> bytes:
        """Wait for some bytes."""

    async def send(self, data: bytes) -> None:
        """Send some bytes."""

    async def aclose(self) -> None:
        """Close the connection once all is sent. Safe to call again."""


@dataclass(frozen=True)
class Request:
    """One HTTP request of a program: its path is decoded, names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
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


class ModelApi:
    """Answers the requests of one bridge's programs."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._held = 0
        self._reported = False

    async def serve(self, client: Client) -> None:
        """Answer the one request of a connection and close it.

        A client that leaves is not reported. No request, however odd, may end more
        than its connection: an exception that it brings about is answered with status 500, as by
        Inspect's proxy, or breaks off the stream that has begun; the first is logged.
        """
        wire = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        body = bytearray()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the client left
            try:
                await self._serve(client, wire, body)
            except (CallFailedError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                raise
            except Exception as ex:
                self._report(ex)
                await _refuse(client, wire, _failure(ex))
            finally:
                self._held -= len(body)
                with anyio.CancelScope(shield=True):
                    await client.aclose()

    async def _serve(self, client: Client, wire: h11.Connection, body: bytearray) -> None:
        try:
            with anyio.fail_after(_READ_SECONDS):
                request = await self._receive(client, wire, body)
        except (h11.RemoteProtocolError, UnicodeDecodeError, TimeoutError) as ex:
            reason = str(ex) or "the request did not come in time"
            return await _refuse(client, wire, make_refusal(400, reason))
        except ValueError as ex:  # no address
            return await _refuse(client, wire, _failure(ex))
        if request is not None:
            await self._reply(client, wire, request)

    async def _reply(self, client: Client, wire: h11.Connection, request: Request) -> None:
        """Answer a request, also if its client has left: the task waits for the model, too."""
        await _respond(client, wire, request.method, await self.answer(request))

    async def _receive(
        self, client: Client, wire: h11.Connection, body: bytearray
    ) -> Request | None:
        """Read a request; ``None`` if the client leaves."""
        head: h11.Request | None = None
        while True:
            event: Any = wire.next_event()
            if event is h11.NEED_DATA:
                if wire.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await client.send(wire.send(go_on) or b"")
                try:
                    wire.receive_data(await client.receive())
                except anyio.EndOfStream:
                    wire.receive_data(b"")
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                if len(body) + len(event.data) > MAX_BODY:
                    raise h11.RemoteProtocolError("Body too large", 413)
                if self._held + len(event.data) > MAX_BODIES:
                    raise h11.RemoteProtocolError("Too many large requests at once", 413)
                self._held += len(event.data)
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = {name.decode("ascii"): v.decode("latin-1") for name, v in head.headers}
                path = unquote(urlsplit(head.target.decode("ascii")).path)
                return Request(head.method.decode("ascii"), path, headers, bytes(body))
            else:
                return None

    def _report(self, fault: Exception) -> None:
        if not self._reported:
            self._reported = True
            logger.warning(
                "a program's request to the model API could not be answered (%s: %.200s); the "
                "program was shown an error. Reported once per bridge",
                type(fault).__name__,
                fault,
                exc_info=fault,
            )

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        path, method = request.path, request.method
        if method == "OPTIONS":
            return Response(405, content_type="text/plain", headers={"Allow": "GET, POST"})
        if path.startswith("/mcp/") and method == "GET":
            return Response(405, headers={"Allow": "POST", "MCP-Protocol-Version": _MCP_VERSION})
        api = _APIS.get(path)
        if path.startswith(("/v1beta/models/", "/models/")):
            api = dialects.GOOGLE
        if method != "POST" or (api is None and not path.startswith("/mcp/")):
            return make_refusal(404, f"Path {path} not found", "not_found")
        content_type = request.headers.get("content-type", "").split(";")[0].strip()
        if content_type != "application/json":
            return make_refusal(415, "Content-Type must be application/json")
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return make_refusal(400, "Request body must be a JSON object")
        if api is None:
            return await self._answer_tools(path, body)
        for name in api.required:
            is_given = name in body and (name != "model" or _is_name(body[name]))
            if not is_given:
                return _json(400, api.missing(name))
        return await self._generate(api, request, body)

    async def _generate(self, api: dialects.Api, request: Request, body: Any) -> Response:
        streams = bool(body.get("stream", False))
        if api is dialects.CHAT:
            body["parallel_tool_calls"] = False  # see `dialects._deltas`
        arguments = {"json_data": body, "headers": dict(request.headers)}
        if api is dialects.GOOGLE:
            streams = ":streamGenerateContent" in request.path
            found = re.search(r"models/([^/:]+)", request.path)
            if found is None:
                return _json(400, api.error(400, "Missing required model in request path.", {}))
            body["model"] = found.group(1)
            del arguments["headers"]
        if api is dialects.ANTHROPIC and streams:
            return _stream(lambda send: self._stream_message(arguments, send))
        reply = await self._call(api.method, arguments)
        if error := _provider_error(api, reply):
            return _json(*error)
        if isinstance(reply, str):
            reply = json.loads(reply)
        if not streams:
            return _json(200, reply)
        return _stream(lambda send: _send_all(_encode_events(api, reply, body), send))

    async def _stream_message(self, arguments: dict[str, Any], send: Send) -> None:
        """Stream a message that is not there yet, and show that it is being worked on."""
        api, id = dialects.ANTHROPIC, f"msg_{uuid.uuid4().hex[:24]}"
        start = dialects.message_start(id, arguments["json_data"]["model"])
        await send(dialects.encode_named(start))
        call = self._call(api.method, arguments)
        asking = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([asking], timeout=_PING_SECONDS))[0]:
                await send(dialects.encode_named(dialects.PING))
            reply = await asking
        finally:
            asking.cancel()
        error = _provider_error(api, reply)
        events = [error[1]] if error else dialects.message_events(reply)
        await _send_all(map(dialects.encode_named, events), send)

    async def _answer_tools(self, path: str, body: Any) -> Response:
        """Answer a request for tools of the host, by the Model Context Protocol."""
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
            given = {"tool": asked["name"], "arguments": asked.get("arguments", {})}
            result = await self._call("call_tool", {"server": server, **given})
        except (CallFailedError, AttributeError) as ex:
            return _rpc(id, error={"code": -32603, "message": str(ex)})
        content = [{"type": "text", "text": result}] if isinstance(result, str) else result
        return _rpc(id, result={"content": content})


async def _respond(client: Client, wire: h11.Connection, method: str, response: Response) -> None:
    headers = {
        "Date": formatdate(usegmt=True),
        "Server": "asyncio-proxy",
        "Content-Type": response.content_type,
        **response.headers,
        "Connection": "close",
    }
    if response.write is None:
        headers["Content-Length"] = str(len(response.body))
    else:
        headers["Transfer-Encoding"] = "chunked"
    try:
        reason = HTTPStatus(response.status).phrase
    except ValueError:
        reason = "Server Error" if 500 <= response.status < 600 else ""
    head = h11.Response(status_code=response.status, reason=reason, headers=list(headers.items()))
    unsent = wire.send(head) or b""

    async def write(data: bytes) -> None:
        nonlocal unsent
        await client.send(unsent + (wire.send(h11.Data(data=data)) or b""))
        unsent = b""

    if response.write is not None:
        await client.send(unsent)
        unsent = b""
        await response.write(write)
    elif response.body and method != "HEAD":
        await write(response.body)
    await client.send(unsent + (wire.send(h11.EndOfMessage()) or b""))


async def _refuse(client: Client, wire: h11.Connection, response: Response) -> None:
    """Respond, if no response has begun."""
    if wire.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        await _respond(client, wire, "GET", response)


def _provider_error(api: dialects.Api, reply: Any) -> tuple[int, dialects.Event] | None:
    """Return status and body of the error that a program receives instead of a reply."""
    if not isinstance(reply, dict) or PROVIDER_ERROR not in reply:
        return None
    error = reply[PROVIDER_ERROR]
    # 400, as from Inspect's proxy: a program would repeat a request after a server's error.
    status = error.get("status") or 400
    sound = status if 200 <= status < 600 else 500
    return sound, api.error(sound, error["message"], error.get("body") or {})


def _encode_events(api: dialects.Api, reply: Any, body: Any) -> Iterator[bytes]:
    if api is dialects.RESPONSES:
        yield from map(dialects.encode_named, dialects.response_events(reply))
    elif api is dialects.GOOGLE:
        yield f"data: {json.dumps(reply)}\n\n".encode()  # escaped: UTF-8 has no lone surrogates
    else:
        options = body.get("stream_options") or {}
        events = dialects.completion_events(
            reply, with_usage=lambda: bool(options.get("include_usage"))
        )
        yield from map(dialects.encode_data, events)
        yield b"data: [DONE]\n\n"


async def _send_all(events: Iterable[bytes], send: Send) -> None:
    """Send events in one piece; if one of them cannot be made, those before it."""
    made = bytearray()
    try:
        for event in events:
            made += event
    finally:
        await send(bytes(made))


def _stream(write: Callable[[Send], Awaitable[None]]) -> Response:
    kind, headers = "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"}
    return Response(200, content_type=kind, headers=headers, write=write)


def _json(status: int, body: object) -> Response:
    return Response(status, json.dumps(body).encode())


def make_refusal(status: int, message: str, kind: str = "invalid_request_error") -> Response:
    """Make the answer that refuses a request, in the form of OpenAI's API."""
    return _json(status, {"error": {"message": message, "type": kind, "code": status}})


def _failure(fault: BaseException) -> Response:
    """Answer a request that has brought about an exception."""
    return make_refusal(500, str(fault) or type(fault).__name__, "internal_error")


def _rpc(id: object, **outcome: object) -> Response:
    body = json.dumps({"jsonrpc": "2.0", "id": id, **outcome}).encode()
    version = {"MCP-Protocol-Version": _MCP_VERSION}
    return Response(200, body, content_type="application/json", headers=version)


def is_local(host: str) -> bool:
    """Whether a ``Host`` header names this machine; web pages may point theirs here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
