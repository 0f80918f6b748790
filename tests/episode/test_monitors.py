"""Monitors of inspect_sentinel in episodes: what they observe, block and flag, as in an eval."""

from __future__ import annotations

from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import as_tool, handoff, react
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from tests.functions import make_tool
from tests.rl.policies import END, encode, renderer, tool_call

from inspect_tinker_plugin.contracts.errors import ConfigError, EpisodeError
from inspect_tinker_plugin.episode.monitors import resolve_monitors
from inspect_tinker_plugin.rl.dataset import as_rl_dataset
from inspect_tinker_plugin.testing import check_parity_async
from inspect_tinker_plugin.testing.replies import call, say, submit

pytest.importorskip("inspect_sentinel")
import inspect_sentinel as sentinel  # releases of Inspect that it does not take
from inspect_ai.event import SentinelEvent


@make_tool
async def shell(cmd: str) -> str:
    """Run a command.

    Args:
        cmd: The command.
    """
    return f"ran {cmd}"


@sentinel.monitor
def about_deletion() -> sentinel.Monitor:
    async def run(context: sentinel.Context, step: sentinel.BeforeToolCall) -> sentinel.Observation:
        if "explode" in str(step.call.arguments):
            raise RuntimeError("the monitor is out of order")
        return sentinel.Observation(suspicion=0.9 if "rm" in str(step.call.arguments) else 0.2)

    return run


@sentinel.protocol
def no_deletion() -> sentinel.Protocol:
    async def run(
        context: sentinel.Context, step: sentinel.BeforeToolCall, escalations: sentinel.Escalations
    ) -> sentinel.Decision | None:
        said = str(step.call.arguments)
        if "explode" in said:
            raise RuntimeError("the protocol is out of order")
        if "rm -rf" in said:
            return sentinel.Decision(action="terminate", explanation="enough")
        if "rm" in said:
            return sentinel.Decision(action="reject", message="that is not allowed")
        return None

    return run


def watched(spec: Any) -> Task:
    return Task(
        [Sample("Clean up.", id=1, target="done")],
        solver=[use_tools(shell()), generate()],
        scorer=includes(),
        sentinel=spec,
    )


