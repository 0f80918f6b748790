"""An episode's agent bridges without polling: this side is notified instead.

Inspect's ``sandbox_agent_bridge`` starts a proxy in the sandbox that leaves each request in a file,
and looks for such files every two seconds. In an episode the same bridge gets a stand-in for its
sandbox instead: its port leads to a server in this process, which calls the same methods. Evals
are not affected, nor are sandboxes that cannot run the relay.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from inspect import signature
from typing import Any, cast

import anyio
from anyio.abc import SocketStream, TaskGroup
from inspect_ai.util import ExecResult, SandboxEnvironment, sandbox

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.agents.api import CallFailedError, Client, ModelApi
from inspect_tinker_plugin.agents.processes import is_local, use_processes
from inspect_tinker_plugin.agents.relay import Relay, RelayError, Serve, open_relay
from inspect_tinker_plugin.contracts.errors import AgentBridgeError
from inspect_tinker_plugin.contracts.policy import requested_model
from inspect_tinker_plugin.contracts.sandboxes import Watch

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0
"""Seconds that a limit has to end the sample before a failed call does."""

_active: ContextVar[bool] = ContextVar("inspect_rl_agent_bridges", default=False)


@asynccontextmanager
async def serve_agents(watch: Watch) -> AsyncIterator[None]:
    """Serve the bridges and remote commands of an episode's agents: a ``SandboxService``."""
    with use_agent_bridges():
        async with use_processes(watch):
            yield


@contextmanager
def use_agent_bridges() -> Iterator[None]:
    """Serve the agent bridges of this context, and of everything it starts, from this process."""
    internals.route_agent_bridges(_stand_in, _serve)
    # Agents of inspect_swe log at this level by its name, which only an eval gives it.
    logging.addLevelName(internals.TRACE, "TRACE")
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


async def _stand_in(name: str | None) -> BridgeSandbox | None:
    """Return the stand-in for a bridge's sandbox; ``None`` to use Inspect's own way."""
    if not _active.get():
        return None
    environment = internals.unproxied(sandbox(name))
    try:
        return BridgeSandbox(None if is_local(environment) else await open_relay(environment))
    except RelayError as ex:
        logger.warning(
            "the agent bridge of sandbox %r is polled, as in an eval, which costs seconds per "
            "model call: %s",
            name or "default",
            ex,
        )
        return None


async def _serve(stand_in: BridgeSandbox, name: str, methods: dict[str, Any], started: Any) -> None:
    """Run the service of a bridge on its stand-in, until cancelled."""
    if started is not None:
        started.set()
    await stand_in.serve(Calls(name, methods))


class BridgeSandbox:
    """What Inspect's bridge takes for its sandbox: its port leads to this process."""

    _tools_user = None

    def __init__(self, relay: Relay | None) -> None:
        self._relay = relay
        self._port = 0
        self._asked = anyio.Event()
        self._listening = anyio.Event()

    def default_polling_interval(self) -> float:
        """Do nothing: nothing is polled."""
        return 0.0

    async def exec_remote(self, cmd: list[str], options: Any) -> _Proxy:
        """Open the bridge's port instead of starting a proxy; return when it is open."""
        self._port = int(options.env[f"{internals.MODEL_SERVICE.upper()}_PORT"])
        self._asked.set()
        await self._listening.wait()
        return _Proxy()

    async def serve(self, calls: Calls) -> None:
        """Serve programs until cancelled.

        Raises:
            AgentBridgeError: programs cannot reach the port, or can no longer reach it.
        """
        try:
            await self._asked.wait()
            async with anyio.create_task_group() as tasks:
                calls.start_in(tasks)
                api = ModelApi(calls.call)

                async def serve(client: Client) -> None:
                    try:
                        return await api.serve(client)
                    except CallFailedError as ex:
                        reason = str(ex)
                    # A limit ends the sample by itself, and so does a termination.
                    await anyio.sleep(_GRACE_SECONDS)
                    raise AgentBridgeError(f"a model call could not be carried out: {reason}")

                if self._relay is None:
                    await self._serve_here(serve)
                else:
                    await self._serve_there(self._relay, serve, tasks)
        except ExceptionGroup as ex:
            raise internals.inner_exception(ex) from None
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def _serve_there(self, relay: Relay, serve: Serve, tasks: TaskGroup) -> None:
        try:
            await relay.listen(self._port)
            self._listening.set()
            await relay.run(serve, tasks)
        except RelayError as ex:
            reason = str(ex)
        # Outside of the handler: Inspect's bridge raises the innermost error that it finds.
        state = "went away" if self._listening.is_set() else "did not come up"
        raise AgentBridgeError(
            f"the model API on port {self._port} of the sandbox {state}: {reason}"
        )

    async def _serve_here(self, serve: Serve) -> None:
        try:
            listener = await anyio.create_tcp_listener(
                local_host="127.0.0.1", local_port=self._port, reuse_port=False
            )
        except OSError as ex:
            reason = ex.strerror or str(ex)
        else:
            async with listener:
                self._listening.set()
                return await listener.serve(lambda stream: serve(LocalClient(stream)))
        raise AgentBridgeError(
            f"the model API on port {self._port} of the sandbox did not come up: {reason}. The "
            "local sandbox shares the ports of this machine: give each episode its own port, or "
            "use docker_pool"
        )


