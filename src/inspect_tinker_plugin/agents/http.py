"""HTTP/1.1 towards agent programs: one request per connection, as Inspect's own proxy serves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import anyio
import h11

from inspect_tinker_plugin.agents.api import (
    CallFailedError,
    Request,
    Response,
    failure,
    refused,
)
from inspect_tinker_plugin.inspect_internals import inner_exception

MAX_HEAD = 64 * 1024
MAX_BODY = 50 * 1024**2
MAX_BODIES = 128 * 1024**2
_READ_SECONDS = 300.0
_SERVER = "asyncio-proxy"


class Client(Protocol):
    """A connection of a program."""

    async def receive(self) -> bytes:
        """Return what was received; nothing at the end."""

    async def send(self, data: bytes) -> None:
        """Send; raises ``ConnectionError`` when the client is gone."""

    async def close(self) -> None:
        """Close the connection once all is sent. Safe to call again."""


Answer = Callable[[Request], Awaitable[Response]]


class Room:
    """Bounds the memory of concurrent requests: programs may send any number at once."""

    def __init__(self) -> None:
        self._used = 0

    def take(self, size: int) -> None:
        """Reserve room.

        Raises:
            RemoteProtocolError: there is none left.
        """
        if self._used + size > MAX_BODIES:
            raise h11.RemoteProtocolError("Too many large requests at once", 413)
        self._used += size

    def give_back(self, size: int) -> None:
        """Free room."""
        self._used -= size


async def serve_client(
    client: Client, answer: Answer, room: Room, failed: Callable[[Exception], None]
) -> None:
    """Answer the one request of a connection and close it.

    Errors of a client, and its leaving, are not reported. No request, however odd, may end more
    than its connection: whatever it brings about is answered with status 500, as by Inspect's
    proxy, or breaks off the stream that has begun.

    Args:
        client: The connection.
        answer: Answers the request.
        room: Bounds its size.
        failed: Told of an exception that nobody foresaw.

    Raises:
        CallFailedError: The bridge could not carry it out; the connection is closed
            without an answer.
    """
    body = bytearray()
    try:
        wire = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            with anyio.fail_after(_READ_SECONDS):
                request = await _request(client, wire, body, room)
        except (h11.RemoteProtocolError, UnicodeDecodeError, TimeoutError) as ex:
            said = str(ex) or "the request did not come in time"
            await _refuse(client, wire, refused(400, said))
            return
        except ValueError as ex:  # no address
            await _refuse(client, wire, failure(ex))
            return
        if request is None:
            return
        try:
            await _respond(client, wire, request.method, await answer(request))
        except (CallFailedError, ConnectionError):
            raise
        except Exception as ex:
            fault = inner_exception(ex)
            if not isinstance(fault, ConnectionError):
                failed(ex)
                await _refuse(client, wire, failure(fault))
    except ConnectionError:
        return
    finally:
        room.give_back(len(body))
        with anyio.CancelScope(shield=True):
            await client.close()


async def _request(
    client: Client, wire: h11.Connection, body: bytearray, room: Room
) -> Request | None:
    head: h11.Request | None = None
    while True:
        event: Any = wire.next_event()
        if event is h11.NEED_DATA:
            if wire.they_are_waiting_for_100_continue:
                go_on = wire.send(h11.InformationalResponse(status_code=100, headers=[]))
                await client.send(go_on or b"")
            wire.receive_data(await client.receive())
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            if len(body) + len(event.data) > MAX_BODY:
                raise h11.RemoteProtocolError("Body too large", 413)
            room.take(len(event.data))
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            return Request(
                method=head.method.decode("ascii"),
                path=unquote(urlsplit(head.target.decode("ascii")).path),
                headers={
                    name.decode("ascii"): value.decode("latin-1") for name, value in head.headers
                },
                body=bytes(body),
            )
        else:  # the client left
            return None


async def _respond(client: Client, wire: h11.Connection, method: str, response: Response) -> None:
    headers = {
        "Date": formatdate(usegmt=True),
        "Server": _SERVER,
        "Content-Type": response.content_type,
        **response.headers,
        "Connection": "close",
    }
    if response.write is None:
        headers["Content-Length"] = str(len(response.body))
    else:
        headers["Transfer-Encoding"] = "chunked"
    head = h11.Response(
        status_code=response.status, reason=_phrase(response.status), headers=list(headers.items())
    )
    begun = wire.send(head) or b""

    async def write(data: bytes) -> None:
        nonlocal begun
        await client.send(begun + (wire.send(h11.Data(data=data)) or b""))
        begun = b""

    if response.write is not None:
        await client.send(begun)
        begun = b""
        await response.write(write)
    elif response.body and method != "HEAD":
        await write(response.body)
    await client.send(begun + (wire.send(h11.EndOfMessage()) or b""))


async def _refuse(client: Client, wire: h11.Connection, response: Response) -> None:
    """Respond, if no response has begun."""
    if wire.our_state in (h11.IDLE, h11.SEND_RESPONSE):
        await _respond(client, wire, "GET", response)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Server Error" if 500 <= status < 600 else ""
