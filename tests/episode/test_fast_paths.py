"""What fast paths leave out changes no result, and they can be turned off."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import agent_bridge, as_solver, react
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, ModelEvent, ToolEvent
from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import Score, Target, match, mean
from inspect_ai.solver import Generate, TaskState, generate, use_tools
from tests.functions import make_scorer, make_solver
from tests.rl.policies import Words, renderer, roll_out_task, tool_call
from tests.tools.runs import add
from tinker_cookbook.rl.types import EnvGroupBuilder

from inspect_tinker_plugin import freeze_memory
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.episode.fast_paths import SLOW
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import Script, call, say, submit
from inspect_tinker_plugin.testing.replies import Player
from inspect_tinker_plugin.testing.sides import play


@contextmanager
def slow_paths() -> Iterator[None]:
    """Turn the fast paths off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SLOW, "1")
        yield


# logs are the same


def timeless(value: Any, names: dict[str, str]) -> Any:
    """Leave out times and tracebacks, and name ids in the order in which they come."""
    if isinstance(value, dict):
        of_time = str(value.get("path")).endswith("/time")  # a change of the state
        return {
            key: timeless(each, names)
            for key, each in value.items()
            if "time" not in key
            and "traceback" not in key  # it names the lines of whoever raised
            and not key.startswith(("working", "completed"))
            and not (of_time and key in ("value", "replaced"))
        }
    if isinstance(value, list):
        return [timeless(each, names) for each in value]
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9]{22}", value):
        return names.setdefault(value, f"id {len(names)}")
    return value


@pytest.mark.parametrize("last", ["two", "cut", "failed"])
async def test_the_events_of_a_log_are_the_same_with_the_path_and_without(last: str) -> None:
    async def log() -> Any:
        task = reading()
        task.message_limit = 3 if last == "cut" else None
        episode = EpisodeRunner(task, keep_log=True).episode(task.dataset[0])
        await episode.start()
        call = ModelOutput.for_tool_call("rl/policy", "add", {"x": 1, "y": 1}, tool_call_id="1")
        if not isinstance(await episode.reply(call), EpisodeResult):
            two = ModelOutput.from_content("rl/policy", "two")
            await episode.reply(ValueError("no sampler") if last == "failed" else two)
        record = episode.build_log()
        assert record is not None
        events = [event.model_dump(mode="json") for event in record.events]
        told = [bool(event.get("traceback")) for event in events]
        return timeless(events, {}), told

    fast = await log()
    with slow_paths():
        slow = await log()
    assert any(event["event"] == "model" for event in fast[0])
    assert fast == slow


# who reads the transcript finds it


def counts(events: list[Event]) -> str:
    models = [event for event in events if isinstance(event, ModelEvent)]
    tools = [event for event in events if isinstance(event, ToolEvent)]
    said = [event.output.completion for event in models]
    return f"{len(models)} models, {len(tools)} tools, {[len(m.input) for m in models]}, {said}"


@make_scorer(mean())
async def what_happened(state: TaskState, target: Target) -> Score:
    return Score(value=1, answer=counts(list(transcript().events)))


def reading() -> Task:
    return Task(
        dataset=[Sample(id=1, input="1+1?")],
        solver=[use_tools(add()), generate()],
        scorer=what_happened(),
    )


async def answers(runner: EpisodeRunner) -> EpisodeResult:
    script: Script = [say("", call("add", x=1, y=1)), "two"]
    return await play(runner, reading().dataset[0], Player(script))


async def test_a_scorer_that_reads_the_transcript_finds_what_happened() -> None:
    with slow_paths():
        [expected] = (await answers(EpisodeRunner(reading()))).scores.values()
    quiet = EpisodeRunner(reading())
    for _ in range(2):  # the first is seen to read, the second keeps all from the beginning
        result = await answers(quiet)
        [found] = result.scores.values()
        assert found.score.answer == expected.score.answer
    assert quiet.reads_events


@make_scorer(mean())
async def replies(state: TaskState, target: Target) -> Score:
    """What the policy said beside its calls, call by call; ``react()`` adds what it submitted."""
    calls = [event for event in transcript().events if isinstance(event, ModelEvent)]
    said = [(call.output.completion, call.output.message.text) for call in calls]
    return Score(value=1, explanation=f"{said} {state.output.completion}")


