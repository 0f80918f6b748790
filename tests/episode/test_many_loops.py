"""Limits of the process: places for sandboxes serve many event loops; `max_subprocesses` counts."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import sandbox, subprocess
from tests.functions import make_solver
from tests.rl.policies import Words, renderer, roll_out_task
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_tinker_plugin.processes.loops import Places
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


@make_solver
async def in_a_sandbox(state: TaskState, generate: Generate) -> TaskState:
    await sandbox().write_file("said", "plum")
    return await generate(state)


def test_episodes_of_several_loops_wait_for_the_places_of_one_process() -> None:
    samples = [Sample(id=n, input="Say plum.", target="plum") for n in range(2)]
    task = Task(dataset=samples, solver=in_a_sandbox(), scorer=includes(), sandbox="local")

    async def run() -> list[float]:
        dataset = as_rl_dataset(task, renderer(), group_size=4, batch_size=2, max_sandboxes=1)
        done = await asyncio.gather(
            *[do_group_rollout(b, Words(["plum"] * 4)) for b in dataset.get_batch(0)]
        )
        return [reward for group in done for reward in group.get_total_rewards()]

    assert in_threads(run) == [[1.0] * 8] * THREADS


def test_a_bound_holds_over_all_loops() -> None:
    places = Places()
    inside, most = 0, 0
    counting = threading.Lock()

    async def enter() -> None:
        nonlocal inside, most
        async with places.place(2):
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
    assert places.alive == 0  # nothing is lost to those that were cancelled


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

    @make_solver
    async def meet(state: TaskState, generate: Generate) -> TaskState:
        command = [sys.executable, "-c", MEET, str(tmp_path), str(guests)]
        done = await sandbox().exec(command, timeout=60)
        assert done.success, done.stderr
        return await generate(state)

    assert (await subprocess(["true"])).success  # there is a limit already
    task = Task(
        dataset=[Sample(input="?", target="plum")],
        solver=meet(),
        scorer=includes(),
        sandbox="local",
    )
    group = await roll_out_task(task, ["plum"], group_size=guests, max_subprocesses=guests)
    assert group.get_total_rewards() == [1.0] * guests
