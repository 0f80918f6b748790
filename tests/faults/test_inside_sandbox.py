"""Failures caused by commands inside a sandbox have a penalty and are never retried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import Score, Target, accuracy
from inspect_ai.solver import Generate, TaskState, generate
from inspect_ai.util import (
    SandboxEnvironment,
    sandbox,
    subprocess,
)
from tests.faults.rollouts import failure_of, rolled
from tests.functions import make_scorer, make_solver
from tests.rl.policies import Words, renderer
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollouts import do_group_rollout

from inspect_docker_pool import SandboxDiedError, SandboxMisusedError
from inspect_tinker_plugin.contracts.errors import Cause
from inspect_tinker_plugin.rl.dataset import as_rl_dataset

Action = Callable[[SandboxEnvironment], Awaitable[object]]


async def _missing(box: SandboxEnvironment) -> object:
    return await box.read_file("answer.txt")


async def _folder(box: SandboxEnvironment) -> object:
    await box.exec(["mkdir", "answer.txt"])
    return await box.read_file("answer.txt")


async def _link_loop(box: SandboxEnvironment) -> object:
    await box.exec(["sh", "-c", "ln -s a b; ln -s b a"])
    await box.write_file("a", "hidden test")
    return None


async def _long_name(box: SandboxEnvironment) -> object:
    await box.write_file("n" * 300, "text")
    return None


async def _no_text(box: SandboxEnvironment) -> object:
    await box.exec(["sh", "-c", r"printf '\377' > answer.txt"])
    return await box.read_file("answer.txt")


async def _slow(box: SandboxEnvironment) -> object:
    return await box.exec(["sleep", "30"], timeout=1)


async def _slow_for_the_task(box: SandboxEnvironment) -> object:
    return await asyncio.wait_for(box.exec(["sleep", "30"]), 1)


async def _said_in_other_words(box: SandboxEnvironment) -> object:
    try:
        return await box.read_file("answer.txt")
    except FileNotFoundError as error:
        raise ValueError("there is no answer") from error


async def _said_in_a_handler(box: SandboxEnvironment) -> object:
    try:
        return await box.exec(["sleep", "30"], timeout=1)
    except TimeoutError:
        raise ValueError("the tests take too long")  # noqa: B904 - as tasks do


async def _said_without_the_reason(box: SandboxEnvironment) -> object:
    try:
        return await box.read_file("answer.txt")
    except FileNotFoundError:
        raise ValueError("there is no answer") from None


async def _said_of_a_group(box: SandboxEnvironment) -> object:
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(box.read_file, "answer.txt")
            group.start_soon(box.read_file, "other.txt")
    except ExceptionGroup as error:
        raise ValueError("there is no answer") from error
    return None


async def _slow_in_a_group(box: SandboxEnvironment) -> object:
    with anyio.fail_after(1):
        async with anyio.create_task_group() as group:
            group.start_soon(box.exec, ["sleep", "30"])
            group.start_soon(box.exec, ["sleep", "31"])
    return None


async def _slow_and_cleaned_up_after(box: SandboxEnvironment) -> object:
    try:
        with anyio.fail_after(1):
            try:
                return await box.exec(["sleep", "30"])
            finally:
                await box.exec(["true"])
    except TimeoutError as error:
        raise RuntimeError("the tests take too long") from error


async def _with_a_zero_byte(box: SandboxEnvironment) -> object:
    return await box.exec(["python3", "-c", "print('a\0b')"])


async def _with_half_a_surrogate_pair(box: SandboxEnvironment) -> object:
    return await box.exec(["python3", "-"], input="print('\ud800')")


async def _of_no_name(box: SandboxEnvironment) -> object:
    return await box.read_file("")


async def _used_up(box: SandboxEnvironment) -> object:
    raise SandboxMisusedError("no process is left")


ACTIONS = [
    _missing,
    _folder,
    _link_loop,
    _long_name,
    _no_text,
    _slow,
    _slow_for_the_task,
    _said_in_other_words,
    _said_of_a_group,
    _slow_in_a_group,
    _slow_and_cleaned_up_after,
    _with_a_zero_byte,
    _with_half_a_surrogate_pair,
    _of_no_name,
    _used_up,
]


@make_scorer(accuracy())
async def looks(state: TaskState, target: Target, action: Action) -> Score:
    await action(sandbox())
    return Score(value=1)


@make_solver
async def prepares(state: TaskState, generate: Generate, action: Action) -> TaskState:
    await action(sandbox())
    return await generate(state)


@make_solver
async def acts(state: TaskState, generate: Generate, action: Action) -> TaskState:
    await generate(state)
    await action(sandbox())
    return state


def task(action: Action, place: str) -> Task:
    return Task(
        dataset=[Sample(id=1, input="Write answer.txt.", target="x")],
        solver=acts(action) if place == "solver" else generate(),
        scorer=looks(action),
        sandbox="local",
    )


@pytest.mark.parametrize("place", ["solver", "scorer"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
async def test_it_costs_and_is_not_retried(action: Action, place: str) -> None:
    group = await rolled(task(action, place), retries=2)
    assert group.rollout_errors == []
    assert group.get_total_rewards() == [0.0]
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert metrics["error/inside_sandbox"] == 1.0


async def _endless(box: SandboxEnvironment) -> object:
    return await box.exec(["sleep", "300"])


async def _endless_in_two_tasks(box: SandboxEnvironment) -> object:
    return await asyncio.gather(box.exec(["sleep", "300"]), box.exec(["sleep", "301"]))


async def _endless_elsewhere(box: SandboxEnvironment) -> object:
    await box.exec(["true"])
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(box.exec(["sleep", "300"]), 0.2)
    await asyncio.sleep(300)
    return None


THREE_SECONDS = RolloutLimits(rollout_timeout_seconds=3.0)
ENDLESS = [_endless, _endless_in_two_tasks, _endless_elsewhere]


@pytest.mark.parametrize("by", ["task", "trainer"])
@pytest.mark.parametrize("action", ENDLESS, ids=lambda action: action.__name__)
async def test_scoring_that_a_policy_keeps_from_ending_costs_and_is_not_retried(
    action: Action, by: str
) -> None:
    """It may put a pipe in the place of the file that the scorer reads."""
    endless = task(action, "scorer")
    patience = 5.0 if action is _endless_elsewhere else 1.0
    how: dict[str, Any] = {"stop_timeout": patience, "retries": 1}
    if by == "task":
        endless.time_limit = round(2 * patience)
    else:
        how["rollout_limits"] = THREE_SECONDS
    if action is _endless_elsewhere:
        assert (await failure_of(endless, **how)).cause is Cause.SCORER
        return
    group = await rolled(endless, **how)
    assert group.rollout_errors == []
    assert group.get_total_rewards() == [0.0]


async def test_a_solver_that_a_policy_keeps_from_ending_in_a_shield_costs_and_is_not_retried() -> (
    None
):
    async def shielded(box: SandboxEnvironment) -> object:
        with anyio.CancelScope(shield=True):
            await _endless(box)
        return None

    how: dict[str, Any] = {"stop_timeout": 1.0, "rollout_limits": THREE_SECONDS}
    group = await rolled(task(shielded, "solver"), retries=1, **how)
    assert group.rollout_errors == []
    assert group.get_total_rewards() == [0.0]


async def test_a_command_that_the_solver_left_running_is_not_what_a_hanging_scorer_waits_for() -> (
    None
):
    left: list[asyncio.Task[object]] = []

    async def leaves(box: SandboxEnvironment) -> object:
        left.append(asyncio.create_task(_endless(box)))
        return None

    async def hangs(box: SandboxEnvironment) -> object:
        await asyncio.sleep(300)
        return None

    asked = task(leaves, "solver")
    asked.scorer = [looks(hangs)]
    failed = await failure_of(asked, stop_timeout=1.0, rollout_limits=THREE_SECONDS)
    assert failed.cause is Cause.SCORER
    await asyncio.wait(left)


async def test_its_price_can_be_stated_and_it_can_be_raised() -> None:
    asked = task(_missing, "scorer")
    priced = await rolled(asked, on_error={"inside_sandbox": -1.5})
    assert priced.get_total_rewards() == [-1.5]
    failed = await failure_of(asked, on_error={"inside_sandbox": "raise"})
    assert failed.cause is Cause.INSIDE_SANDBOX


async def _without_descriptors(box: SandboxEnvironment) -> object:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await box.write_file("a", "text")
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        return await box.read_file("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("place", ["solver", "scorer"])
async def test_what_this_machine_refuses_is_raised(place: str) -> None:
    failed = await failure_of(task(_without_descriptors, place), match="Too many open files")
    assert failed.cause is Cause.SANDBOX


JUDGE_DOWN = {"grader": get_model("mockllm/model", custom_outputs=lambda *_: _down())}


def _down() -> ModelOutput:
    raise RuntimeError("the judge is down")


async def _missing_when_the_judge_is_down(box: SandboxEnvironment) -> object:
    try:
        return await get_model(role="grader").generate("What do you think?")
    except RuntimeError:
        return await box.read_file("answer.txt")


async def _service_down_when_it_is_missing(box: SandboxEnvironment) -> object:
    try:
        return await box.read_file("answer.txt")
    except FileNotFoundError:
        raise ConnectionError("the grading service is down")  # noqa: B904 - as tasks do


async def _judge_down_when_it_is_missing(box: SandboxEnvironment) -> object:
    try:
        return await box.read_file("answer.txt")
    except FileNotFoundError:
        return await get_model(role="grader").generate("Was there an answer?")


async def _missing_when_the_sandbox_has_died(box: SandboxEnvironment) -> object:
    try:
        raise SandboxDiedError("the engine restarted")
    except SandboxDiedError:
        return await box.read_file("answer.txt")


async def _died_beside_what_is_missing(box: SandboxEnvironment) -> object:
    async def dies() -> None:
        raise SandboxDiedError("the engine restarted")

    async with anyio.create_task_group() as group:
        group.start_soon(box.read_file, "answer.txt")
        group.start_soon(dies)
    return None


async def _mistaken_beside_what_is_missing(box: SandboxEnvironment) -> object:
    async def mistaken() -> None:
        raise ZeroDivisionError("a mistake of the task")

    async with anyio.create_task_group() as group:
        group.start_soon(box.read_file, "answer.txt")
        group.start_soon(mistaken)
    return None


async def _soon_mistaken() -> None:
    await anyio.sleep(0.2)
    raise ZeroDivisionError("a mistake of the task")


async def _mistaken_beside_a_command(box: SandboxEnvironment) -> object:
    async with anyio.create_task_group() as group:
        group.start_soon(_soon_mistaken)
        await box.exec(["sleep", "30"])
    return None


async def _mistaken_beside_a_command_that_cleans_up(box: SandboxEnvironment) -> object:
    async with anyio.create_task_group() as group:
        group.start_soon(_soon_mistaken)
        try:
            await box.exec(["sleep", "30"])
        finally:
            await anyio.sleep(0.1)  # which is cancelled as well
    return None


async def _host_hangs_before_a_clean_up(box: SandboxEnvironment) -> object:
    try:
        with anyio.fail_after(0.5):
            try:
                await anyio.sleep(30)
            finally:
                await box.exec(["true"])
    except TimeoutError as error:
        raise RuntimeError("no verdict in time") from error
    return None


async def _host_has_no_place_for_a_command(box: SandboxEnvironment) -> object:
    others = [
        asyncio.ensure_future(subprocess(["sleep", "30"])) for _ in range(2 * (os.cpu_count() or 1))
    ]
    await asyncio.sleep(0.2)
    try:
        with anyio.fail_after(0.5):
            return await box.exec(["true"])
    except TimeoutError as error:
        raise RuntimeError("no verdict in time") from error
    finally:
        for other in others:
            other.cancel()
        await asyncio.wait(others)


async def _late() -> None:
    await anyio.sleep(0.2)
    raise TimeoutError("the judge's own")


async def _host_is_late_beside_a_command(box: SandboxEnvironment) -> object:
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_late)
            group.start_soon(box.exec, ["sleep", "30"])
    except ExceptionGroup as error:
        raise RuntimeError("no verdict in time") from error
    return None


HONEST: dict[Action, Cause | None] = {
    _said_in_a_handler: None,
    _said_without_the_reason: None,
    _service_down_when_it_is_missing: None,
    _judge_down_when_it_is_missing: Cause.JUDGE,
    _missing_when_the_judge_is_down: Cause.JUDGE,
    _missing_when_the_sandbox_has_died: Cause.SANDBOX,
    _died_beside_what_is_missing: Cause.SANDBOX,
    _mistaken_beside_what_is_missing: None,
    _mistaken_beside_a_command: None,
    _mistaken_beside_a_command_that_cleans_up: None,
    _host_hangs_before_a_clean_up: None,
    _host_has_no_place_for_a_command: None,
    _host_is_late_beside_a_command: None,
}


@pytest.mark.parametrize("place", ["solver", "scorer"])
@pytest.mark.parametrize("action", HONEST, ids=lambda action: action.__name__)
async def test_a_failure_that_the_policy_has_no_part_in_is_raised(
    action: Action, place: str
) -> None:
    for _ in range(2):  # whichever exception of a group is looked at first
        failed = await failure_of(task(action, place), model_roles=JUDGE_DOWN)
        assert failed.cause is (HONEST[action] or Cause[place.upper()])


async def _raised_from_itself(box: SandboxEnvironment) -> object:
    error = ValueError("again")
    raise error from error


async def _many_times(box: SandboxEnvironment) -> object:
    error: Exception = ValueError("first")
    for number in range(3000):
        last, error = error, ValueError(f"attempt {number}")
        error.__context__ = last
    raise error


@pytest.mark.parametrize("action", [_raised_from_itself, _many_times])
async def test_an_exception_that_cannot_be_reported_is_an_error_of_its_episode(
    action: Action,
) -> None:
    failing = failure_of(task(action, "scorer"), match=r"again|attempt 2999")
    assert (await asyncio.wait_for(failing, 600)).cause is Cause.SCORER


_SCORED = (
    _slow_for_the_task,
    _slow_in_a_group,
)
NOT_SCORED = [action for action in ACTIONS if action not in _SCORED]
"""An eval scores what a solver has done until a ``TimeoutError`` of its own."""


@pytest.mark.parametrize("action", NOT_SCORED, ids=lambda action: action.__name__)
@pytest.mark.parametrize("place", ["setup", "solver"])
async def test_before_the_first_reply_it_is_the_tasks_fault(action: Action, place: str) -> None:
    asked = Task(
        name="faulty",
        dataset=[Sample(id=1, input="Write answer.txt.", target="x")],
        setup=prepares(action) if place == "setup" else None,
        solver=generate() if place == "setup" else prepares(action),
        scorer=looks(_missing),
        sandbox="local",
    )
    assert (await failure_of(asked)).cause is Cause.SOLVER


async def test_a_scorer_that_fails_without_a_reply_is_at_fault_itself() -> None:
    @make_solver
    async def says_nothing(state: TaskState, generate: Generate) -> TaskState:
        return state

    asked = Task(
        dataset=[Sample(id=1, input="x", target="x")],
        solver=says_nothing(),
        scorer=looks(_missing),
        sandbox="local",
    )
    assert (await failure_of(asked)).cause is Cause.SCORER


async def test_its_price_is_told_once_per_dataset(caplog: pytest.LogCaptureFixture) -> None:
    dataset = as_rl_dataset(task(_missing, "scorer"), renderer(), group_size=2)
    for _ in range(2):
        await do_group_rollout(dataset.get_batch(0)[0], Words(["done"]))
    [told] = [each.message for each in caplog.records if "inside_sandbox" in each.message]
    assert "task 'task', sample 1" in told
    assert "read_file() of the sandbox" in told
