"""A model of the provider behind the addresses of OpenAI's and Anthropic's APIs.

Inspect's bridge translates requests and replies, so that a client reads the stop reasons, usage,
tool calls and reasoning that an eval has.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import anyio
import anyio.abc
import h11
import tinker
from inspect_ai.agent import agent_bridge
from inspect_ai.model import Model
from pydantic import ConfigDict, ValidationError, conlist, create_model

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.agents import dialects
from inspect_tinker_plugin.agents.api import (
    PROVIDER_ERROR,
    Client,
    ModelApi,
    Request,
    Response,
    is_local,
    make_refusal,
)
from inspect_tinker_plugin.contracts.errors import ConfigError, EpisodeError
from inspect_tinker_plugin.contracts.wording import missing_extra
from inspect_tinker_plugin.episode.model import RequestRefusedError

CARRIED_OUT = {
    dialects.CHAT.method: "messages tools tool_choice parallel_tool_calls max_tokens "
    "max_completion_tokens temperature top_p seed stop n logprobs top_logprobs response_format "
    "reasoning_effort frequency_penalty presence_penalty logit_bias",
    dialects.RESPONSES.method: "input instructions tools tool_choice parallel_tool_calls include "
    "max_output_tokens temperature top_p top_logprobs reasoning text",
    dialects.ANTHROPIC.method: "messages system tools tool_choice max_tokens temperature top_p "
    "top_k stop_sequences thinking output_config",
}
"""By method, the parts of a request that Inspect's bridge passes on: the provider judges them."""

_OBJECT = dict[str, Any]

_TYPES: dict[Any, str] = {
    int: "max_tokens max_completion_tokens max_output_tokens n seed top_k top_logprobs",
    float: "temperature top_p frequency_penalty presence_penalty",
    bool: "logprobs parallel_tool_calls",
    _OBJECT: "response_format text reasoning thinking output_config logit_bias",
    list[_OBJECT]: "tools",
    conlist(_OBJECT, min_length=1): "messages",
}
"""Parts of requests by their type, where Inspect's bridge does not insist on it."""

_fields: Any = {name: (kind, None) for kind, names in _TYPES.items() for name in names.split()}
_Typed = create_model("_Typed", __config__=ConfigDict(strict=True), **_fields)

WITHOUT_EFFECT = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "client_metadata",
        "safety_identifier",
        "service_tier",
        "store",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
    }
)
"""Parts of a request that do not concern the reply, or that are done here: a stream begins when
the reply is complete."""

_UNREADABLE = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What Inspect's bridge raises for a request that it cannot read; of the SDK, none arrives here."""

_OF_REQUESTS = (
    ConfigError,
    EpisodeError,
    RequestRefusedError,
    tinker.BadRequestError,
    *_UNREADABLE,
)
"""Errors that lie in a request, which no repetition mends."""


