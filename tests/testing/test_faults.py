"""A small fault campaign, and a check that it notices what it is meant to notice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from tests.faults.campaign import Report, Settings, draw, run_campaign

from inspect_tinker_plugin.rl.env import InspectEnv

# The cookbook abandons rollouts that have not begun when a group is cancelled.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Have abandoned rollouts reported here, and not in another test."""
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_hundred_episodes_with_a_fault_each_do_no_harm() -> None:
    report = await run_campaign(Settings(episodes=300, seed=1))
    assert report.wrong == []
    assert report.left == []
    assert report.struck > 150
    assert report.outcomes["clean reward"] > 20


def test_a_case_is_the_same_every_time() -> None:
    assert draw(3, 17, 2) == draw(3, 17, 2)
    assert len({draw(3, number, 2).faults for number in range(50)}) > 30


@pytest.mark.slow
async def test_a_silent_zero_is_noticed_and_can_be_seen_again() -> None:
    with patch.object(InspectEnv, "_step_reward", lambda self: 0.0):
        report = await run_campaign(Settings(episodes=20, seed=1))
    assert any(
        "the reward is 0.0" in wrong and "--seed 1 --only" in wrong for wrong in report.wrong
    )
    assert not report.passed


def test_a_report_with_something_left_has_not_passed() -> None:
    assert not Report(Settings(), left=["folder x"]).passed
    assert Report(Settings()).passed
