"""OpenEnv's client runs episodes of a server, and reads training traces of them.

openenv is not a dependency of the tests: ``make clients`` installs it and runs them.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest
from inspect_ai import Task
from tests.rl.policies import Words
from tests.rl.tasks import arithmetic, crashing, sums
from tests.serve.engine import serving
from tests.serve.lent import own
from tests.serve.server import hosted
from tests.serve.test_server import CASES

from inspect_tinker_plugin.serve import RolloutResult

pytest.importorskip("openenv", reason="openenv is not installed: make clients")

from openenv.harbor.client import HarborEnv
from openenv.harbor.contract import to_training_trace


def rolled_out(url: str, split: str, **lent: Any) -> Any:
    """What the client does, in a thread of its own."""
    with HarborEnv(base_url=url).sync() as env:
        return env.run_rollout(split=split, task_index=0, **lent)


@pytest.mark.parametrize(("task", "lines"), CASES)
def test_the_client_gets_the_rollouts_training_trace(task: Task, lines: list[str]) -> None:
    async def run() -> Any:
        async with serving(Words(lines)) as engine, hosted(task) as served:
            return await asyncio.to_thread(rolled_out, served.url, task.name, llm_url=engine)

    check(asyncio.run(run()), asyncio.run(own(task, Words(lines))))


def check(result: Any, expected: RolloutResult) -> None:
    assert (result.ok, result.reward, result.trainable) == (True, expected.reward, True)
    trace = to_training_trace(result)
    assert len(trace.turns) == len(expected.turns)
    for turn, ours in zip(trace.turns, expected.turns, strict=True):
        assert turn.prompt_token_ids == ours.prompt_tokens
        assert turn.completion_token_ids == ours.tokens
        assert turn.per_token_logps == ours.logprobs
        assert sum(turn.loss_mask) == len(ours.tokens)
    assert result.n_trainable_tokens == sum(sum(each.mask) for each in expected.branches)


def test_the_client_discovers_tasks() -> None:
    def discover(url: str) -> Any:
        with closing(HarborEnv(base_url=url)) as env:
            tasks = env.get_task_range("arithmetic", 1, 3)
            return env.splits(), env.num_tasks("arithmetic"), tasks

    async def run() -> Any:
        async with hosted(arithmetic()) as served:
            return await asyncio.to_thread(discover, served.url)

    splits, count, tasks = asyncio.run(run())
    assert [each["name"] for each in splits] == ["arithmetic"]
    assert count == 4
    assert [(each.index, each.task_id, each.instruction) for each in tasks] == [
        (1, "s1", "1+1?"),
        (2, "s2", "2+1?"),
    ]


def test_a_failure_has_no_reward() -> None:
    task = Task(name="t", dataset=sums(1), scorer=crashing())

    async def run() -> Any:
        async with serving(Words(["1"])) as engine, hosted(task, sampler=engine) as served:
            failed = await asyncio.to_thread(rolled_out, served.url, "t")
            refused = await asyncio.to_thread(rolled_out, served.url, "other")
            return failed, refused

    failed, refused = asyncio.run(run())
    assert (failed.ok, failed.reward, failed.exception_type) == (False, None, "scorer")
    assert (refused.ok, refused.reward) == (False, None)
    assert "no task 'other' is served" in refused.error
