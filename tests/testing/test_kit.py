"""What the tests of plugins use, with the parts of the example packages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from acme_tools.probe import Shouting
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolError
from tests.tools.runs import add, fail, ran

from inspect_rl_audit import AuditOptions, run_audit
from inspect_tinker_plugin.contracts.errors import ConfigError, EpisodeError
from inspect_tinker_plugin.plugins import GroupOutcome, Sampler, ToolInvocation, ToolScope
from inspect_tinker_plugin.testing import call, play_episode, run_sampler, run_tool_calls

POOL = [Sample(id=i, input="?", metadata={"level": i}) for i in range(3)]


async def test_an_episode_of_a_chosen_sample_is_played_to_its_scores() -> None:
    dataset = [Sample(input="1 + 1?", target="2"), Sample(input="2 + 2?", target="4")]
    result = await play_episode(Task(dataset=dataset, scorer=includes()), ["It is 4."], sample=1)
    assert result.error is None
    assert result.score_values() == {"includes": "C"}


async def test_tool_calls_go_through_an_executor_and_share_what_it_remembers() -> None:
    ran.clear()
    scope = ToolScope(task="tools", sample_id=1)
    for _ in range(2):
        [shown] = await run_tool_calls("cached", [add()], call("add", x=1, y=2), scope=scope)
        assert shown.text == "3"
    assert ran == [("add", 1, 2)]


async def test_what_an_executor_raises_is_told_apart_from_what_the_model_is_shown() -> None:
    async def refuse(invocation: ToolInvocation) -> str:
        raise ToolError("not today")

    async def break_down(invocation: ToolInvocation) -> str:
        raise ValueError("broken")

    [shown] = await run_tool_calls(refuse, [fail()], call("fail", text="x"))
    assert shown.error is not None
    assert shown.error.message == "not today"
    with pytest.raises(EpisodeError, match="broken") as error:
        await run_tool_calls(break_down, [fail()], call("fail", text="x"))
    assert error.value.cause == "tool"


def test_a_sampler_is_shown_to_follow_its_outcomes() -> None:
    chosen = run_sampler("by_level(enough=0.5)", POOL, lambda sample, step: [1.0], steps=4)
    assert [set(each) for each in chosen] == [{0}, {1}, {2}, {2}]


class ByChance(Sampler):
    def choose(self, step: int, count: int, /) -> list[int]:
        return [random.randrange(1_000) for _ in range(count)]


class ByItsPast(Sampler):
    """Forgets what it was told, and counts what it was asked."""

    asked = 0

    def learn(self, outcome: GroupOutcome, /) -> None: ...

    def choose(self, step: int, count: int, /) -> list[int]:
        self.asked += 1
        return [self.asked % 3] * count


class WithoutFigures(Sampler):
    def choose(self, step: int, count: int, /) -> list[int]:
        return [0] * count

    def figures(self) -> dict[str, float]:
        raise ZeroDivisionError("no outcome yet")


def test_a_sampler_whose_figures_fail_does_so_in_a_test() -> None:
    with pytest.raises(ZeroDivisionError, match="no outcome yet"):
        run_sampler(WithoutFigures, POOL, lambda sample, step: [0.0])


def test_a_sampler_that_a_continued_run_would_not_repeat_is_found_out() -> None:
    with pytest.raises(AssertionError, match=r"step 1: .* in a continued run"):
        run_sampler(ByItsPast, POOL, lambda sample, step: [0.0])
    with pytest.raises(ConfigError, match="positions below 3"):
        run_sampler(ByChance, POOL, lambda sample, step: [0.0])


async def test_a_probe_that_is_not_installed_can_be_run(tmp_path: Path) -> None:
    task = Task(dataset=[Sample(input="Is it?", target="YES")], scorer=includes())
    report = await run_audit(task, AuditOptions(out=tmp_path, probes=[Shouting()], samples=1))
    assert [finding.code for finding in report.findings] == ["acme-shouting"]
