"""An episode's agent bridges without polling: this side is notified instead.

Inspect's ``sandbox_agent_bridge`` starts a proxy in the sandbox that leaves each request in a file,
and looks for such files every two seconds. In an episode the same bridge gets a stand-in for its
sandbox instead: its port leads to a server in this process, which calls the same methods. Evals
are not affected, nor are sandboxes without a connection to this process.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup
from inspect_ai.util import ExecResult, SandboxEnvironment, sandbox

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.agents.api import CallFailedError, ModelApi
from inspect_tinker_plugin.agents.connections import (
    Installed,
    LocalClient,
    Relay,
    RelayError,
    Serve,
    is_local,
    open_relay,
)
from inspect_tinker_plugin.agents.http import Client, Room, serve_client
from inspect_tinker_plugin.contracts.errors import AgentBridgeError
from inspect_tinker_plugin.contracts.policy import requested_model

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0
"""Seconds that a limit has to end the sample before a failed call does."""

_active: ContextVar[bool] = ContextVar("inspect_rl_agent_bridges", default=False)


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
    environment = sandbox(name)
    inner = internals.unproxied(environment)
    if is_local(inner):
        return BridgeSandbox(None)
    try:
        installed = await open_relay(inner)
    except RelayError as ex:
        logger.warning(
            "the agent bridge of sandbox %r is polled, as in an eval, which costs seconds per "
            "model call: %s",
            name or "default",
            ex,
        )
        return None
    return None if installed is None else BridgeSandbox(installed)


class BridgeSandbox:
    """What Inspect's bridge takes for its sandbox: its port leads to this process."""

    _tools_user = None

    def __init__(self, relay: Installed | None) -> None:
        self._relay = relay
        self._port: int | None = None
        self._asked = anyio.Event()
        self._listening = anyio.Event()

    def default_polling_interval(self) -> float:
        """Do nothing: nothing is polled."""
        return 0.0

    async def exec_remote(self, cmd: list[str], options: Any) -> _Proxy:
        """Open the bridge's port instead of starting a proxy; return when it is open."""
        variable = f"{internals.MODEL_SERVICE.upper()}_PORT"
        self._port = int(options.env[variable])
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
            assert self._port is not None
            async with anyio.create_task_group() as tasks:
                calls.start_in(tasks)
                api, room, faults = ModelApi(calls.call), Room(), _Faults()

                async def serve(client: Client) -> None:
                    said = ""
                    try:
                        await serve_client(client, api.answer, room, faults.note)
                    except CallFailedError as ex:
                        said = str(ex)
                    if said:
                        # A limit ends the sample by itself, and so does a termination.
                        await anyio.sleep(_GRACE_SECONDS)
                        raise AgentBridgeError(f"a model call could not be carried out: {said}")

                if self._relay is None:
                    await self._serve_here(serve, self._port)
                else:
                    await self._serve_there(serve, self._relay, self._port, tasks)
        except ExceptionGroup as ex:
            raise internals.inner_exception(ex) from None
        finally:
            if self._relay is not None:
                with anyio.CancelScope(shield=True):
                    await self._relay.pipe.close()

    async def _serve_there(
        self,
        serve: Serve,
        installed: Installed,
        port: int,
        tasks: TaskGroup,
    ) -> None:
        try:
            relay = Relay(await installed.listen(port))
            await relay.listening()
            self._listening.set()
            await relay.run(serve, tasks)
        except RelayError as ex:
            said = str(ex)
        # Outside of the handler: Inspect's bridge raises the innermost error that it finds.
        state = "went away" if self._listening.is_set() else "did not come up"
        raise AgentBridgeError(f"the model API on port {port} of the sandbox {state}: {said}")

    async def _serve_here(self, serve: Serve, port: int) -> None:
        said = ""
        try:
            listener = await anyio.create_tcp_listener(
                local_host="127.0.0.1", local_port=port, reuse_port=False
            )
        except OSError as ex:
            said = ex.strerror or str(ex)
        if said:
            raise AgentBridgeError(
                f"the model API on port {port} of the sandbox did not come up: {said}. The local "
                "sandbox shares the ports of this machine: give each episode its own port, or "
                "use docker_pool"
            )
        async with listener:
            self._listening.set()
            await listener.serve(lambda stream: serve(LocalClient(stream)))


class _Faults:
    """Reports the first request of a bridge that could not be answered; programs may send any."""

    def __init__(self) -> None:
        self._reported = False

    def note(self, fault: Exception) -> None:
        """Report an exception, if it is the first."""
        if not self._reported:
            self._reported = True
            logger.warning(
                "a program's request to the model API could not be answered (%s: %.200s); the "
                "program was told so. Reported once per bridge",
                type(fault).__name__,
                fault,
                exc_info=fault,
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
        """Do nothing: the port is served until the bridge ends."""
        self._killed.set()


class Calls(internals.SandboxService):
    """Inspect's service, whose requests and responses are passed directly and not as files.

    So limits, terminations, checks and warnings are Inspect's own.
    """

    _queue = "/requests"

    def __init__(self, name: str, methods: dict[str, Any]) -> None:
        super().__init__(name, cast(SandboxEnvironment, None))  # all that used it is replaced
        self._requests_dir = self._queue
        self._waiting: dict[str, _Waiting] = {}
        self._tasks: TaskGroup | None = None
        for method, function in methods.items():
            self.add_method(method, function)
        # Releases differ in whether a method is told the headers of a request.
        self._taken = {name: signature(method).parameters for name, method in methods.items()}

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
        params = {name: value for name, value in params.items() if name in self._taken[method]}
        waiting = _Waiting(json.dumps({"id": id, "method": method, "params": params}))
        self._waiting[id] = waiting
        asked = params.get("json_data", {}).get("model")
        requested_model.set(asked if isinstance(asked, str) else None)  # of this connection's task
        self._tasks.start_soon(self._carry_out, id, waiting)
        try:
            await waiting.answered.wait()
        finally:
            del self._waiting[id]
        if waiting.lost:
            raise ValueError("the request cannot be read")
        if waiting.error is not None:
            raise CallFailedError(waiting.error)
        return waiting.result

    async def _carry_out(self, id: str, waiting: _Waiting) -> None:
        await self._handle_request_tracked(f"{self._queue}/{id}.json", id)
        if not waiting.answered.is_set():  # Inspect logs what is wrong with a request, no more
            waiting.lost = True
            waiting.answered.set()

    async def _exec(self, cmd: list[str], input: str | bytes | None = None) -> ExecResult[str]:
        """Read a request, which takes the place of its file; there is nothing else to run."""
        id = cmd[-1].removeprefix(f"{self._queue}/").removesuffix(".json")
        waiting = self._waiting.get(id)
        text = waiting.request if waiting is not None else "null"
        return ExecResult(True, 0, text if cmd[0] == "cat" else "", "")

    async def _write_response(
        self, request_file: str, request_id: str, result: Any, error: str | None = None
    ) -> None:
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            waiting.result, waiting.error = result, error
            waiting.answered.set()


class _Waiting:
    """A call in progress."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.result: Any = None
        self.error: str | None = None
        self.lost = False
        self.answered = anyio.Event()


async def _serve(stand_in: BridgeSandbox, name: str, methods: dict[str, Any], started: Any) -> None:
    """Run the service of a bridge on its stand-in, until cancelled."""
    if started is not None:
        started.set()
    await stand_in.serve(Calls(name, methods))
