"""The HTTP server of ``inspect rl serve``: one process that speaks three protocols.

====================================  =====================================================
``POST /v1/rollouts``                 a group of episodes, as plain JSON
``POST /run, /aggregate_metrics``     NeMo Gym's environment server
``/mcp, /ws, /harbor_env/...``        OpenEnv's Harbor server
``GET /health, /ready, /metrics``     for whoever operates it
====================================  =====================================================

A client that goes away ends its own episodes, and no others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import uvicorn
import websockets  # noqa: F401 - without it uvicorn answers /ws with 404, and says nothing
from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inspect_tinker_plugin.agents.api import is_local
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import write_json
from inspect_tinker_plugin.rl.env import wait_to_start
from inspect_tinker_plugin.serve import gym, openenv
from inspect_tinker_plugin.serve.host import FIELDS, BusyError, Host, TooLongError
from inspect_tinker_plugin.serve.processes import handle_signals, run_workers
from inspect_tinker_plugin.serve.results import write_result
from inspect_tinker_plugin.serve.samplers import LentSampler

T = TypeVar("T")

OPEN = ("/health", "/ready")
"""Paths that need no token."""

MAX_BODY = 2**20
"""Bytes of a request: they choose samples, and hold no tokens."""

MAX_AGGREGATED = 2**26
"""Bytes of a request to aggregate: it has all rollouts of a run, without their tokens."""

MAX_SECONDS = 60
"""Seconds until a request has arrived as a whole."""

ANSWER_SECONDS = 30
"""Seconds in which a server that ends releases sandboxes and answers."""

STATUSES = {BusyError: 503, TooLongError: 504, ConfigError: 400, WebSocketDisconnect: 499}
"""Status by error; that of a request whose client went away reaches nobody."""


class GroupRequest(BaseModel):
    """The body of ``/v1/rollouts``."""

    model_config = ConfigDict(extra="forbid")

    task: str
    sample: StrictInt | StrictStr
    size: StrictInt | None = None
    sampler: LentSampler | None = None


class TasksRequest(BaseModel):
    """The body of OpenEnv's Task API."""

    split: str = ""
    index: int = 0
    start: int | None = None
    stop: int | None = None


class Call(BaseModel):
    """A JSON-RPC request."""

    id: Any = None
    method: str
    params: dict[str, Any] = {}


class Frame(BaseModel):
    """A message of a session on ``/ws``."""

    type: str
    data: dict[str, Any] | None = None


class Gate:
    """Refuses requests without the token, those of web pages, and those that are too large."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        most = MAX_AGGREGATED if scope["path"] == "/aggregate_metrics" else MAX_BODY
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self._token is not None and not secrets.compare_digest(given, self._token.encode()):
            status, reason = 401, "the token is missing or wrong"
        elif "origin" in headers or (self._token is None and not is_local(headers.get("host", ""))):
            status, reason = 403, "requests of web pages, and under other names, are refused"
        elif int(headers.get("content-length", "0")) > most or "transfer-encoding" in headers:
            status, reason = 413, f"a request has at most {most} bytes, and says how many"
        elif scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        else:
            await wait_to_start()  # many requests may arrive at once
            return await self._app(scope, in_time(receive), send)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            await answer({"detail": reason}, status)(scope, receive, send)


def answer(content: Any, status: int = 200, **headers: str) -> Response:
    """Return a response in JSON."""
    return Response(write_json(content), status, headers, "application/json")


def in_time(receive: Receive) -> Receive:
    """Return what receives a request, and raises ``TimeoutError`` if its body takes too long."""
    deadline = asyncio.get_running_loop().time() + MAX_SECONDS
    arrived = False

    async def receive_in_time() -> Message:
        nonlocal arrived
        async with asyncio.timeout_at(None if arrived else deadline):
            message = await receive()
        arrived = not message.get("more_body", False)
        return message

    return receive_in_time


async def while_present(gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """Run something for a client, and cancel it when the client goes away.

    Raises:
        WebSocketDisconnect: It went away; the work has ended.
    """
    running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise WebSocketDisconnect
    finally:
        leaving.cancel()
        running.cancel()
        await asyncio.gather(running, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    message: Message = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await request.receive()


def create_app(host: Host, *, token: str | None = None, patience: float = 300.0) -> FastAPI:
    """Make the application.

    Args:
        host: Runs the episodes, while the application runs.
        token: What clients send as ``Authorization: Bearer TOKEN``, if they must.
        patience: Seconds that running episodes have after a signal.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with host:
            with handle_signals(host, patience):
                yield

    app = FastAPI(title="inspect rl serve", lifespan=lifespan, openapi_url=None)
    app.add_middleware(Gate, token=token)

    for kind, status in STATUSES.items():
        app.add_exception_handler(kind, partial(_refuse, status))

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> Response:
        return answer({"detail": error.errors()}, 422)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, bool]:
        response.status_code = 503 if host.draining else 200
        return {"ready": not host.draining}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(host.metrics(), media_type="text/plain; version=0.0.4")

    @app.post("/v1/rollouts")
    async def rollouts(body: GroupRequest, request: Request) -> Response:
        run = host.run(body.task, body.sample, body.sampler, size=body.size)
        results = await while_present(_wait_for_disconnect(request), run)
        return answer({"rollouts": [write_result(each) for each in results]})

    # NeMo Gym

    @app.post("/run")
    async def run(body: gym.EpisodeRequest, request: Request) -> Response:
        episode = gym.run_episode(host, body)
        return answer(await while_present(_wait_for_disconnect(request), episode))

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(body: gym.AggregateRequest) -> Response:
        return answer(gym.aggregate(body.verify_responses))

    # OpenEnv

    @app.get("/harbor_env/splits")
    async def splits() -> list[dict[str, Any]]:
        return openenv.splits(host)

    @app.post("/harbor_env/num_tasks")
    async def num_tasks(body: TasksRequest) -> dict[str, Any]:
        return {"num_tasks": len(openenv.find_service(host, body.split).samples)}

    @app.post("/harbor_env/task")
    async def task(body: TasksRequest) -> dict[str, Any]:
        return {"task": openenv.task_ref(host, body.split, body.index)}

    @app.post("/harbor_env/task_range")
    async def task_range(body: TasksRequest) -> dict[str, Any]:
        count = len(openenv.find_service(host, body.split).samples)
        chosen = range(count)[slice(body.start, body.stop)][:1000]
        return {"tasks": [openenv.task_ref(host, body.split, index) for index in chosen]}

    @app.post("/mcp")
    async def mcp(body: Call, request: Request) -> Response:
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": body.id}
        params = body.params
        match body.method:
            case "openenv/session/create":
                # A session holds nothing: what an episode needs lives as long as its call.
                result: Any = {"session_id": uuid.uuid4().hex}
            case "openenv/session/close":
                result = {"session_id": params.get("session_id"), "closed": True}
            case "tools/list":
                result = {"tools": openenv.TOOLS}
            case "tools/call":
                name, arguments = params.get("name", ""), params.get("arguments") or {}
                call = openenv.call_tool(host, name, arguments)
                result = {"data": await while_present(_wait_for_disconnect(request), call)}
            case other:
                reason = {"code": -32601, "message": f"there is no method {other!r}"}
                return answer({**reply, "error": reason})
        return answer({**reply, "result": result})

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        inbox: asyncio.Queue[str | bytes] = asyncio.Queue(maxsize=16)

        async def receive() -> None:
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                if inbox.full():  # who waits here would not see the client leave
                    return await socket.close(1008, "too many messages without an answer")
                inbox.put_nowait(message.get("text") or message.get("bytes") or "")

        async def converse() -> None:
            while (reply := await _answer(host, await inbox.get())) is not None:
                await socket.send_text(write_json(reply).decode())

        try:
            await while_present(receive(), converse())
            await socket.close()
        except WebSocketDisconnect:
            return

    return app