class ServedModel(ModelApi):
    """Answers requests for chat completions, responses and messages with one model.

    Args:
        model: The model; requests may call it by any name.
        token: What clients have to send as their key, if anything.
    """

    def __init__(self, model: Model, token: str | None = None) -> None:
        super().__init__(self._generate_by)
        self._model = model
        self._token = token

    async def answer(self, request: Request) -> Response:
        """Answer a request, if it has the token; without one, if it is not of a web page."""
        if not self._is_allowed(request):
            reason = "wrong or missing API key, or the request of a web page"
            return make_refusal(401, reason, "authentication_error")
        if request.method == "GET" and request.path == "/v1/models":
            listed = {"id": str(self._model), "object": "model", "created": 0, "owned_by": "tinker"}
            return Response(200, json.dumps({"object": "list", "data": [listed]}).encode())
        if not request.path.startswith("/v1/"):  # Google's API, and a task's tools
            return make_refusal(404, f"Path {request.path} not found", "not_found")
        return await super().answer(request)

    async def _reply(self, client: Client, wire: h11.Connection, request: Request) -> None:
        """Answer a request until its client leaves: nothing is sampled for nobody."""

        async def wait_for_end() -> None:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await client.receive()
            scope.cancel()

        with anyio.CancelScope() as scope:
            leaving = asyncio.ensure_future(wait_for_end())
            try:
                await super()._reply(client, wire, request)
            finally:
                leaving.cancel()

    def _is_allowed(self, request: Request) -> bool:
        if self._token is None:
            return "origin" not in request.headers and is_local(request.headers.get("host", ""))
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (sent or request.headers.get("x-api-key", "")).encode()
        return hmac.compare_digest(given, self._token.encode())

    async def _generate_by(self, method: str, arguments: dict[str, Any]) -> Any:
        """Carry out a method of the bridge by the client library that it takes the place of."""
        try:
            body = {**_check_request(method, arguments["json_data"]), "model": "inspect"}
            with internals.bind_model(self._model):
                async with agent_bridge(
                    forward_generation_config=True,
                    web_search=False,  # here nobody carries these out: the bridge withholds them
                    code_execution=False,
                    client_mcp_servers=False,
                ) as bridge:
                    # A path in a request would be read as a file of this machine.
                    bridge.allow_remote_media = False
                    reply = await _post(method, body)
        except Exception as error:
            # The bridge's own refusals have a status; the rest is of the server, or of the SDK.
            refused = isinstance(error, _OF_REQUESTS) or getattr(error, "status_code", 0) == 400
            status = 400 if refused else 502
            reason = internals.in_one_line(error)
            if isinstance(error, _UNREADABLE) and not isinstance(error, ConfigError):
                missing = "it lacks " if isinstance(error, KeyError) else ""
                reason = f"the request cannot be read: {missing}{reason}"
            return {PROVIDER_ERROR: {"status": status, "message": reason}}
        said = {**reply.model_dump(mode="json", warnings=False), "model": str(self._model)}
        if method == dialects.RESPONSES.method:
            said["status"] = "incomplete" if said.get("incomplete_details") else "completed"
        return said


def _check_request(method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a request that concern the reply."""
    body = {
        name: value
        for name, value in request.items()
        if value is not None and name not in WITHOUT_EFFECT
    }
    try:
        _Typed.model_validate(body)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from error
    unknown = sorted(body.keys() - CARRIED_OUT[method].split())
    form = body.get("response_format") or body.get("text", {}).get("format") or {}
    if form.get("type") == "json_object":
        unknown.append("json_object")
    if unknown:
        raise ConfigError(f"requests cannot have {', '.join(unknown)} here: leave it out")
    for tool in body.get("tools", ()):
        function = tool.get("function") or tool
        function.setdefault("description", "")  # the bridge asks for both
        if function is not tool or tool.get("type") == "function":
            function.setdefault("parameters", {"type": "object", "properties": {}})
    return body


async def _post(method: str, body: dict[str, Any]) -> Any:
    if method == dialects.ANTHROPIC.method:
        client = _make_client("anthropic")
        from anthropic.types import Message

        return await client.post("/v1/messages", body=body, cast_to=Message)
    client = _make_client("openai")
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response as Answer

    if method == dialects.CHAT.method:
        return await client.post("/chat/completions", body=body, cast_to=ChatCompletion)
    return await client.post("/responses", body=body, cast_to=Answer)


@cache
def _make_client(library: str) -> Any:
    """Make the client that the bridge answers: it never connects, and takes long to make."""
    try:
        if library == "anthropic":
            from anthropic import AsyncAnthropic

            return AsyncAnthropic(api_key="none")
        from openai import AsyncOpenAI

        return AsyncOpenAI(api_key="none")
    except ImportError as error:
        raise ConfigError(missing_extra(library, "agents")) from error


async def serve_model(
    model: Model, *, host: str, port: int, token: str | None, ready: Callable[[int], None]
) -> None:
    """Serve a model until cancelled.

    Args:
        model: The model.
        host: Address to listen at.
        port: Port to listen at; any free one for 0.
        token: What clients have to send as their key, if anything.
        ready: Called with the port once it is open.

    Raises:
        ConfigError: The port cannot be opened, or ``openai`` is not installed.
    """
    _make_client("openai")
    api = ServedModel(model, token)
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be opened: {error.strerror or error}") from error
    async with listener:
        ready(listener.extra(anyio.abc.SocketAttribute.local_port))
        await listener.serve(api.serve)
