"""Failures have the cause of the boundary they crossed; the way to a sandbox has no price."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import ssl
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalError
from inspect_ai.model import ModelAPI, ModelOutput, get_model, modelapi
from inspect_ai.scorer import Score, Target, accuracy, includes
from inspect_ai.solver import Generate, TaskState, generate
from inspect_ai.util import SandboxEnvironment, sandbox, sandboxenv
from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # private: the provider itself
from tests.faults.rollouts import failure_of, rolled
from tests.functions import make_scorer, make_solver

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.episode import boundaries


class ServerTimeout(TimeoutError):
    """As aiohttp's."""


class ServerError(OSError):
    """As those of HTTP clients."""


async def _waited() -> None:
    await asyncio.wait_for(asyncio.sleep(60), 0.01)


async def _timed() -> None:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)


def _raising(error: Exception) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


WAYS: dict[str, Callable[[], Any]] = {
    "a client's time-out": _raising(ServerTimeout("no answer")),
    "a socket's time-out": _raising(TimeoutError("timed out")),
    "the kernel's time-out": _raising(TimeoutError(errno.ETIMEDOUT, "timed out")),
    "asyncio.wait_for": _waited,
    "asyncio.timeout": _timed,
    "no program": _raising(FileNotFoundError(errno.ENOENT, "No such file", "kubectl")),
    "no configuration": _raising(FileNotFoundError(errno.ENOENT, "No such file", "/r/.kube")),
    "no socket": _raising(FileNotFoundError(errno.ENOENT, "No such file")),
    "a closed socket": _raising(PermissionError(errno.EACCES, "Permission denied")),
    "a socket's path": _raising(PermissionError(errno.EACCES, "denied", "/run/docker.sock")),
    "no route": _raising(OSError(errno.EHOSTUNREACH, "no route")),
    "no name": _raising(socket.gaierror(socket.EAI_AGAIN, "no answer")),
    "no handshake": _raising(ssl.SSLError("handshake")),
    "a library's own": _raising(ServerError("503")),
}


@sandboxenv(name="far_away")
class FarAway(LocalSandboxEnvironment):
    """A provider whose own client fails, in each of its operations."""

    fails: Callable[[], Any] | None = None

    @classmethod
    async def sample_init(cls, *args: Any) -> dict[str, SandboxEnvironment]:
        return {"default": cls()}

    async def exec(self, *args: Any, **kwargs: Any) -> Any:
        await self._reach()
        return await super().exec(*args, **kwargs)

    async def read_file(self, *args: Any, **kwargs: Any) -> Any:
        await self._reach()
        return await super().read_file(*args, **kwargs)

    async def write_file(self, *args: Any, **kwargs: Any) -> None:
        await self._reach()
        await super().write_file(*args, **kwargs)

    async def _reach(self) -> None:
        if (fails := type(self).fails) is not None:
            await fails()


async def _exec() -> None:
    await sandbox().exec(["true"])


async def _exec_for_a_minute() -> None:
    await sandbox().exec(["true"], timeout=60)


async def _read() -> None:
    await sandbox().read_file("answer.txt")


async def _write() -> None:
    await sandbox().write_file("tests.py", "x")


@make_scorer(accuracy())
async def does(state: TaskState, target: Target, act: Callable[[], Any]) -> Score:
    await act()
    return Score(value=1)


@make_solver
async def acts(state: TaskState, generate: Generate, act: Callable[[], Any]) -> TaskState:
    state = await generate(state)
    await act()
    return state


def boxed(act: Callable[[], Any], provider: str = "local", *, in_solver: bool = False) -> Task:
    return Task(
        name="boxed",
        dataset=[Sample(id=1, input="Write answer.txt.", target="x")],
        solver=acts(act) if in_solver else generate(),
        scorer=includes() if in_solver else does(act),
        sandbox=provider,
    )


async def cause_of(task: Task, **options: Any) -> Cause:
    return (await failure_of(task, **options)).cause


@pytest.mark.parametrize("operation", [_exec_for_a_minute, _read, _write])
@pytest.mark.parametrize("way", WAYS)
async def test_the_way_to_a_sandbox_has_no_price(
    way: str, operation: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FarAway, "fails", staticmethod(WAYS[way]))
    assert await cause_of(boxed(operation, "far_away")) is Cause.SANDBOX


async def test_a_program_that_this_machine_lacks_has_no_price() -> None:
    async def runs_tests() -> None:
        await sandbox().exec(["pytest-that-is-not-installed", "-q"])

    assert await cause_of(boxed(runs_tests)) is Cause.SANDBOX