def _refuse(status: int, request: Request, error: Exception) -> Response:
    again = {"Retry-After": "5"} if status == 503 else {}
    return answer({"detail": str(error)}, status, **again)


async def _answer(host: Host, text: str | bytes) -> dict[str, Any] | None:
    """Answer a message of a session; ``None`` ends it."""
    try:
        frame = Frame.model_validate_json(text)
    except ValueError as error:
        return _describe_refusal(str(error), "INVALID_JSON")
    data = frame.data or {}
    if frame.type == "close":
        return None
    if frame.type == "state":
        return {"type": "state", "data": {"episode_id": None, "step_count": 0}}
    if frame.type == "reset":
        return {"type": "observation", "data": _wrap_observation({})}
    if data.get("type") == "list_tools":
        return {"type": "observation", "data": _wrap_observation({"tools": openenv.TOOLS})}
    name = data.get("tool_name")
    try:
        result = await openenv.call_tool(host, name, data.get("arguments") or {})
    except ConfigError as error:
        return _describe_refusal(str(error), "EXECUTION_ERROR")
    return {"type": "observation", "data": _wrap_observation({"tool_name": name, "result": result})}


def _describe_refusal(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def _wrap_observation(observation: dict[str, Any]) -> dict[str, Any]:
    return {"observation": observation, "reward": None, "done": False}


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": JsonFormatter}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {"uvicorn.access": {"level": "WARNING"}},
}
"""Structured logs on stderr; requests are not logged, episodes are."""


def run_server(
    make_host: Callable[[], Host],
    *,
    token: str | None,
    patience: float,
    workers: int,
    host: str,
    port: int,
    opened: Callable[[int], None],
) -> None:
    """Serve until a signal comes.

    Args:
        make_host: Loads the tasks, in each of the processes; of several, something that pickles.
        token: As in :func:`create_app`.
        patience: As in :func:`create_app`.
        workers: Processes behind the address.
        host: Address to listen at.
        port: Port to listen at; any free one for 0.
        opened: Called with the port: by one process once its tasks are loaded, before it answers.

    Raises:
        ConfigError: The address cannot be opened.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)

    def open_address(step: Callable[[], object]) -> None:
        try:
            step()
        except OSError as error:
            listening.close()
            reason = error.strerror or error
            raise ConfigError(f"{host}:{port} cannot be opened: {reason}") from error

    def announce() -> None:
        # Whoever reads the address can connect, and waits for the first answer. Another server may
        # have bound it too while this one loaded its tasks: only one of them may listen.
        open_address(listening.listen)
        opened(listening.getsockname()[1])

    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    open_address(lambda: listening.bind((host, port)))

    def load() -> Host:
        loaded = make_host()
        announce()
        return loaded

    if workers > 1:
        announce()
        sys.exit(run_workers(partial(_serve, listening, make_host, token, patience), workers))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a script. The server handles Ctrl-C nevertheless, and raises the
        # signals that it has handled again at its end: this is the handler that is expected then.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(listening, load, token, patience)


def _serve(
    listening: socket.socket, make_host: Callable[[], Host], token: str | None, patience: float
) -> None:
    """Serve in this process."""
    config = uvicorn.Config(
        create_app(make_host(), token=token, patience=patience),
        log_config=LOGGING,
        http="h11",  # bounds headers
        ws_max_size=MAX_BODY,
        timeout_graceful_shutdown=ANSWER_SECONDS,
    )
    server = uvicorn.Server(config)
    server.run([listening])
    if not server.started:
        sys.exit(1)
