"""Every limit, set by the task, by the run, and inside a solver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelCost, ModelInfo, set_model_info
from inspect_ai.scorer import Score, Target, accuracy, includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, use_tools
from inspect_ai.util import LimitExceededError, message_limit, sample_limits, store, token_limit
from tests.functions import make_scorer, make_solver, make_tool
from tests.parity.cases import Expect, case

from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing.replies import call, say

ONE_DOLLAR_A_TOKEN = ModelCost(input=1e6, output=1e6, input_cache_write=0.0, input_cache_read=0.0)


def counting() -> list[Sample]:
    return [Sample(input="Count to ten.", target="one")]


@make_tool
async def tick() -> str:
    """Count on."""
    return "tick"


def ticking(**limits: Any) -> Task:
    solver = [use_tools(tick()), generate()]
    return Task(dataset=counting(), solver=solver, scorer=includes(), **limits)


@make_solver
async def sleeps(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    store().set("slept", False)
    await anyio.sleep(30)
    store().set("slept", True)
    return state


@make_solver
async def works(state: TaskState, generate: Generate) -> TaskState:
    """Keeps busy in small steps, so that a working limit can end it."""
    state = await generate(state)
    for _ in range(600):
        await anyio.sleep(0.05)
    return state


def asking(solver: Callable[[], Solver], **limits: Any) -> Task:
    return Task(dataset=counting(), solver=solver(), scorer=includes(), **limits)


def priced(**limits: Any) -> Task:
    for model in ("scripted/policy", "rl/policy"):
        set_model_info(model, ModelInfo(cost=ONE_DOLLAR_A_TOKEN))
    return ticking(**limits)


def under(make: Callable[..., Task], name: str, limit: float) -> Callable[[], Task]:
    return lambda: make(**{f"{name}_limit": limit})


TICKS = [say("one", call("tick")), say("one", call("tick"))]
# name, value, the task, the script, the score, and what the store has
ENDING: list[tuple[str, float, Callable[..., Task], list[Any], str, dict[str, Any]]] = [
    ("message", 5, ticking, TICKS, "C", {}),
    ("token", 1, ticking, TICKS[:1], "I", {}),  # always exceeded, however tokens are counted
    ("cost", 0.5, priced, TICKS[:1], "I", {}),
    ("time", 1, partial(asking, sleeps), ["one"], "C", {"slept": False}),
    ("working", 1, partial(asking, works), ["one"], "C", {}),
]
for name, limit, task, script, score, kept in ENDING:
    expect = Expect(turns=len(script), scores={"includes": score}, limit=name, store=kept)
    case(id=f"{name}-limit-of-the-task", script=script, expect=expect)(under(task, name, limit))
    # over that of the task
    run = EpisodeOptions(**{f"{name}_limit": limit})  # type: ignore[arg-type]
    case(id=f"{name}-limit-of-the-run", script=script, expect=expect, options=run)(
        under(task, name, 50 * limit)
    )

# Of tokens and costs, 0 ends a sample before or after its first call: releases of Inspect differ.
case(
    id="message-limit-of-zero",
    script=[],
    expect=Expect(turns=0, scores={"includes": "I"}, limit="message"),
    options=EpisodeOptions(message_limit=0),
)(ticking)


@case(
    script=[say("one", call("tick"))],
    expect=Expect(turns=1, scores={"includes": "C"}, limit="message"),
)
def message_limit_set_by_a_solver() -> Task:
    @make_solver
    async def lowers(state: TaskState, generate: Generate) -> TaskState:
        state.message_limit = 3
        return state

    return Task(
        dataset=counting(), solver=[use_tools(tick()), lowers(), generate()], scorer=includes()
    )


@case(
    script=[say("one", call("tick")), say("one")],
    options=EpisodeOptions(token_limit="output*0:1k"),
    expect=Expect(turns=2, scores={"includes": "C"}),
    # counts nothing, and takes the place of the task's limit, which would end it
)
def token_limit_of_the_run_as_a_formula() -> Task:
    return ticking(token_limit=1)


@case(
    script=[say("one", call("tick")) for _ in range(7)],
    expect=Expect(turns=7, scores={"includes": "C"}, limit="token"),
    tokens="the counts of scripted characters and of tokens differ",
)
def token_limit_after_some_turns() -> Task:
    return ticking(token_limit=66)


@case(
    script=[say("one", call("tick")) for _ in range(4)],
    expect=Expect(turns=4, scores={"includes": "C"}, limit="turn"),
)
def turn_limit_of_the_task() -> Task:
    return ticking(turn_limit=3)


@case(
    script=[say("one", call("tick")), say("one", call("tick"))],
    expect=Expect(turns=2, scores={"includes": "C"}, limit="message"),
)
def message_limit_of_a_react_agent() -> Task:
    return Task(
        dataset=counting(), solver=react(tools=[tick()]), scorer=includes(), message_limit=6
    )


@make_solver
async def limits_inside(state: TaskState, generate: Generate) -> TaskState:
    """Reaches its own limits and continues."""
    try:
        with message_limit(2):
            state = await generate(state)
            state = await generate(state)
    except LimitExceededError as error:
        store().set("first", [error.type, error.limit])
    try:
        with token_limit(1):
            state = await generate(state)
    except LimitExceededError as error:
        store().set("second", [error.type, error.limit])
    return state


@case(
    script=["one", "one again"],
    expect=Expect(
        turns=2,
        scores={"includes": "C"},
        store={"first": ["message", 2], "second": ["token", 1]},
    ),
)
def limits_that_a_solver_handles() -> Task:
    return Task(dataset=counting(), solver=limits_inside(), scorer=includes())


@make_scorer(accuracy())
async def reads_limits(state: TaskState, target: Target) -> Score:
    limits = sample_limits()
    return Score(
        value=1,
        metadata={
            "message": [limits.message.limit, limits.message.usage],
            "tokens": limits.token.limit,
            "time": limits.time.limit,
            "completed": state.completed,
        },
    )


@case(
    script=["one"],
    expect=Expect(turns=1, scores={"reads_limits": 1}),
)
def limits_seen_by_a_scorer() -> Task:
    return Task(
        dataset=counting(),
        scorer=reads_limits(),
        message_limit=20,
        token_limit=1000,
        time_limit=60,
    )


@make_solver
async def times_out(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    raise TimeoutError("of the solver's own")


@case(
    script=["one"],
    expect=Expect(turns=1, scores={"includes": "C"}),
)
def solver_with_a_stray_timeout() -> Task:
    return Task(dataset=counting(), solver=times_out(), scorer=includes())