ABOUT_THE_COMMAND = [
    PermissionError("the user may not run it"),
    OSError(errno.E2BIG, "Argument list too long", "docker"),  # of its client
]


@pytest.mark.parametrize("error", ABOUT_THE_COMMAND, ids=repr)
async def test_what_is_about_the_command_has_a_price(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FarAway, "fails", staticmethod(_raising(error)))
    group = await rolled(boxed(_exec, "far_away"))
    assert group.trajectories_G[0].transitions[-1].metrics["error/inside_sandbox"] == 1.0


@modelapi(name="slow_service")
class SlowService(ModelAPI):
    """Never answers, or says that it took too long."""

    async def generate(self, *args: Any, **kwargs: Any) -> ModelOutput:
        if self.model_name == "raises":
            raise ServerTimeout("no answer")
        if self.model_name == "times_out":
            raise TimeoutError("no answer")
        await asyncio.sleep(60)
        return ModelOutput()

    def should_retry(self, ex: BaseException) -> bool:
        return False


async def _ask_for_a_moment() -> None:
    await asyncio.wait_for(get_model("slow_service/hangs").generate("?"), 1.0)


async def _ask_in_a_scope() -> None:
    with anyio.fail_after(1.0):
        await get_model("slow_service/hangs").generate("?")


async def _ask_and_be_refused() -> None:
    await get_model("slow_service/raises").generate("?")


async def _ask_in_a_thread() -> None:
    model = get_model("slow_service/times_out")
    await asyncio.to_thread(lambda: asyncio.run(model.generate("?")))


@pytest.mark.parametrize("place", ["solver", "scorer"])
@pytest.mark.parametrize(
    "ask", [_ask_for_a_moment, _ask_in_a_scope, _ask_and_be_refused, _ask_in_a_thread]
)
async def test_a_judge_that_takes_too_long_is_raised(ask: Callable[[], Any], place: str) -> None:
    assert await cause_of(boxed(ask, in_solver=place == "solver")) is Cause.JUDGE


async def test_a_judge_is_named_however_long_the_record_of_its_failure_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = 0.0
    make_record = internals.error_record

    def make_record_slowly(error: BaseException) -> EvalError:
        nonlocal late
        late += 60.0
        return make_record(error)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr(boundaries, "time", clock)
    monkeypatch.setattr(internals, "error_record", make_record_slowly)
    assert await cause_of(boxed(_ask_in_a_scope, in_solver=False)) is Cause.JUDGE


async def _ask_twice_at_once() -> None:
    async with asyncio.timeout(1.0):
        model = get_model("slow_service/hangs")
        await asyncio.gather(model.generate("?"), model.generate("!"))


@pytest.mark.parametrize("place", ["solver", "scorer"])
@pytest.mark.parametrize("ask", [_ask_for_a_moment, _ask_twice_at_once])
async def test_a_judge_is_named_however_late_its_time_out_is_raised(
    ask: Callable[[], Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(step=3600)  # for others, between any two looks at the clock
    monkeypatch.setattr(boundaries, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    assert await cause_of(boxed(ask, in_solver=place == "solver")) is Cause.JUDGE


async def test_a_time_out_of_the_solvers_own_is_scored_and_counted() -> None:
    group = await rolled(boxed(_waited, in_solver=True))
    assert group.get_total_rewards() == [1.0]
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert metrics["limit/solver_timeout"] == 1.0
    assert metrics["stop/solver_timeout"] == 1.0


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("kind", [OSError, Exception])
async def test_a_provider_says_itself_what_an_exception_is_about(
    kind: type[Exception], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("no space left")
    error.inside_sandbox = said  # type: ignore[attr-defined]  # the protocol
    monkeypatch.setattr(FarAway, "fails", staticmethod(_raising(error)))
    on_error = {"inside_sandbox": "raise"}
    cause = await cause_of(boxed(_write, "far_away"), on_error=on_error)
    assert cause is (Cause.INSIDE_SANDBOX if said else Cause.SANDBOX)


async def test_an_exception_that_several_episodes_await_blames_each_for_itself() -> None:
    shared = ValueError("the rubric is gone")

    async def raises_it() -> None:
        if await sandbox().exec(["test", "-e", "answer.txt"]):
            raise shared

    assert await cause_of(boxed(raises_it)) is Cause.SCORER
    assert vars(shared) == {}
