"""A program is answered as by Inspect's own proxy, which runs here beside ours.

Both are asked the same over real sockets, and both are given the same reply of the bridge: each
request carries it.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import inspect_ai
import pytest
from tests.agents.sandboxed import free_port
from tests.waiting import wait_until

from inspect_tinker_plugin.agents.api import PROVIDER_ERROR, CallFailedError, ModelApi, Request

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
BINARIES = sorted((Path(inspect_ai.__file__).parent / "binaries").glob(f"*-{ARCHITECTURE}-v*"))
SERVICES = Path("/var/tmp/sandbox-services/bridge_model_service")
JSON = {"content-type": "application/json"}
BEGINNINGS = {"response.created", "response.in_progress"}

Seen = list[tuple[str, Any]]


@dataclass
class Side:
    """One of the two proxies: its port, and what it asked of the bridge."""

    port: int
    seen: Seen = field(default_factory=list)

    def ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        data = body if isinstance(body, str) else json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        before = len(self.seen)
        try:
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            text = re.sub(r"msg_[0-9a-f]{24}", "msg_", reply.read().decode())
            told = {k: v for k, v in reply.getheaders() if k not in ("Date", "Connection")}
        finally:
            connection.close()
        for _, params in self.seen[before:]:
            params.get("headers", {}).pop("host", None)
        return reply.status, reply.reason, told, parsed(text), self.seen[before:]


def parsed(text: str) -> Any:
    """What a client reads: JSON, or the events of a stream."""
    if not text.startswith(("data:", "event:")):
        return json.loads(text) if text else None
    lines = [line.partition(": ") for line in text.splitlines()]
    events = [
        (name, json.loads(value) if name == "data" and value != "[DONE]" else value)
        for name, _, value in lines
    ]
    for _, event in events:
        if isinstance(event, dict) and event.get("type") in BEGINNINGS:
            # Inspect's has the items already, which OpenAI's client takes for second ones.
            del event["response"]["output"], event["response"]["status"]
    return events


def reply_to(method: str, params: dict[str, Any]) -> Any:
    """What the bridge replies: what the request says."""
    if method == "list_tools":
        return [{"name": params["server"]}]
    asked = params["arguments" if method == "call_tool" else "json_data"]
    if "fails" in asked:
        raise CallFailedError(asked["fails"])
    return asked.get("reply")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    if platform.system() != "Linux" or not BINARIES:
        pytest.skip("Inspect's proxy runs on Linux, on machines that Inspect ships it for")
    folder = tmp_path_factory.mktemp("tools")
    with tarfile.open(BINARIES[-1]) as tools:
        tools.extractall(folder, filter="tar")
    instance = f"parity_{uuid.uuid4().hex}"
    queue = SERVICES / instance
    for place, mode in {SERVICES.parent: 0o1777, SERVICES: 0o700}.items():
        if not place.exists():
            place.mkdir()
            place.chmod(mode)  # Inspect takes no other
    (queue / "requests").mkdir(parents=True)
    (queue / "responses").mkdir()
    side = Side(free_port())
    over = threading.Event()
    process = subprocess.Popen(
        [folder / "inspect-sandbox-tools", "model_proxy"],
        env=os.environ
        | {
            "BRIDGE_MODEL_SERVICE_PORT": str(side.port),
            "BRIDGE_MODEL_SERVICE_INSTANCE": instance,
        },
        stdout=subprocess.DEVNULL,
    )
    answering = threading.Thread(target=answer_files, args=(queue, side.seen, over))
    answering.start()
    try:
        wait_until(lambda: listens(side.port), seconds=120)
        yield side
    finally:
        process.kill()
        process.wait()
        over.set()
        answering.join()
        shutil.rmtree(queue)


def answer_files(queue: Path, seen: Seen, over: threading.Event) -> None:
    """Inspect's side of the queue."""
    while not over.wait(0.005):
        for file in (queue / "requests").glob("*.json"):
            try:
                request = json.loads(file.read_text())
            except ValueError:
                continue  # half written
            file.unlink()
            seen.append((request["method"], request["params"]))
            response = {"id": request["id"], "result": None, "error": None}
            try:
                response["result"] = reply_to(request["method"], request["params"])
            except CallFailedError as ex:
                response["error"] = str(ex)
            written = queue / request["id"]
            written.write_text(json.dumps(response))
            written.rename(queue / "responses" / f"{request['id']}.json")


