"""Inspect's hooks on samples are called for an episode as for an eval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.hooks import Hooks, hooks
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate
from tests.functions import make_solver
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollouts import do_single_rollout

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing.sides import run_eval

ON = False
seen: list[tuple[str, Any]] = []


@hooks(name="notes_samples", description="Notes what it is called for.")
class Notes(Hooks):
    def enabled(self) -> bool:
        return ON

    async def on_sample_event(self, data: Any) -> None:
        seen.append((f"event {data.event.event}", data))


def noting(name: str) -> Callable[[Notes, Any], Awaitable[None]]:
    async def note(self: Notes, data: Any) -> None:
        seen.append((name, data))

    return note


STAGES = ("init", "start", "attempt_start", "scoring", "attempt_end", "end")
for name in (
    *("run_start", "task_start", *(f"sample_{stage}" for stage in STAGES)),
    *("before_model_generate", "model_usage"),
):
    setattr(Notes, f"on_{name}", noting(name))


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    global ON
    ON = True
    seen.clear()
    yield
    ON = False


@make_solver
async def breaks(state: TaskState, generate: Generate) -> TaskState:
    await generate(state)
    raise RuntimeError("broken")


def task(of: Solver | None = None) -> Task:
    return Task([Sample("1+1?", id="sum", target="2")], solver=of or generate(), scorer=includes())


def names() -> list[str]:
    """Return what was called, but for events, whose order beside the others is open."""
    return [name for name, _ in seen if not name.startswith("event")]


async def play(of: Task, **options: Any) -> Any:
    [builder] = as_rl_dataset(of, renderer(), **options).get_batch(0)
    [env] = await builder.make_envs()
    try:
        return await do_single_rollout(Words(["2"]), env)
    finally:
        await builder.cleanup()


@pytest.mark.parametrize("of", [generate, breaks])
async def test_an_episode_calls_what_an_eval_calls(of: Any) -> None:
    await run_eval(task(of()), ["2"])
    of_eval = names()
    events = {name for name, _ in seen if name.startswith("event")}
    seen.clear()
    await play(task(of()), on_error={"solver": 0.0})
    assert names() == of_eval
    assert {name for name, _ in seen if name.startswith("event")} >= events - {"event logger"}


async def test_they_see_the_sample_and_ids_that_belong_together() -> None:
    await play(task())
    data = dict(seen)
    assert data["sample_end"].sample.scores["includes"].value == "C"
    assert data["sample_start"].summary.id == "sum"
    assert data["task_start"].spec.task == "task"
    assert len({each.run_id for _, each in seen}) == 1
    assert len({each.sample_id for name, each in seen if "sample" in name}) == 1


async def test_an_episode_that_is_closed_ends_for_them_too() -> None:
    [builder] = as_rl_dataset(task(), renderer()).get_batch(0)
    [env] = await builder.make_envs()
    await env.initial_observation()
    await builder.cleanup()
    assert names()[-2:] == ["sample_attempt_end", "sample_end"]


async def test_without_hooks_nothing_is_kept_for_them() -> None:
    global ON
    ON = False
    assert not internals.hooks_are_on()
    await play(task())
    assert not seen
