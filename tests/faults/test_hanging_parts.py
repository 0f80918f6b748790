"""A part that hangs, in whatever way, costs its own episode and never the training."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.scorer import (
    Score,
    Scorer,
    Target,
    includes,
    mean,
    model_graded_qa,
)
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import (
    ExecRemoteStreamingOptions,
    SandboxEnvironment,
    background,
    sandbox,
)
from tests.episode import sandbox_folder
from tests.episode.sandbox_folder import Counted
from tests.functions import make_scorer, make_solver
from tests.rl.policies import roll_out_task, tool_call
from tests.rl.tasks import add
from tinker_cookbook.rl.rollout_limits import RolloutLimits

from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.episode import runner as episode_runner
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.episode.sandbox import sandbox_places
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.rl import hooks

LIMITS = RolloutLimits(rollout_timeout_seconds=8.0)
_ended: list[asyncio.Event] = []


async def hang() -> None:
    """Hang, and let itself be cancelled."""
    await asyncio.sleep(3600)


async def cling() -> None:
    """Hang, whoever cancels it, until the test is over."""
    ended = asyncio.Event()
    _ended.append(ended)
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError:
            continue


ways = pytest.mark.parametrize("way", [hang, cling], ids=["hangs", "clings"])
Way = Callable[[], Awaitable[None]]


@pytest.fixture(autouse=True)
async def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = asyncio.all_tasks()
    monkeypatch.setattr("inspect_tinker_plugin.processes.loops.GRACE", 0.1)
    yield
    for ended in _ended:
        ended.set()
    _ended.clear()
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        await asyncio.wait(left, timeout=60)
    assert not asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not episode_runner._running
    assert sandbox_places(sandbox_folder.PROVIDER).alive == 0
    sandbox_folder.alive.clear()


def plum(scorer: Scorer | None = None, solver: Solver | None = None, **options: Any) -> Task:
    return Task(
        dataset=[Sample(id=1, input="Say plum.", target="plum")],
        solver=solver or [use_tools(add()), generate()],
        scorer=scorer or includes(),
        **options,
    )


async def play(task: Task, *lines: str, **options: Any) -> Any:
    options = {"rollout_limits": LIMITS, "stop_timeout": 0.5, "group_size": 2, **options}
    async with asyncio.timeout(150):
        return await roll_out_task(task, lines or ("plum",), **options)


async def fails(cause: Cause, task: Task, *lines: str, **options: Any) -> None:
    group = await play(task, *lines, on_error={cause: -3.0}, **options)
    assert group.get_total_rewards() == [-3.0] * 2


@modelapi("rl_hanging_judge")
class HangingJudge(ModelAPI):
    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        await cling()
        raise AssertionError

    async def count_text_tokens(self, text: str) -> int:
        return len(text)


@pytest.mark.slow
async def test_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.runner.CLOSE_GRACE", 0.5)
    judge = get_model("rl_hanging_judge/judge")
    await fails(Cause.SCORER, plum(model_graded_qa(model=judge)))


@pytest.mark.slow
@ways
async def test_a_tool_executor(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.runner.CLOSE_GRACE", 0.5)

    async def executor(invocation: Any) -> Any:
        await way()

    call = tool_call("add", '{"x": 1, "y": 2}')
    if way is cling:
        await fails(Cause.SOLVER, plum(), call, tool_executor=executor)
    else:  # scored as by a limit, in mid-call
        group = await play(plum(), call, tool_executor=executor)
        assert group.get_total_rewards() == [0.0] * 2


class Hanging:
    def __init__(self, event: str, way: Way) -> None:
        self.event, self.way = event, way

    async def on_episode_start(self, event: Any) -> None:
        await self._at("start")

    async def on_turn(self, event: Any) -> None:
        await self._at("turn")

    async def on_episode_end(self, event: Any) -> None:
        await self._at("end")

    async def _at(self, event: str) -> None:
        if event == self.event:
            await self.way()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setattr(hooks, "TIMEOUT", 0.2)

    def watch(observer: Any) -> None:
        found = hooks.Observers([observer])
        path = "inspect_tinker_plugin.rl.task_handle.episode_observers"
        monkeypatch.setattr(path, lambda *_, **__: found)

    return watch


@ways
@pytest.mark.parametrize("event", ["start", "turn", "end"])
async def test_an_observer_changes_nothing(
    event: str, way: Way, watched: Callable[[Any], None]
) -> None:
    watched(Hanging(event, way))
    group = await play(plum(), rollout_limits=None)
    assert group.get_total_rewards() == [1.0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["sample_init", "write_file", "sample_cleanup"])
async def test_a_sandbox(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.episode.sandbox.START_GRACE", 0.2)
    monkeypatch.setattr("inspect_tinker_plugin.episode.sandbox.RELEASE_GRACE", 0.2)
    monkeypatch.setattr("inspect_tinker_plugin.episode.runner.CLOSE_GRACE", 0.5)
    real: Any = getattr(Counted, operation)

    async def hanging(*arguments: Any) -> dict[str, SandboxEnvironment] | None:
        await cling()
        return {} if operation == "sample_init" else None

    method = classmethod(lambda _, *a: hanging(*a)) if hasattr(real, "__self__") else hanging
    monkeypatch.setattr(Counted, operation, method)
    boxed = plum(sandbox=sandbox_folder.PROVIDER)
    boxed.dataset[0].files = {"word": "plum"}
    await fails(Cause.SANDBOX, boxed, max_sandboxes=2)


@ways
async def test_a_tasks_cleanup(way: Way) -> None:
    async def cleanup(state: Any) -> None:
        await way()

    group = await play(plum(cleanup=cleanup), rollout_limits=None)
    assert group.get_total_rewards() == [1.0] * 2


@solver
def asks_in_a_shield(when: str, where: str) -> Solver:
    """Asks the policy where no cancellation of the episode reaches it."""

    async def ask() -> None:
        try:
            if when == "later":
                await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await get_model().generate("Say what you have done.")

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        if where == "background":
            background(ask)
            await anyio.sleep_forever()
        await ask()
        return state

    return solve


@pytest.mark.parametrize("end", ["stop", "close"])
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("where", ["solver", "background"])
async def test_a_call_in_a_shield_that_nobody_answers_any_more(
    where: str, when: str, end: str
) -> None:
    options = EpisodeOptions(stop_timeout=60.0)
    episode = EpisodeRunner(plum(solver=asks_in_a_shield(when, where)), options=options).episode(
        Sample(id=1, input="Say plum.", target="plum")
    )
    async with asyncio.timeout(120):
        await episode.start()
        running = asyncio.ensure_future(episode.reply(ModelOutput.from_content("m", "plum")))
        await asyncio.sleep(0.1)
        if end == "stop":
            result = await episode.stop("enough")
            assert result.error is None
            assert result.limit is not None
            assert [score.score.value for score in result.scores.values()] == ["C"]
            assert result.turns == 1
        await episode.close()
        await asyncio.wait([running])
        assert episode.released
        if not running.cancelled():
            running.exception()


async def execute(command: list[str]) -> None:
    await sandbox().exec(command, cwd="/")


async def execute_beside(command: list[str]) -> None:
    await sandbox().exec_remote(command, stream=False)


async def listen_to(command: list[str]) -> None:
    async for _ in await sandbox().exec_remote(command):
        pass


async def talk_to(command: list[str]) -> None:
    running = await sandbox().exec_remote(command, ExecRemoteStreamingOptions(stdin_open=True))
    await running.write_stdin(bytes(2**20))


Waiting = Callable[[list[str]], Awaitable[None]]


@make_solver
async def cleans_up_with(
    state: TaskState, generate: Generate, wait: Waiting, command: list[str]
) -> TaskState:
    """Waits in a shield for a command that does not end."""
    try:
        return await generate(state)
    finally:
        with anyio.CancelScope(shield=True):
            await wait(command)


@make_scorer(mean())
async def looks_with(state: TaskState, target: Target, wait: Waiting, command: list[str]) -> Score:
    with anyio.CancelScope(shield=True):
        await wait(command)
    return Score(value=1)


class Owner:
    """Has an episode, as an env does."""


@pytest.mark.parametrize(
    ("wait", "end"),
    [
        *((execute, end) for end in ("stop", "close", "drop")),
        *((wait, "stop") for wait in (execute_beside, listen_to, talk_to)),
    ],
)
@pytest.mark.parametrize("where", ["solver", "scorer"])
async def test_a_command_in_a_shield_that_does_not_end(where: str, wait: Waiting, end: str) -> None:
    command = ["sleep", str(10**6 + uuid.uuid4().int % 10**9)]
    task = (
        plum(solver=cleans_up_with(wait, command), sandbox="local")
        if where == "solver"
        else plum(looks_with(wait, command), sandbox="local")
    )
    options = EpisodeOptions(stop_timeout=1.0)
    episode = EpisodeRunner(task, options=options).episode(task.dataset[0])
    owner = Owner()
    episode.end_with(owner)
    async with asyncio.timeout(60):
        await episode.start()
        running = asyncio.ensure_future(episode.reply(ModelOutput.from_content("m", "plum")))
        await asyncio.sleep(0.5)
        if end == "stop":
            result = await episode.stop("enough")
            assert result.error is not None
            assert not result.scores
        elif end == "close":
            await episode.close()
        else:
            running.cancel()
            await asyncio.wait([running])
            del owner
            gc.collect()
        if left := set(episode_runner._running):
            await asyncio.wait(left)
        if end != "drop":
            await asyncio.wait([running])
            running.exception()
    listed = await asyncio.to_thread(subprocess.check_output, ["ps", "-eo", "args"], text=True)
    assert " ".join(command) not in listed


class Outcome(BaseException):
    """As test frameworks raise it."""


async def test_what_works_in_the_background_ends_no_more_than_its_episode() -> None:
    @solver
    def works() -> Solver:
        async def work() -> None:
            raise Outcome("odd")

        async def solve(state: TaskState, generate: Generate) -> TaskState:
            background(work)
            await anyio.sleep_forever()
            return state

        return solve

    group = await play(plum(solver=works()), on_error={Cause.SOLVER: -3.0})
    assert group.get_total_rewards() == [-3.0] * 2