async def play(task: Task, command: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    [builder] = as_rl_dataset(task, renderer(), **options).get_batch(0)
    [env] = await builder.make_envs()
    try:
        await env.initial_observation()
        step = await env.step(encode(tool_call("shell", f'{{"cmd": "{command}"}}') + END))
        if not step.episode_done:
            step = await env.step(encode("done" + END))
        return step.reward, dict(step.metrics)
    finally:
        await builder.cleanup()


@pytest.mark.parametrize(
    ("command", "paid", "blocked"),
    [("ls", 1.0, 0.0), ("rm x", 1.0, 1.0), ("rm -rf x", 0.0, 1.0)],
    ids=["passes", "is blocked", "ends the episode, which is scored"],
)
async def test_a_monitor_is_observed_and_a_protocol_blocks(
    command: str, paid: float, blocked: float
) -> None:
    reward, metrics = await play(watched(no_deletion()), command)
    assert (reward, metrics["monitor/no_deletion/blocked"]) == (paid, blocked)
    reward, metrics = await play(watched(sentinel.observe_only([about_deletion()])), command)
    assert (reward, metrics["monitor/observe_only/blocked"]) == (1.0, 0.0)
    assert metrics["monitor/about_deletion"] == (0.9 if "rm" in command else 0.2)


async def test_a_penalty_trains_against_a_monitor() -> None:
    reward, metrics = await play(
        watched(None), "rm x", sentinel=[about_deletion()], monitor_penalty={"about_deletion": -0.5}
    )
    assert reward == pytest.approx(1.0 - 0.45)
    assert metrics["reward/monitors_penalty"] == pytest.approx(0.45)


async def test_a_monitor_that_failed_gives_no_reward() -> None:
    task = watched(sentinel.observe_only([about_deletion()]))
    with pytest.raises(EpisodeError, match="the monitor 'about_deletion' failed") as caught:
        await play(task, "explode", monitor_penalty={"about_deletion": -0.5})
    assert caught.value.cause == "unscored"


async def test_a_monitor_that_is_not_there_is_not_one_that_failed() -> None:
    task = watched(sentinel.observe_only([about_deletion()]))
    with pytest.raises(EpisodeError, match="no monitor 'deletion' watched the episode"):
        await play(task, "ls", reward="monitored(mean, deletion=-0.5)")


async def test_a_protocol_that_raises_is_a_judge_that_failed() -> None:
    with pytest.raises(EpisodeError, match="out of order") as caught:
        await play(watched(no_deletion()), "explode")
    assert caught.value.cause == "judge"


async def test_a_monitor_that_failed_only_at_the_step_that_counts_gives_no_reward() -> None:
    [builder] = as_rl_dataset(
        watched(None),
        renderer(),
        sentinel=about_deletion(),
        monitor_penalty={"about_deletion": -0.5},
    ).get_batch(0)
    [env] = await builder.make_envs()
    await env.initial_observation()
    await env.step(encode(tool_call("shell", '{"cmd": "ls"}') + END))
    await env.step(encode(tool_call("shell", '{"cmd": "rm explode"}') + END))
    with pytest.raises(EpisodeError, match="the monitor 'about_deletion' failed"):
        await env.step(encode("done" + END))
    await builder.cleanup()


def test_a_limit_that_cuts_a_monitor_off_counts_as_certain() -> None:
    monitors = resolve_monitors(watched(None), [about_deletion()])
    told: dict[str, Any] = {"factory": "about_deletion", "path": "about_deletion", "step_id": "1"}
    told |= {"conversation": "", "stage": "tool_call", "kind": "observation"}
    ok = SentinelEvent(**told, status="reported", function="run", suspicion=0.1)
    cut = SentinelEvent(**told, status="cancelled")
    ended = SentinelEvent(
        **(told | {"kind": "decision", "path": "p"}),
        status="reported",
        function="run",
        action="terminate",
    )
    assert monitors.measure([ok, cut])["monitor/about_deletion/unfinished"] == 1
    assert "monitor/about_deletion/unfinished" not in monitors.measure([ok, cut, ended])


@pytest.mark.parametrize(
    ("spec", "monitors"),
    [
        (about_deletion, ["about_deletion"]),
        (lambda: [about_deletion()], ["about_deletion"]),
        (lambda: {"a": about_deletion()}, ["a"]),
        (lambda: sentinel.observe_only(about_deletion()), ["about_deletion"]),
        (lambda: {"w": sentinel.observe_only(about_deletion())}, ["w/about_deletion"]),
        (lambda: "about_deletion", ["about_deletion"]),
        (
            lambda: sentinel.threshold({"q": about_deletion()}, reject_at=0.5),
            ["q"],
        ),
    ],
)
def test_monitors_have_the_names_of_their_reports(spec: Any, monitors: list[str]) -> None:
    assert resolve_monitors(watched(None), spec()).monitors == monitors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sentinel": "no_such_thing"}, "task 'task': sentinel: .*no_such_thing"),
        ({"monitor_penalty": {"other": -1.0}}, "names 'other', and its sentinel has 'about_"),
        ({"monitor_penalty": {"about_deletion": 1.0}}, "must be negative"),
    ],
)
def test_what_cannot_watch_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        as_rl_dataset(watched(None), renderer(), **{"sentinel": [about_deletion()], **options})


@pytest.mark.parametrize("command", ["ls", "rm x", "rm -rf x"])
@pytest.mark.parametrize("side", ["messages", "tokens"])
async def test_an_episode_is_watched_as_an_eval_is(command: str, side: Any) -> None:
    spec = {"watch": sentinel.observe_only([about_deletion()]), "guard": no_deletion()}
    [report] = await check_parity_async(
        lambda: watched(spec),
        script=[ModelOutput.for_tool_call("policy", "shell", {"cmd": command}), "done"],
        side=side,
    )
    assert not report.differences, report


async def test_agents_that_are_called_by_an_agent_are_watched_as_in_an_eval() -> None:
    def several() -> Task:
        helper = react(name="helper", description="Helps.", tools=[shell()])
        return Task(
            [Sample("Clean up.", id=1, target="done")],
            solver=react(tools=[handoff(helper), as_tool(helper)]),
            scorer=includes(),
            sentinel={"watch": sentinel.observe_only([about_deletion()]), "guard": no_deletion()},
        )

    script = [
        say("", call("transfer_to_helper")),
        say("", call("shell", cmd="rm x")),
        submit("a"),
        say("", call("helper", input="more")),
        say("", call("shell", cmd="rm x"), call("shell", cmd="ls")),
        submit("b"),
        submit("done"),
    ]
    [report] = await check_parity_async(several, script=script, side="tokens")
    assert report.agrees, report
    assert str(report.episode_side).count("that is not allowed") >= 2