async def test_the_first_reader_finds_replies_as_they_were() -> None:
    runner = EpisodeRunner(Task(solver=as_solver(react()), scorer=replies()))
    for _ in range(2):
        result = await play(runner, Sample(id=1, input="q"), Player([submit("42")]))
        assert result.scores["replies"].score.explanation == "[('', '')] 42"


async def test_the_first_reader_finds_the_name_that_a_program_asked_for() -> None:
    openai = pytest.importorskip("openai", reason="the extra `agents`")

    @make_solver
    async def program(state: TaskState, generate: Generate) -> TaskState:
        async with agent_bridge():
            client = openai.AsyncOpenAI(api_key="none")
            said: Any = [{"role": "user", "content": "?"}]
            await client.chat.completions.create(model="inspect", messages=said)
        return state

    @make_scorer(mean())
    async def name(state: TaskState, target: Target) -> Score:
        [event] = [each for each in transcript().events if isinstance(each, ModelEvent)]
        return Score(value=1, answer=event.requested_model)

    for paths in (nullcontext(), slow_paths()):
        with paths:
            runner = EpisodeRunner(Task(solver=program(), scorer=name()))
            result = await play(runner, Sample(id=1, input="?"), Player(["so"]))
            assert result.error is None, result.error
            assert result.scores["name"].score.answer == "inspect"


async def test_who_does_not_read_goes_on_the_fast_path() -> None:
    runner = EpisodeRunner(Task(dataset=[Sample(id=1, input="?")], solver=generate()))
    episode = runner.episode(Sample(id=1, input="?"))
    await episode.start()
    await episode.reply(ModelOutput.from_content("rl/policy", "so"))
    [event] = [each for each in episode.events if isinstance(each, ModelEvent)]
    assert (event.output.completion, event.pending) == ("so", None)
    assert not runner.reads_events


# memory


@make_solver
async def twice(state: TaskState, generate: Generate) -> TaskState:
    return await generate(await generate(state))


@make_solver
async def looking(state: TaskState, generate: Generate, seen: list[ModelEvent]) -> TaskState:
    """Looks at its transcript while its call waits."""
    first = asyncio.create_task(generate(state))
    await asyncio.sleep(0.05)
    seen.extend(each for each in transcript().events if isinstance(each, ModelEvent))
    return await first


async def test_who_looks_while_a_call_waits_sees_it_pending_and_later_its_reply() -> None:
    seen: list[ModelEvent] = []
    task = Task(dataset=[Sample(id=1, input="?")], solver=looking(seen))
    episode = EpisodeRunner(task).episode(task.dataset[0])
    await episode.start()
    await asyncio.sleep(0.1)
    [event] = seen
    assert event.pending
    assert [message.text for message in event.input] == ["?"]
    assert event in episode.events

    await episode.reply(ModelOutput.from_content("m", "so"))
    assert event.pending is None
    assert event.output.completion == "so"
    assert [each for each in episode.events if isinstance(each, ModelEvent)] == [event]


@make_solver
async def edits(state: TaskState, generate: Generate) -> TaskState:
    """Changes what it finds in its transcript, and its model's options."""
    state = await generate(state)
    for event in transcript().events:
        if isinstance(event, ModelEvent):
            event.input[0].content = "gone"
            event.output.choices[0].message.content = "gone"
            event.config.temperature = 0.9
    state = await generate(state)
    get_model().config.top_k = 7
    return await generate(state)


async def test_who_edits_events_or_options_changes_no_other_call() -> None:
    task = Task(dataset=[Sample(id=1, input="?")], solver=edits())
    runner, asked = EpisodeRunner(task), list[tuple[float | None, int | None]]()

    def reply(request: TurnRequest) -> ModelOutput:
        asked.append((request.config.temperature, request.config.top_k))
        return say("so")

    for _ in range(2):
        result = await play(runner, task.dataset[0], Player(reply))
        assert [message.text for message in result.state.messages] == ["?", "so", "so", "so"]
    assert asked == [(None, None), (None, None), (None, 7)] * 2