@pytest.fixture(scope="module")
def ours() -> Iterator[Side]:
    side = Side(free_port())

    async def call(method: str, params: dict[str, Any]) -> Any:
        side.seen.append((method, json.loads(json.dumps(params))))
        return reply_to(method, params)

    async def listen(*, task_status: Any) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=side.port)
        async with listener:
            task_status.started()
            await listener.serve(ModelApi(call).serve)

    with anyio.from_thread.start_blocking_portal() as portal:
        serving, _ = portal.start_task(listen)
        yield side
        serving.cancel()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


LONG = "A line — with “quotes”, é and 🦜.\n" * 5
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": "' + "x" * 60 + '"}'},
}


def chat_reply(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    head = {"id": "x", "object": "chat.completion", "created": 7, "model": "m"}
    return {**head, "choices": [said], "usage": {"total_tokens": 3}, **more}


CHAT_REPLIES = {
    "text": chat_reply({"content": LONG}),
    "none": chat_reply({"content": None}),
    "call": chat_reply({"content": LONG, "tool_calls": [CHAT_CALL]}),
    "two calls": chat_reply({"content": None, "tool_calls": [CHAT_CALL, CHAT_CALL]}),
    "no arguments": chat_reply(
        {"tool_calls": [{**CHAT_CALL, "function": {"name": "f", "arguments": ""}}]}
    ),
    "custom call": chat_reply({"tool_calls": [{"id": "c", "type": "custom"}]}),
    "fingerprint": chat_reply({"content": "a"}, system_fingerprint="fp"),
    "two choices": chat_reply({}, choices=chat_reply({"content": "b"})["choices"] * 2),
}
RESPONSE_ITEMS: dict[str, dict[str, Any]] = {
    "message": {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": LONG, "annotations": []},
            {"type": "output_text", "text": "", "annotations": []},
            {"type": "refusal", "refusal": LONG},
            {"type": "other", "x": 1},
        ],
    },
    "reasoning": {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": LONG}, {"type": "other"}],
        "content": [{"type": "reasoning_text", "text": LONG}, {"type": "other"}],
    },
    "no reasoning": {"type": "reasoning", "id": "r", "summary": [], "content": None},
    "function call": {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": LONG,
        "status": "completed",
    },
    "custom tool call": {"type": "custom_tool_call", "id": "c", "input": LONG},
    "computer call": {"type": "computer_call", "id": "c"},
    "unknown": {"type": "local_shell_call", "id": "w"},
}


def response_reply(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "r", "object": "response", "status": "completed", "output": [*items], **more}


BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": LONG, "signature": "s"},
    {"type": "text", "text": LONG},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": LONG}},
    {"type": "redacted_thinking", "data": "d"},
    {"type": "text", "text": ""},
    {"type": "server_tool_use", "id": "t", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "t", "content": [{"a": 1}]},
    {"type": "thinking", "thinking": ""},
]


def message_reply(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
    usage = {"input_tokens": 7, "output_tokens": 3, "cache_read_input_tokens": 1}
    tail = {"stop_reason": "tool_use", "stop_sequence": None, "usage": usage}
    return {**head, "content": [*blocks], **tail, **more}


CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GOOGLE = "/v1beta/models/gemini:generateContent"
GOOGLE_STREAM = "/v1beta/models/gemini:streamGenerateContent?alt=sse"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": []},
    RESPONSES: {"model": "m", "input": "x"},
    ANTHROPIC: {"model": "m", "messages": [], "max_tokens": 5},
    GOOGLE: {"contents": []},
    GOOGLE_STREAM: {"contents": []},
}
PATHS = [CHAT, RESPONSES, ANTHROPIC, GOOGLE, GOOGLE_STREAM]


