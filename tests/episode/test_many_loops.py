"""Limits of the process, which many event loops share: none waits for another's."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    get_model,
    modelapi,
)
from inspect_ai.scorer import Score, Scorer, Target, includes, mean, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.tool import ToolChoice, ToolInfo
from inspect_ai.util import concurrency, sandbox, subprocess
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.inspect_internals.turnstile import ProcessLimiter, ProcessSemaphore
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

THREADS = 4
PATIENCE = 120.0


def in_threads(work: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run the same work in as many loops at once; one that hangs fails the test."""
    results: list[Any] = [None] * THREADS

    def run(number: int) -> None:
        try:
            results[number] = asyncio.run(work())
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a loop waits for another"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@solver
def in_a_sandbox() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(3):
            await sandbox().exec([sys.executable, "-S", "-c", "pass"])
        return await generate(state)

    return solve


@scorer(metrics=[mean()])
def in_a_process() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        said = await subprocess([sys.executable, "-S", "-c", f"print({target.text!r})"])
        async with concurrency("rl-test-one-at-a-time", 1):
            await asyncio.sleep(0.001)
        return Score(value=float(said.stdout.strip() in state.output.completion))

    return score


@modelapi("rl_test_judge")
class Judge(ModelAPI):
    """Takes a moment and is content."""

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        await asyncio.sleep(0.001)
        return ModelOutput.from_content(self.model_name, "GRADE: C")

    async def count_text_tokens(self, text: str) -> int:
        return len(text)


@scorer(metrics=[mean()])
def judged(connections: GenerateConfig) -> Scorer:
    judge = get_model("rl_test_judge/judge", config=connections)

    async def score(state: TaskState, target: Target) -> Score:
        said = [await judge.generate("Is it good?") for _ in range(3)]
        return Score(value=float(all("GRADE" in each.completion for each in said)))

    return score


def groups(task: Task) -> Callable[[], Coroutine[Any, Any, list[float]]]:
    async def run() -> list[float]:
        dataset = as_rl_dataset(task, renderer(), group_size=4, batch_size=2)
        done = await asyncio.gather(
            *[do_group_rollout(b, Words(["plum"] * 4)) for b in dataset.get_batch(0)]
        )
        return [reward for group in done for reward in group.get_total_rewards()]

    return run


SAMPLES = [Sample(id=n, input="Say plum.", target="plum") for n in range(2)]


def test_sandboxes_and_processes_of_several_loops_end() -> None:
    task = Task(dataset=SAMPLES, solver=in_a_sandbox(), scorer=in_a_process(), sandbox="local")
    assert in_threads(groups(task)) == [[1.0] * 8] * THREADS


@pytest.mark.parametrize(
    "connections",
    [
        pytest.param(GenerateConfig(max_connections=1), id="one connection"),
        pytest.param(GenerateConfig(adaptive_connections=1), id="adaptive connections"),
    ],
)
def test_judges_of_several_loops_share_their_connections(connections: GenerateConfig) -> None:
    task = Task(dataset=SAMPLES, solver=generate(), scorer=judged(connections))
    assert in_threads(groups(task)) == [[1.0] * 8] * THREADS


def test_limits_that_an_eval_has_made_before_serve_several_loops() -> None:
    task = Task(dataset=SAMPLES, solver=in_a_sandbox(), scorer=in_a_process(), sandbox="local")
    [log] = inspect_eval(task, model="rl_test_judge/plum", display="none", log_format="json")
    assert log.status == "success"
    assert in_threads(groups(task)) == [[1.0] * 8] * THREADS


@pytest.mark.parametrize("kind", ["limiter", "semaphore"])
def test_a_limit_holds_over_all_loops(kind: str) -> None:
    limit = ProcessLimiter(2) if kind == "limiter" else ProcessSemaphore(2)
    inside, most = 0, 0
    counting = threading.Lock()

    async def enter() -> None:
        nonlocal inside, most
        async with limit:
            with counting:
                inside += 1
                most = max(most, inside)
            try:
                await asyncio.sleep(0.001)
            finally:
                with counting:
                    inside -= 1

    async def some() -> None:
        cut = [asyncio.create_task(enter()) for _ in range(20)]
        kept = [asyncio.create_task(enter()) for _ in range(20)]
        for number, task in enumerate(cut):
            await asyncio.sleep(0)
            if number % 3 == 0:
                task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        await asyncio.gather(*kept)

    in_threads(some)
    assert most == 2
    assert limit.statistics().tasks_waiting == 0

    async def enter_at_once() -> None:
        limit.acquire_nowait()

    async def both() -> None:
        async with limit:
            await asyncio.create_task(enter_at_once())

    asyncio.run(both())  # nothing is lost to those that were cancelled


async def test_more_tokens_let_waiters_in_at_once() -> None:
    limit = ProcessLimiter(1)
    await limit.acquire_on_behalf_of("a")
    waiting = asyncio.create_task(limit.acquire_on_behalf_of("b"))
    await asyncio.sleep(0.01)
    assert (limit.borrowed_tokens, limit.available_tokens) == (1, 0)
    limit.total_tokens = 2
    async with asyncio.timeout(20):
        await waiting
    with pytest.raises(RuntimeError, match="already holding"):
        limit.acquire_on_behalf_of_nowait("b")
    limit.release_on_behalf_of("b")
    with pytest.raises(RuntimeError, match="isn't holding"):
        limit.release_on_behalf_of("b")
    assert limit.borrowed_tokens == 1


MEET = """
import os, pathlib, sys, time
room, guests = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(room / str(os.getpid())).touch()
while len(list(room.iterdir())) < guests:
    time.sleep(0.01)
"""


async def test_as_many_subprocesses_run_at_once_as_the_option_says(tmp_path: Path) -> None:
    """Each waits for all others, as programs wait for the model: fewer at once would hang."""
    guests = (os.cpu_count() or 1) + 1

    @solver(name="meet")
    def meet() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            command = [sys.executable, "-c", MEET, str(tmp_path), str(guests)]
            done = await sandbox().exec(command, timeout=60)
            assert done.success, done.stderr
            return await generate(state)

        return solve

    assert (await subprocess(["true"])).success  # there is a limit already
    task = Task(
        dataset=[Sample(input="?", target="plum")],
        solver=meet(),
        scorer=includes(),
        sandbox="local",
    )
    dataset = as_rl_dataset(task, renderer(), group_size=guests, max_subprocesses=guests)
    group = await do_group_rollout(dataset.get_batch(0)[0], Words(["plum"]))
    assert group.get_total_rewards() == [1.0] * guests
