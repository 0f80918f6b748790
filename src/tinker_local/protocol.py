"""The layer between the Tinker SDK and SkyRL's server, which handles all their differences.

Written for SkyRL 0.2.0 (`settings.SUPPORTED_SKYRL`), whose published wheels speak JSON only,
while `tinker >= 0.25` sends and expects protobuf. SkyRL's repository has protobuf since after
0.3.0: with the first release that has it, `wire` and the parts marked *protobuf* can be removed;
the rest of the table has to be checked then, line by line.

================================  ==================================================
request                           what is changed
================================  ==================================================
forward_backward                  *protobuf* request; forward-only ones go to `forward`
retrieve_future                   *protobuf* answers; failures as the SDK reads them, also of
                                  results that are not finite, which SkyRL cannot write; a
                                  request still running is answered before the SDK's timeout
asample                           `sample_sequence_ids` added; options that would be
                                  ignored, and calls over the model's context, are refused
create_model, …_sampling_session  another model than the one served is refused, and weights
                                  that do not exist
load_weights with a session       becomes weights_info, create_model and load_weights, with
                                  an alias for the model id that the SDK expects
client/config, samplers/…,        missing in SkyRL, answered here
sessions/…/finish,
DELETE …/checkpoints/…
healthz                           says 503 until the engine has loaded the model
================================  ==================================================

:class:`Records` reads and corrects SkyRL's database where its HTTP interface offers no way to do
so: plain SQL on the SQLite file that `launch` chose; tables as in SkyRL 0.2.0.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tinker_local.model import context_length
from tinker_local.settings import checkpoint_file
from tinker_local.wire import WireError, decode_forward_backward, decompress, encode_result

Body = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """One server's records. All methods block briefly, and are safe in any thread."""

    database: Path
    checkpoints: Path

    def forget_unfinished(self) -> None:
        """Drop what an earlier server left unfinished. Call before the engine starts.

        Its clients are gone or have seen it die; the engine would otherwise process all of it
        first, and unused models would take up slots.
        """
        if not self.database.exists():
            return
        with self._write() as sql:
            sql.execute("DELETE FROM futures")
            sql.execute(
                "UPDATE checkpoints SET status = 'FAILED', error_message = ? "
                "WHERE status = 'PENDING'",
                ("the server was stopped while it was saved",),
            )

    def sampler_weights(self, sampler_id: str) -> str | None:
        """Path of a sampling session's weights: "" for the base model, None if unknown."""
        with self._write() as sql:
            query = "SELECT model_path FROM sampling_sessions WHERE sampling_session_id = ?"
            row = sql.execute(query, (sampler_id,)).fetchone()
        return None if row is None else (row[0] or "")

    def has_weights(self, path: str) -> bool:
        """Whether weights to sample from have this path."""
        match = re.fullmatch(r"tinker://([^/]+)/(?:sampler_weights/)?([^/]+)", path)
        if match is None:
            return False
        with self._write() as sql:
            query = (
                "SELECT 1 FROM checkpoints "
                "WHERE model_id = ? AND checkpoint_id = ? AND checkpoint_type = 'SAMPLER'"
            )
            return sql.execute(query, match.groups()).fetchone() is not None

    def finish_session(self, session_id: str) -> list[str]:
        """Close a session; return the ids of its models that may still be loaded."""
        with self._write() as sql:
            sql.execute(
                "UPDATE sessions SET status = 'finished' WHERE session_id = ?", (session_id,)
            )
            rows = sql.execute(
                "SELECT model_id FROM models WHERE session_id = ? AND status = 'created'",
                (session_id,),
            ).fetchall()
        return [row[0] for row in rows]

    def delete_checkpoint(self, model_id: str, name: str, *, sampler: bool) -> bool:
        """Delete a checkpoint's record and files; False if there is no such checkpoint."""
        with self._write() as sql:
            found = sql.execute(
                "DELETE FROM checkpoints "
                "WHERE model_id = ? AND checkpoint_id = ? AND checkpoint_type = ?",
                (model_id, name, "SAMPLER" if sampler else "TRAINING"),
            ).rowcount
        if not found:
            return False
        file = checkpoint_file(self.checkpoints, model_id, name, sampler=sampler)
        if file.is_dir():  # training checkpoints are folders, whatever their name says
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)
        return True

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=30)) as sql, sql:
            yield sql