def cases() -> Iterator[Any]:
    def case(name: str, path: str, body: Any, method: str = "POST", **headers: str) -> Any:
        sent = JSON | {key.replace("_", "-"): value for key, value in headers.items()}
        return pytest.param(method, path, body, sent, id=name.replace(" ", "-"))

    replies = [
        *((CHAT, name, reply) for name, reply in CHAT_REPLIES.items()),
        *((RESPONSES, name, response_reply(item)) for name, item in RESPONSE_ITEMS.items()),
        (RESPONSES, "all", response_reply(*RESPONSE_ITEMS.values())),
        (ANTHROPIC, "all", message_reply(*BLOCKS)),
        (ANTHROPIC, "nothing", message_reply()),
        (ANTHROPIC, "no usage", message_reply(usage={})),
        (GOOGLE, "text", {"candidates": [{"a": LONG}]}),
        (GOOGLE_STREAM, "text", {"candidates": [{"a": LONG}]}),
        (GOOGLE_STREAM, "half a character", {"candidates": [{"a": "\ud800"}]}),
    ]
    for path, name, reply in replies:
        for stream in (False, True):
            body = BODIES[path] | {"reply": reply, "stream": stream}
            yield case(f"{path} {name} {stream}", path, body)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield case("usage", CHAT, BODIES[CHAT] | {"reply": CHAT_REPLIES["text"]} | with_usage)

    for path in PATHS:
        for status in (None, 401, 413, 418, 429, 500, 529):
            error = {"status": status, "message": "No — really", "body": {"message": "a", "x": 1}}
            yield case(
                f"{path} error {status}", path, BODIES[path] | {"reply": {PROVIDER_ERROR: error}}
            )
        refused = {PROVIDER_ERROR: {"status": 429, "message": "slow"}}
        yield case(f"{path} refused", path, BODIES[path] | {"reply": refused, "stream": True})
        for left_out in BODIES[path]:
            body = {name: value for name, value in BODIES[path].items() if name != left_out}
            yield case(f"{path} no {left_out}", path, body | {"reply": {"a": 1}})
        for model in (1, "", None):
            yield case(f"{path} model {model}", path, BODIES[path] | {"model": model, "reply": {}})
        yield case(f"{path} headers", path, BODIES[path] | {"reply": {}}, x_own="1", accept="a")
        yield case(f"{path} text", path, BODIES[path] | {"reply": {}}, content_type="text/plain")
        kind = "Application/JSON; charset=utf-8"
        yield case(f"{path} charset", path, BODIES[path] | {"reply": {}}, content_type=kind)
        for name, text in {"empty": "", "broken": "{", "list": "[1]", "null": "null"}.items():
            yield case(f"{path} {name}", path, text)
        for method in ("GET", "OPTIONS"):
            yield case(f"{path} {method}", path, "", method)
    for path in ("/", "/v1/models", f"{CHAT}/", "/mcp"):
        yield case(f"no {path}", path, {})
    yield case("query", f"{CHAT}?beta=true", BODIES[CHAT] | {"reply": {"a": 1}})
    yield case("encoded", "/v1/chat%2Fcompletions", BODIES[CHAT] | {"reply": {"a": 1}})
    yield case("short google", "/models/g:generateContent", {"reply": {"a": 1}})
    yield case("google alone", "/v1beta/models/", {"reply": {"a": 1}})

    def rpc(method: str, **params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": 3, "method": method, "params": params}

    for name, body in {
        "initialize": rpc("initialize"),
        "initialized": rpc("notifications/initialized"),
        "list": rpc("tools/list"),
        "call": rpc("tools/call", name="t", arguments={"reply": LONG}),
        "call of parts": rpc("tools/call", name="t", arguments={"reply": [{"type": "text"}]}),
        "call that fails": rpc("tools/call", name="t", arguments={"fails": "it cannot"}),
        "call without arguments": rpc("tools/call", name="t"),
        "call of nothing": rpc("tools/call"),
        "unknown": rpc("ping"),
        "no method": {"id": 1},
    }.items():
        yield case(f"mcp {name}", "/mcp/srv", body)
        yield case(f"mcp {name} deep", "/mcp/srv/x/", body)
    yield case("mcp get", "/mcp/srv", "", "GET")


@pytest.mark.parametrize(("method", "path", "body", "headers"), list(cases()))
def test_a_request_is_answered_as_by_inspects_proxy(
    ours: Side, theirs: Side, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    ask = partial(Side.ask, method=method, path=path, body=body, headers=headers)
    assert ask(ours) == ask(theirs)


def raw(target: str, body: str) -> bytes:
    """A request as no client library would send it."""
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def nested(depth: int) -> str:
    return json.dumps(BODIES[CHAT])[:-1] + f', "metadata": {"[" * depth}{"]" * depth}}}'


STREAM = BODIES[CHAT] | {"stream": True, "reply": CHAT_REPLIES["text"]}
HALF = json.dumps(message_reply({"type": "text", "text": "\ud800"}) | {"model": "m"})
HOSTILE = {
    "options that are none": [
        raw(CHAT, json.dumps(STREAM | {"stream_options": options}))
        for options in (True, "x", 5, [1])
    ],
    "lists in lists": [raw(CHAT, "[" * 100_000), raw("/mcp/x", "[" * 100_000)],
    "closed lists in lists": [raw(CHAT, nested(depth)) for depth in range(900, 1000, 9)],
    "no address": [raw("//[", "{}"), raw("http://[::1", "{}")],
    "half a character": [
        raw(ANTHROPIC, json.dumps(BODIES[ANTHROPIC] | {"model": "\ud800", "stream": True})),
        raw(
            ANTHROPIC,
            json.dumps(BODIES[ANTHROPIC] | {"stream": True})[:-1] + f', "reply": {HALF}}}',
        ),
    ],
}


def send(side: Side, request: bytes) -> tuple[str, list[bytes]]:
    """Send a request; return the status of what comes back, and the events of a stream."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", side.port), timeout=60) as client:
        client.sendall(request)
        with suppress(ConnectionResetError):
            while data := client.recv(65536):
                received += data
    events = re.findall(rb"^(?:data|event): .*$", received, re.MULTILINE)
    return (
        received.split(b"\r\n")[0].decode(),
        [re.sub(rb"msg_[0-9a-f]{24}", b"msg_", event) for event in events],
    )


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_request_ends_more_than_its_connection(ours: Side, theirs: Side, kind: str) -> None:
    for request in HOSTILE[kind]:
        answers = [send(side, request) for side in (ours, theirs)]
        # How deep lists may be depends on the stack below.
        assert kind == "closed lists in lists" or answers[0] == answers[1]
        for side in (ours, theirs):
            assert side.ask("POST", CHAT, BODIES[CHAT] | {"reply": {}}, JSON)[0] == 200


async def test_a_stream_of_messages_shows_that_somebody_works_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.agents.api._PING_SECONDS", 0.01)
    sent = bytearray()
    waited = anyio.Event()

    async def call(method: str, params: dict[str, Any]) -> Any:
        await waited.wait()
        return message_reply({"type": "text", "text": "late"})

    async def send(data: bytes) -> None:
        sent.extend(data)
        if sent.count(b"event: ping") == 3:
            waited.set()

    body = json.dumps(BODIES[ANTHROPIC] | {"stream": True}).encode()
    response = await ModelApi(call).answer(Request("POST", ANTHROPIC, JSON, body))
    assert response.write is not None
    await response.write(send)

    text = sent.decode()
    assert text.index("message_start") < text.index("ping") < text.index("late")


async def test_a_program_that_leaves_while_its_stream_waits_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.agents.api._PING_SECONDS", 0.01)
    request = raw(ANTHROPIC, json.dumps(BODIES[ANTHROPIC] | {"stream": True}))

    class Leaving:
        async def receive(self) -> bytes:
            return request

        async def send(self, data: bytes) -> None:
            if b"ping" in data:
                raise anyio.BrokenResourceError

        async def aclose(self) -> None:
            pass

    async def call(method: str, params: dict[str, Any]) -> Any:
        await anyio.sleep_forever()

    with anyio.fail_after(30):
        await ModelApi(call).serve(Leaving())
    assert not caplog.records
