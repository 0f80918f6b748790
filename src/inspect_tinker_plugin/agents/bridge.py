"""An episode's agent bridges without polling: this side is notified instead.

Inspect's ``sandbox_agent_bridge`` starts a proxy in the sandbox that leaves each request in a file,
and looks for such files every two seconds. In an episode the same bridge gets a stand-in for its
sandbox instead: its port leads to a server in this process, which calls the same methods. Evals
are not affected, nor are sandboxes that cannot run the relay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, NoReturn, cast

import anyio
from anyio.abc import TaskGroup
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
async def serve_agents(
    environments: Collection[SandboxEnvironment], watch: Watch
) -> AsyncIterator[None]:
    """Serve the bridges and remote commands of an episode's agents: a ``SandboxService``.

    They are those of this context, and of everything it starts.
    """
    internals.route_agent_bridges(_active.get, _stand_in, _serve)
    # Agents of inspect_swe log at this level by its name, which only an eval gives it.
    logging.addLevelName(internals.TRACE, "TRACE")
    token = _active.set(True)
    try:
        async with use_processes(environments, watch):
            yield
    finally:
        _active.reset(token)


async def _stand_in(name: str | None) -> BridgeSandbox | None:
    """Return the stand-in for a bridge's sandbox; ``None`` to use Inspect's own way."""
    environment = internals.strip_proxy(sandbox(name))
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
    await stand_in.serve(name, methods)


class BridgeSandbox:
    """What Inspect's bridge takes for its sandbox, whose port leads to this process.

    It is the proxy's process, too, which lives as long as the bridge.
    """

    _tools_user = None

    def __init__(self, relay: Relay | None) -> None:
        self._relay = relay
        self._port = 0
        self._asked = anyio.Event()
        self._listening = anyio.Event()
        self._killed = anyio.Event()

    def default_polling_interval(self) -> float:
        """Do nothing: nothing is polled."""
        return 0.0

    async def exec_remote(self, cmd: list[str], options: Any) -> BridgeSandbox:
        """Open the bridge's port instead of starting a proxy; return when it is open."""
        self._port = int(options.env[f"{internals.MODEL_SERVICE.upper()}_PORT"])
        self._asked.set()
        await self._listening.wait()
        return self

    def __aiter__(self) -> BridgeSandbox:
        return self

    async def __anext__(self) -> object:
        await self._killed.wait()
        raise StopAsyncIteration

    async def kill(self) -> None:
        """End the iteration; the port is served until the bridge ends."""
        self._killed.set()

    async def serve(self, name: str, methods: dict[str, Any]) -> None:
        """Serve programs with the methods of a service until cancelled."""
        try:
            await self._asked.wait()
            async with anyio.create_task_group() as tasks:
                api = ModelApi(Calls(name, methods, tasks).call)

                async def serve(client: Client) -> None:
                    try:
                        return await api.serve(client)
                    except CallFailedError as ex:
                        reason = str(ex)
                    # A limit ends the sample by itself, and so does a termination.
                    await anyio.sleep(_GRACE_SECONDS)
                    raise AgentBridgeError(f"a model call could not be carried out: {reason}")

                try:
                    await self._listen(serve, tasks)
                except RelayError as ex:
                    reason = str(ex)
                # Outside of the handler: Inspect's bridge raises the innermost error it finds.
                state = "went away" if self._listening.is_set() else "did not come up"
                where = f"the model API on port {self._port} of the sandbox"
                raise AgentBridgeError(f"{where} {state}: {reason}")
        except ExceptionGroup as ex:
            raise internals.inner_exception(ex) from None
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def _listen(self, serve: Serve, tasks: TaskGroup) -> NoReturn:
        if self._relay is not None:
            await self._relay.listen(self._port)
            self._listening.set()
            await self._relay.run(serve, tasks)
        try:
            listener = await anyio.create_tcp_listener(
                local_host="127.0.0.1", local_port=self._port, reuse_port=False
            )
        except OSError as ex:
            raise RelayError(
                f"{ex.strerror or ex}. The local sandbox shares the ports of this machine: give "
                "each episode its own port, or use docker_pool"
            ) from None
        async with listener:
            self._listening.set()
            await listener.serve(serve)
        raise RelayError("it was closed")


class Calls(internals.SandboxService):
    """Inspect's service, whose requests and responses are passed directly and not as files.

    So limits, terminations, checks and warnings are Inspect's own.

    Args:
        name: Name of the service.
        methods: Its methods.
        tasks: Where calls run, so that they outlive a program that does not wait.
    """

    _queue = "/requests"

    def __init__(self, name: str, methods: dict[str, Any], tasks: TaskGroup) -> None:
        super().__init__(name, cast(SandboxEnvironment, None))  # all that used it is replaced
        self._requests_dir = self._queue
        self._requests: dict[str, str] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._tasks = tasks
        for method, function in methods.items():
            self.add_method(method, function)
        # Releases differ in whether a method takes the headers of a request.
        self._parameters = {name: signature(method).parameters for name, method in methods.items()}

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """Call a method.

        Raises:
            CallFailedError: it failed with something other than an error of the model.
            ValueError: its parameters cannot be passed on.
        """
        id = str(uuid.uuid4())
        params = {k: value for k, value in params.items() if k in self._parameters[method]}
        self._requests[id] = json.dumps({"id": id, "method": method, "params": params})
        self._answers[id] = asyncio.get_running_loop().create_future()
        model = params.get("json_data", {}).get("model")
        requested_model.set(model if isinstance(model, str) else None)  # of this connection's task
        self._tasks.start_soon(self._handle_request_tracked, f"{self._queue}/{id}.json", id)
        try:
            return await self._answers[id]
        finally:
            del self._answers[id], self._requests[id]

    async def _handle_request_tracked(self, request_file: str, request_id: str) -> None:
        await super()._handle_request_tracked(request_file, request_id)
        # Inspect logs what is wrong with a request that it cannot read, no more.
        self._answer(request_id, error=ValueError("the request cannot be read"))

    async def _exec(self, cmd: list[str], input: str | bytes | None = None) -> ExecResult[str]:
        """Read a request, which takes the place of its file; there is nothing else to run."""
        id = cmd[-1].removeprefix(f"{self._queue}/").removesuffix(".json")
        text = self._requests.get(id, "null") if cmd[0] == "cat" else ""
        return ExecResult(True, 0, text, "")

    async def _write_response(
        self, request_file: str, request_id: str, result: Any, error: str | None = None
    ) -> None:
        failure = None if error is None else CallFailedError(error)
        self._answer(request_id, result, failure)

    def _answer(self, id: str, result: Any = None, error: Exception | None = None) -> None:
        answer = self._answers.get(id)
        if answer is None or answer.done():  # the program has left, or has its answer
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