@make_solver
async def sends(state: TaskState, generate: Generate, bodies: list[Any]) -> TaskState:
    for body in bodies:
        state = await generate(state, extra_body={"flag": body})
    return state


async def test_options_that_are_equal_in_python_only_are_not_the_same() -> None:
    task = Task(dataset=[Sample(id=1, input="?")], solver=sends([1, True, 1.0]))
    player = Player(["so"] * 3)
    await play(EpisodeRunner(task), task.dataset[0], player)
    sent = [repr(each.config.extra_body) for each in player.requests]
    assert sent == ["{'flag': 1}", "{'flag': True}", "{'flag': 1.0}"]


async def test_an_episode_that_waits_for_the_policy_takes_little_memory() -> None:
    task = Task(
        dataset=[Sample(id=i, input=f"{i}?") for i in range(101)], solver=generate(), scorer=match()
    )
    builders = as_rl_dataset(task, renderer(), batch_size=len(task.dataset)).get_batch(0)
    kept = []

    async def park(builder: EnvGroupBuilder) -> None:
        [env] = await builder.make_envs()
        await env.initial_observation()
        kept.append(env)

    await park(builders[0])
    gc.collect()
    tracemalloc.start()
    try:
        for builder in builders[1:]:
            await park(builder)
        growth, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for builder in builders:
        await builder.cleanup()
    assert growth / len(builders[1:]) < 45_000  # 40,000 to 40,500 alone


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ends", ["answer", "wrong arguments", "limit"])
async def test_an_ended_episode_leaves_the_collector_nothing(ends: str) -> None:
    solver, words = twice(), Words(["so"])
    if ends != "answer":
        solver = as_solver(react(tools=[add()]))
        words = Words([tool_call("add", '{"x": "?"}'), tool_call("submit", '{"answer": "so"}')])
    limit = 4 if ends == "limit" else None

    async def roll() -> None:
        task = Task([Sample(id=1, input="?")], solver=solver, scorer=what_happened())
        task.scorer, task.message_limit = None, limit
        await roll_out_task(task, words, reward=pays_one, group_size=4)

    await roll()
    gc.collect()
    await roll()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    left = {type(thing).__name__ for thing in gc.garbage}
    assert not left & {"SampleRun", "Episode", "TaskState", "QuietTranscript", "Turn", "Env"}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ends", ["closed", "stopped"])
async def test_an_episode_that_was_cut_off_leaves_the_collector_nothing(ends: str) -> None:
    runner = EpisodeRunner(Task(dataset=[Sample(id=1, input="?")], solver=generate()))

    async def cut() -> list[weakref.ref[Any]]:
        episode = runner.episode(Sample(id=1, input="?"))
        await episode.start()
        parts = [weakref.ref(part) for part in (episode, episode._run, episode._mailbox)]
        if ends == "stopped":
            await episode.stop("enough")
        await episode.close()
        return parts

    parts = await asyncio.create_task(cut())
    for _ in range(10):  # callbacks of its tasks, which refer to it
        await asyncio.sleep(0)
    if asyncio.Future.__module__ != "_asyncio":
        # An earlier test has called Inspect in a running loop, which brings nest_asyncio: futures
        # in plain Python hold the error of a cancellation, and it them, until both are collected.
        gc.collect()
    left = [part() for part in parts if part() is not None]
    holders = [str(each)[:200] for part in left for each in gc.get_referrers(part)]
    assert not left, holders


async def test_descriptions_of_tools_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspect_tinker_plugin.inspect_internals.tasks._MANY_DESCRIPTIONS", 20)
    module = sys.modules["inspect_ai.tool._tool_info"]
    agent = as_solver(react(tools=[add()]))
    task = Task(dataset=[Sample(id=1, input="?")], solver=agent, message_limit=8)
    for _ in range(12):
        done = await roll_out_task(task, ["so"], reward=pays_one)
        assert len(done.trajectories_G[0].transitions) > 1
        assert len(module._tool_info_cache) < 40


async def pays_one(result: EpisodeResult) -> float:
    return 1.0


def test_loaded_objects_are_excluded_from_collections() -> None:
    before = gc.get_threshold()
    try:
        freeze_memory()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