_restore_optimizer: ContextVar[bool] = ContextVar("restore_optimizer", default=True)


def keep_optimizer_flag() -> None:
    """Store with each load request whether the optimizer is restored too (see `engine`).

    SkyRL's request has no such field, and its engine always restores the optimizer.
    """
    from pydantic import Field
    from skyrl.tinker import types

    class LoadWeightsInput(types.LoadWeightsInput):  # type: ignore[misc]
        optimizer: bool = Field(default_factory=lambda: _restore_optimizer.get())

    types.LoadWeightsInput = LoadWeightsInput


@contextmanager
def restoring_optimizer(restore: bool) -> Iterator[None]:
    """Load requests that are stored inside this block carry ``restore``."""
    token = _restore_optimizer.set(restore)
    try:
        yield
    finally:
        _restore_optimizer.reset(token)


PROTOBUF = "application/x-protobuf"
LONG_POLL = 30.0
"""Seconds until a request for an unfinished result is told to ask again; the SDK waits 45."""

NOT_FINITE = (
    "the result has numbers that are not finite: the weights have diverged (a lower learning rate "
    "helps), or a token is not in the model's vocabulary (it is another tokenizer's)"
)

UNSUPPORTED_SAMPLING = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)


@dataclass
class TinkerProtocol:
    """ASGI application that wraps SkyRL's."""

    app: ASGIApp
    """SkyRL's FastAPI application."""
    model: str
    """The name, which is the path, of the model that is served."""
    records: Records
    """What SkyRL has stored."""
    engine_ready: Path
    """A file that exists once the engine has loaded the model."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Model ids that the SDK made up, with the ids that SkyRL gave."""
    causes: dict[str, str] = field(default_factory=dict)
    """Requests that depend on an earlier one that the SDK does not know of."""

    def __post_init__(self) -> None:
        transport = httpx.ASGITransport(app=self.app)
        self._inner = httpx.AsyncClient(transport=transport, base_url="http://skyrl/api/v1")
        self._context = context_length(self.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/api/v1/"):
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix("/api/v1")
        if scope["method"] == "GET" and path != "/healthz" and not path.startswith("/samplers/"):
            # Passed on unchanged, with its headers: some of these redirect or stream a file.
            await self.app({**scope, "path": self._without_aliases(scope["path"])}, receive, send)
            return
        request = Request(scope, receive)
        try:
            answer = await self._answer(request, path)
        except (WireError, json.JSONDecodeError) as ex:
            answer = _refuse(str(ex))
        await answer(scope, receive, send)

    async def _answer(self, request: Request, path: str) -> Response:
        route = f"{request.method} {path}"
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "GET /healthz": self._healthz,
            "POST /client/config": self._client_config,
            "POST /create_model": self._checked_base_model,
            "POST /create_sampling_session": self._create_sampling_session,
            "POST /forward_backward": self._forward_backward,
            "POST /asample": self._asample,
            "POST /retrieve_future": self._retrieve_future,
            "POST /load_weights": self._load_weights,
        }
        if handler := handlers.get(route):
            return await handler(request)
        if match := re.fullmatch(r"GET /samplers/([^/]+)", route):
            return await self._sampler(match[1])
        if match := re.fullmatch(r"POST /sessions/([^/]+)/finish", route):
            return await self._finish(request, match[1])
        if match := re.fullmatch(
            r"DELETE /training_runs/([^/]+)/checkpoints/(?:(weights|sampler_weights)/)?([^/]+)",
            route,
        ):
            return await self._delete_checkpoint(match[1], match[2], match[3])
        return await self._forward(request, self._without_aliases(path))

    def _without_aliases(self, path: str) -> str:
        return "/".join(self.aliases.get(part, part) for part in path.split("/"))

    async def _forward(
        self, request: Request, path: str, body: dict[str, Any] | None = None
    ) -> Response:
        """Let SkyRL answer, with model ids translated to its own."""
        if body is None:
            body = await _read(request)
        if body.get("model_id") in self.aliases:
            body = {**body, "model_id": self.aliases[body["model_id"]]}
        content = json.dumps(body)  # with numbers that are not finite
        headers = {"content-type": "application/json"}
        found = await self._inner.request(request.method, path, content=content, headers=headers)
        return Response(
            found.content, found.status_code, media_type=found.headers.get("content-type")
        )

    async def _healthz(self, request: Request) -> Response:
        if not self.engine_ready.exists():
            return _refuse("the engine is loading the model", 503)
        return JSONResponse({"status": "ok"})

    async def _client_config(self, request: Request) -> Response:
        return JSONResponse({})  # the SDK's own defaults

    async def _checked_base_model(self, request: Request) -> Response:
        body = await _read(request)
        if base_model := body.get("base_model"):
            body["base_model"] = self._require_served(base_model)
            if body.get("model_path"):  # weights of it; SkyRL takes one of the two
                del body["base_model"]
        return await self._forward(request, request.scope["path"].removeprefix("/api/v1"), body)

    async def _create_sampling_session(self, request: Request) -> Response:
        """Refuse weights that do not exist: SkyRL would refuse each request to sample."""
        path = (await _read(request)).get("model_path")
        if path is not None and not await asyncio.to_thread(self.records.has_weights, path):
            return _refuse(f"this local server has no weights {path} to sample from", 404)
        return await self._checked_base_model(request)

    def _require_served(self, base_model: str) -> str:
        if Path(base_model).absolute() != Path(self.model):
            raise WireError(f"this local server serves {self.model}, not {base_model}")
        return self.model

    async def _forward_backward(self, request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            return await self._forward(request, "/forward_backward")
        content = decompress(await request.body(), request.headers.get("content-encoding", ""))
        body, forward_only = await asyncio.to_thread(decode_forward_backward, content)
        path = "/forward" if forward_only else "/forward_backward"
        return await self._forward(request, path, body)

    async def _asample(self, request: Request) -> Response:
        body = await _read(request)
        for name in UNSUPPORTED_SAMPLING:
            if body.pop(name, None):
                raise WireError(f"the local server does not support {name}")
        if base_model := body.get("base_model"):
            body["base_model"] = self._require_served(base_model)
        params = body.get("sampling_params", {})
        if isinstance(params.get("stop"), str):
            params["stop"] = [params["stop"]]
        for name, value in params.items():  # the engine would fail the whole batch
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(each, int) and abs(each) >= 2**31 for each in numbers):
                raise WireError(f"the local server takes numbers of 32 bits, not {name}={value}")
        self._check_sample(body)
        answer = await self._forward(request, "/asample", body)
        if answer.status_code != 200:
            return answer
        future = _parse(answer)
        names = [f"{future['request_id']}:{i}" for i in range(body.get("num_samples", 1))]
        return JSONResponse({**future, "sample_sequence_ids": names})

    def _check_sample(self, body: Body) -> None:
        """Refuse what the engine would never answer, or not for hours."""
        params = body.get("sampling_params", {})
        if body.get("num_samples", 1) < 1:
            raise WireError("num_samples must be at least 1")
        if params.get("temperature", 1) < 0:
            raise WireError("temperature must not be negative")
        prompt = sum(len(chunk["tokens"]) for chunk in body["prompt"]["chunks"])
        room, context = params.get("max_tokens") or 0, self._context
        spare = 1 if body.get("prompt_logprobs") else 0  # of a whole context, with a token more
        if context is not None and prompt + room > context + spare:
            raise WireError(
                f"the local server's model takes {context:,} tokens, prompt and reply together, "
                f"and not {prompt:,} with max_tokens={room:,}"
            )

    async def _retrieve_future(self, request: Request) -> Response:
        body = {"request_id": (await _read(request)).get("request_id")}
        try:
            async with asyncio.timeout(LONG_POLL):
                answer = await self._forward(request, "/retrieve_future", body)
        except TimeoutError:
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        except ValueError:  # SkyRL writes JSON without NaN; a broken answer the SDK asks for again
            return JSONResponse({"error": NOT_FINITE, "category": "user"})
        if answer.status_code in (400, 500):
            # The SDK repeats a request on these; a failed result stays failed.
            answer = await self._first_failure(request, body["request_id"], answer)
            detail = str(_parse(answer).get("detail", "unknown error"))
            return JSONResponse({"error": detail, "category": "server"})
        if answer.status_code == 200 and PROTOBUF in request.headers.get("accept", ""):
            encoded = await asyncio.to_thread(lambda: encode_result(_parse(answer)))
            if encoded is not None:
                return Response(encoded, media_type=PROTOBUF)
        return answer

    async def _first_failure(self, request: Request, request_id: Any, failed: Response) -> Response:
        """Return the failure that led to this one, if one request of the SDK became several."""
        if (cause := self.causes.get(request_id)) is None:
            return failed
        answer = await self._forward(request, "/retrieve_future", {"request_id": cause})
        return failed if answer.status_code == 200 else answer

    async def _load_weights(self, request: Request) -> Response:
        body = await _read(request)
        load = {"model_id": body.get("model_id"), "path": body.get("path", "")}
        created: Response | None = None
        if session := body.get("session_id"):
            info = await self._forward(request, "/weights_info", {"tinker_path": load["path"]})
            if info.status_code != 200:
                return info
            wanted = {
                "session_id": session,
                "base_model": self._require_served(_parse(info)["base_model"]),
                "lora_config": {"rank": _parse(info)["lora_rank"]},
            }
            created = await self._forward(request, "/create_model", wanted)
            if created.status_code != 200:
                return created
            load["model_id"] = _parse(created)["model_id"]
            self.aliases[f"{session}:train:{body.get('model_seq_id')}"] = load["model_id"]
        with restoring_optimizer(body.get("optimizer", True)):
            answer = await self._forward(request, "/load_weights", load)
        if created is not None and answer.status_code == 200:
            # The engine handles them in this order, so there is no need to wait here.
            self.causes[_parse(answer)["request_id"]] = _parse(created)["request_id"]
        return answer

    async def _finish(self, request: Request, session: str) -> Response:
        """Close a session, and free the LoRA slots of its models now, not after a timeout."""
        for model_id in await asyncio.to_thread(self.records.finish_session, session):
            await self._forward(request, "/unload_model", {"model_id": model_id})
        return JSONResponse({})

    async def _sampler(self, sampler_id: str) -> Response:
        path = await asyncio.to_thread(self.records.sampler_weights, sampler_id)
        if path is None:
            return _refuse("Sampling session not found", 404)
        found = {"sampler_id": sampler_id, "base_model": self.model}
        return JSONResponse({**found, "model_path": path or None})

    async def _delete_checkpoint(self, model_id: str, kind: str | None, name: str) -> Response:
        model_id = self.aliases.get(model_id, model_id)
        sampler = kind == "sampler_weights"
        delete = self.records.delete_checkpoint
        if await asyncio.to_thread(delete, model_id, name, sampler=sampler):
            return Response(status_code=204)
        return _refuse(f"Checkpoint not found: {model_id}/{name}", 404)


async def _read(request: Request) -> Body:
    value = json.loads(await request.body() or b"{}")
    if not isinstance(value, dict):
        raise WireError("expected a JSON object")
    return value


def _parse(answer: Response) -> Any:
    return json.loads(bytes(answer.body))


def _refuse(why: str, status: int = 400) -> Response:
    return JSONResponse({"detail": why}, status)
