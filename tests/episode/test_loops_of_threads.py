"""Solvers that ask from threads with event loops of their own, and envs stepped in one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.model import ChatMessageAssistant, get_model
from inspect_ai.scorer import Score, Target, mean
from inspect_ai.solver import Generate, TaskState
from tests.functions import make_scorer, make_solver
from tests.rl.policies import Words, encode, renderer
from tests.rl.tasks import sums
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.rl.group import InspectGroupBuilder

T = TypeVar("T")
PATIENCE = 300.0


def ask(question: str) -> str:
    """Ask as a synchronous agent framework does: in an event loop of this thread."""
    return asyncio.run(get_model().generate(question)).completion


@make_solver
async def synchronous(
    state: TaskState, generate: Generate, times: int = 2, *, shielded: bool = False
) -> TaskState:
    for _ in range(times):
        if shielded:
            said = await anyio.to_thread.run_sync(ask, state.input_text)
        else:
            said = await asyncio.to_thread(ask, state.input_text)
        state.messages.append(ChatMessageAssistant(content=said))
        state.output.completion = said
    return state


@make_scorer(mean())
async def said_so(state: TaskState, target: Target) -> Score:
    return Score(value=float(target.text in state.output.completion))


def builder(task: Task, **options: Any) -> InspectGroupBuilder:
    return as_rl_dataset(task, renderer(), **options).get_batch(0)[0]


def in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run work in a loop of another thread; a hang fails the test."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work())), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def test_a_solver_asks_from_a_thread_with_its_own_loop() -> None:
    async def run() -> list[float]:
        made = builder(Task(sums(1), solver=synchronous(), scorer=said_so()), group_size=3)
        return (await do_group_rollout(made, Words(["1"]))).get_total_rewards()

    assert in_thread(run) == [1.0, 1.0, 1.0]


def test_several_threads_ask_together_and_each_gets_its_answer() -> None:
    @make_solver
    async def many(state: TaskState, generate: Generate) -> TaskState:
        said = await asyncio.gather(*[asyncio.to_thread(ask, f"{n}?") for n in range(5)])
        state.output.completion = " ".join(said)
        return state

    async def run() -> list[float]:
        made = builder(Task(sums(1), solver=many(), scorer=said_so()))
        words = Words(["0", "1", "2", "3", "4"])
        group = await do_group_rollout(made, words)
        assert len(words.prompts) == 5
        return group.get_total_rewards()

    assert in_thread(run) == [1.0]


@pytest.mark.parametrize("shielded", [False, True], ids=["asyncio", "anyio"])
@pytest.mark.parametrize("end", ["close", "settle", "time limit"])
def test_clean_up_ends_a_thread_that_waits(end: str, shielded: bool) -> None:
    if end == "time limit" and shielded:
        pytest.skip("no time limit reaches into anyio's threads, nor does it in an eval")

    async def run() -> None:
        limit = 1 if end == "time limit" else None
        task = Task(sums(1), solver=synchronous(shielded=shielded), scorer=said_so())
        made = builder(task, time_limit=limit)
        [env] = await made.make_envs()
        await env.initial_observation()
        if end == "time limit":
            await env.episode._mailbox.end()  # type: ignore[attr-defined]
        if end == "settle":
            await env.settle()  # type: ignore[attr-defined]
        await made.cleanup()
        assert env.episode.released  # type: ignore[attr-defined]

    in_thread(run)


def test_an_env_is_stepped_and_closed_in_another_loop_than_it_was_started_in() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        made = builder(Task(sums(1), solver=synchronous(), scorer=said_so()))
        [env] = await made.make_envs()
        await env.initial_observation()

        def elsewhere(work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
            return loop.run_in_executor(pool, lambda: asyncio.run(work()))

        with ThreadPoolExecutor(1) as pool:
            first = await elsewhere(lambda: env.step(encode("no<|im_end|>")))
            assert not first.episode_done
            last = await elsewhere(lambda: env.step(encode("1<|im_end|>")))
            assert (last.episode_done, last.reward) == (True, 1.0)
            [other] = await made.make_envs()
            await other.initial_observation()
            await elsewhere(other.settle)  # type: ignore[attr-defined]
            [third] = await made.make_envs()
            await third.initial_observation()
            await elsewhere(made.cleanup)
        assert third.episode.released  # type: ignore[attr-defined]

    in_thread(run)


ABANDONED = """
import asyncio
from tests.episode.test_loops_of_threads import *

async def main():
    made = builder(Task(sums(1), solver=synchronous(), scorer=said_so()))
    [env] = await made.make_envs()
    await env.initial_observation()

asyncio.run(main())
print("ended")
"""


@pytest.mark.nightly
def test_a_process_ends_whose_episodes_were_never_closed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "ended" in done.stdout, done.stderr