class _Proxy:
    """What Inspect's bridge takes for the proxy's process: it lives as long as the bridge."""

    def __init__(self) -> None:
        self._killed = anyio.Event()

    def __aiter__(self) -> _Proxy:
        return self

    async def __anext__(self) -> object:
        await self._killed.wait()
        raise StopAsyncIteration

    async def kill(self) -> None:
        """End the iteration; the port is served until the bridge ends."""
        self._killed.set()


class LocalClient:
    """A connection to a port of this machine."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    async def receive(self) -> bytes:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as ex:
            raise ConnectionError(str(ex)) from ex

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as ex:
            raise ConnectionError(str(ex)) from ex

    async def close(self) -> None:
        with suppress(Exception):
            await self._stream.aclose()


class Calls(internals.SandboxService):
    """Inspect's service, whose requests and responses are passed directly and not as files.

    So limits, terminations, checks and warnings are Inspect's own.
    """

    _queue = "/requests"

    def __init__(self, name: str, methods: dict[str, Any]) -> None:
        super().__init__(name, cast(SandboxEnvironment, None))  # all that used it is replaced
        self._requests_dir = self._queue
        self._calls: dict[str, _Call] = {}
        self._tasks: TaskGroup | None = None
        for method, function in methods.items():
            self.add_method(method, function)
        # Releases differ in whether a method takes the headers of a request.
        self._parameters = {name: signature(method).parameters for name, method in methods.items()}

    def start_in(self, tasks: TaskGroup) -> None:
        """Run calls in a task group, so that they outlive a program that does not wait."""
        self._tasks = tasks

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """Call a method.

        Raises:
            CallFailedError: it failed with something other than an error of the model.
            ValueError: its parameters cannot be passed on.
        """
        assert self._tasks is not None
        id = str(uuid.uuid4())
        params = {k: value for k, value in params.items() if k in self._parameters[method]}
        call = self._calls[id] = _Call({"id": id, "method": method, "params": params})
        model = params.get("json_data", {}).get("model")
        requested_model.set(model if isinstance(model, str) else None)  # of this connection's task
        self._tasks.start_soon(self._carry_out, id, call)
        try:
            await call.answered.wait()
        finally:
            del self._calls[id]
        if call.error is not None:
            raise call.error
        return call.result

    async def _carry_out(self, id: str, call: _Call) -> None:
        await self._handle_request_tracked(f"{self._queue}/{id}.json", id)
        if not call.answered.is_set():  # Inspect logs what is wrong with a request, no more
            call.answer(None, ValueError("the request cannot be read"))

    async def _exec(self, cmd: list[str], input: str | bytes | None = None) -> ExecResult[str]:
        """Read a request, which takes the place of its file; there is nothing else to run."""
        id = cmd[-1].removeprefix(f"{self._queue}/").removesuffix(".json")
        call = self._calls.get(id)
        text = call.request if call is not None else "null"
        return ExecResult(True, 0, text if cmd[0] == "cat" else "", "")

    async def _write_response(
        self, request_file: str, request_id: str, result: Any, error: str | None = None
    ) -> None:
        if call := self._calls.get(request_id):
            call.answer(result, None if error is None else CallFailedError(error))


class _Call:
    """A call in progress."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = json.dumps(request)
        self.result: Any = None
        self.error: Exception | None = None
        self.answered = anyio.Event()

    def answer(self, result: Any, error: Exception | None) -> None:
        self.result, self.error = result, error
        self.answered.set()
