"""Trainers get episodes over the network; others, and what is too much, are refused."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from inspect_ai import Task
from tests.rl.policies import TOKENIZER, Words, tool_call
from tests.rl.tasks import adding, agent, arithmetic, crashing, sums
from tests.rl.test_turn_trees import LINES
from tests.serve.engine import serving
from tests.serve.lent import own
from tests.serve.server import hosted
from tests.serve.test_service import CALL, FORKS, SUBMIT, tree
from tests.waiting import until

from inspect_tinker_plugin.cli.serve import serve_command
from inspect_tinker_plugin.serve import processes
from inspect_tinker_plugin.serve.app import JsonFormatter
from inspect_tinker_plugin.serve.host import FIELDS, Limits

ADD = tool_call("add", '{"x": 0, "y": 1}')
CASES = [
    pytest.param(arithmetic(), ["1"], id="single turn"),
    pytest.param(adding(), [ADD, "It is 1."], id="tool"),
    pytest.param(agent(), [CALL, SUBMIT], id="agent in a sandbox"),
    pytest.param(tree(FORKS), LINES, id="several conversations"),
]


HALF = "\ud800"
"""Half a surrogate pair, which has no UTF-8."""


def sample_id(task: Task) -> str:
    return str(next(iter(task.dataset)).id)


def run_body(task: Task, **task_input: Any) -> dict[str, Any]:
    return {
        "episode_id": {"rollout_id": "r-0", "attempt": 1},
        "task": {
            "task_id": {"taskset": task.name, "task_id": sample_id(task)},
            "task_input": task_input,
        },
    }


@pytest.mark.parametrize(("task", "lines"), CASES)
async def test_nemo_gyms_run_gives_a_response_with_tokens(task: Task, lines: list[str]) -> None:
    async with serving(Words(lines)) as url, hosted(task, sampler=url) as served:
        status, answer = await served.post("/run", run_body(task))
    assert status == 200, answer
    expected = await own(task, Words(lines))
    assert answer["episode_id"] == {"rollout_id": "r-0", "attempt": 1}
    assert answer["task_id"] == {"taskset": task.name, "task_id": sample_id(task)}
    result = answer["result"]
    assert result["reward"] == expected.reward
    carrying = [item for item in result["response"]["output"] if "generation_token_ids" in item]
    last = [turn for turn in expected.turns if turn.branch == len(expected.branches) - 1]
    assert [item["generation_token_ids"] for item in carrying] == [each.tokens for each in last]
    assert [item["prompt_token_ids"] for item in carrying] == [each.prompt_tokens for each in last]
    branches = result["response"]["branches"]
    for name in ("tokens", "mask", "logprobs"):
        assert branches[0][name] == getattr(expected.branches[0], name)


@pytest.mark.parametrize(
    ("change", "stage", "kind"),
    [
        ({}, "verification", "verifier_error"),
        ({"sampler": {"url": "http://127.0.0.1:9"}}, "agent", "agent_request_failed"),
    ],
)
async def test_nemo_gym_gets_failures_in_its_words(change: Any, stage: str, kind: str) -> None:
    task = Task(name="t", dataset=sums(1), scorer=crashing())

    async with serving(Words(["1"])) as url, hosted(task) as served:
        status, answer = await served.post(
            "/run", run_body(task, **{"sampler": {"url": url}, **change})
        )
    assert status == 200
    assert "result" not in answer
    failure = answer["failure"]
    assert (failure["stage"], failure["failure_kind"], failure["terminal"]) == (stage, kind, False)


async def test_nemo_gym_gets_a_terminal_failure_for_a_sample_that_is_not_there() -> None:
    async with hosted(arithmetic()) as served:
        body = run_body(arithmetic())
        body["task"]["task_id"]["task_id"] = "other"
        _, answer = await served.post("/run", body)
    assert answer["failure"]["terminal"]
    assert "has no sample 'other'" in answer["failure"]["failure_reason"]


async def test_metrics_are_aggregated_by_task_without_masked_rollouts() -> None:
    rows: Sequence[dict[str, Any]] = [
        {"_ng_task_index": 0, "reward": 1.0},
        {"_ng_task_index": 0, "reward": 0.0},
        {"_ng_task_index": 1, "reward": 1.0},
        {"_ng_task_index": 1, "reward": 9.0, "mask_sample": True},
    ]

    async with hosted(arithmetic()) as served:
        _, answer = await served.post("/aggregate_metrics", {"verify_responses": rows})
    assert [each["mean/reward"] for each in answer["group_level_metrics"]] == [0.5, 1.0]
    assert answer["key_metrics"] == {"mean/reward": pytest.approx(2 / 3)}


async def test_metrics_of_a_large_run_are_aggregated() -> None:
    row = {"reward": 1.0, "scores": "x" * 2**21}
    body = io.BytesIO(json.dumps({"verify_responses": [row]}).encode())

    async with (
        hosted(arithmetic()) as served,
        served.client.post(
            f"{served.url}/aggregate_metrics",
            data=body,
            headers={"Content-Type": "application/json"},
        ) as answer,
    ):
        assert answer.status == 200


async def test_a_client_that_vanishes_ends_its_own_episodes_only() -> None:
    slow = Words(["1"], delay_s=0.5)
    async with serving(slow) as url, hosted(agent(), arithmetic(), sampler=url) as served:
        host = served.host
        stays = asyncio.create_task(
            served.post("/v1/rollouts", {"task": "arithmetic", "sample": "s0", "size": 1})
        )
        leaves = asyncio.create_task(
            served.post("/v1/rollouts", {"task": "agent", "sample": "a", "size": 3})
        )
        socket = await served.client.ws_connect(f"{served.url}/ws")
        call = {"tool_name": "run_rollout", "arguments": {"split": "agent"}}
        await socket.send_json({"type": "step", "data": {"type": "call_tool", **call}})
        await until(lambda: host.running == 5)
        leaves.cancel()
        await socket.close()
        status, answer = await stays
        assert (status, answer["rollouts"][0]["reward"]) == (200, 1.0)
        await until(lambda: host.running == 0)
        _, text = await served.get("/metrics")
        assert 'task="agent",outcome="cancelled"} 4' in text
        assert 'task="arithmetic",outcome="ok"} 1' in text


async def test_episodes_wait_for_a_place_and_no_longer_than_they_may() -> None:
    limits = Limits(max_episodes=2, queue_timeout=0.1)
    slow = Words(["1"], delay_s=2)
    async with serving(slow) as url, hosted(arithmetic(), sampler=url, limits=limits) as served:
        body = {"task": "arithmetic", "sample": "s0", "size": 2}
        first = asyncio.create_task(served.post("/v1/rollouts", body))
        await until(lambda: served.host.running == 2)
        status, answer = await served.post("/v1/rollouts", {**body, "size": 1})
        assert (status, "no place" in answer["detail"]) == (503, True)
        _, late = await served.post("/run", run_body(arithmetic()))
        assert late["failure"]["stage"] == "admission"
        assert (await first)[0] == 200
        status, answer = await served.post("/v1/rollouts", {**body, "size": 3})
        assert (status, "at most 2 episodes" in answer["detail"]) == (400, True)
        for odd in ({"sample": True}, {"size": True}):
            status, answer = await served.post("/v1/rollouts", {**body, **odd})
            assert status == 422


async def test_an_episode_that_takes_too_long_is_cut_and_is_no_zero() -> None:
    limits = Limits(episode_timeout=0.2)
    slow = Words(["1"], delay_s=1)
    async with serving(slow) as url, hosted(arithmetic(), sampler=url, limits=limits) as served:
        body = {"task": "arithmetic", "sample": "s0"}
        status, answer = await served.post("/v1/rollouts", body)
        assert (status, "cut after 0.2 seconds" in answer["detail"]) == (504, True)
        _, late = await served.post("/run", run_body(arithmetic()))
        assert late["failure"]["failure_kind"] == "agent_timeout"
        assert served.host.running == 0


async def test_requests_without_the_token_of_web_pages_or_too_large_are_refused() -> None:
    token = "correct horse battery"
    words = Words(["1"])
    async with serving(words) as url, hosted(arithmetic(), sampler=url, token=token) as served:
        body = {"task": "arithmetic", "sample": "s0", "size": 1}
        mine = {"Authorization": f"Bearer {token}"}
        assert (await served.post("/v1/rollouts", body))[0] == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert (await served.post("/v1/rollouts", body, **wrong))[0] == 401
        assert (await served.get("/metrics"))[0] == 401
        assert (await served.get("/health"))[0] == 200
        page = {**mine, "Origin": "http://example.com"}
        assert (await served.post("/v1/rollouts", body, **page))[0] == 403
        large = io.BytesIO(b" " * (2**20 + 1))
        async with served.client.post(
            f"{served.url}/v1/rollouts", data=large, headers=mine
        ) as answer:
            assert answer.status == 413
        assert (await served.post("/v1/rollouts", body, **mine))[0] == 200
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await served.client.ws_connect(f"{served.url}/ws")


async def test_openenvs_task_api_takes_the_first_task_by_default() -> None:
    async with hosted(arithmetic()) as served:
        paths = ("num_tasks", "task", "task_range")
        count, first, listed = [(await served.post(f"/harbor_env/{path}", {}))[1] for path in paths]
    assert (count["num_tasks"], first["task"]["task_id"], len(listed["tasks"])) == (4, "s0", 4)


async def test_a_web_page_that_points_its_name_at_this_machine_is_refused() -> None:
    async with hosted(arithmetic()) as served:
        for name, status in (("localhost:8400", 200), ("[::1]", 200), ("evil.example", 403)):
            async with served.client.get(f"{served.url}/metrics", headers={"Host": name}) as answer:
                assert answer.status == status, name


@pytest.mark.parametrize(
    "text",
    [
        *("not json", "[]", '{"type": 3}', '{"type": "step", "data": []}'),
        '{"type": "step", "data": {}}',
        '{"type": "step", "data": {"tool_name": ["a"]}}',
        b"\xff\x00",
    ],
)
async def test_a_message_that_makes_no_sense_gets_an_error_and_the_session_continues(
    text: str | bytes,
) -> None:
    async with hosted(arithmetic()) as served:
        socket = await served.client.ws_connect(f"{served.url}/ws")
        await (socket.send_str(text) if isinstance(text, str) else socket.send_bytes(text))
        assert (await socket.receive_json())["type"] == "error"
        call = {"tool_name": "run_rollout", "arguments": [1]}
        await socket.send_json({"type": "step", "data": call})
        answer = await socket.receive_json()
        assert not json.loads(answer["data"]["observation"]["result"])["ok"]
        await socket.send_json({"type": "state"})
        assert (await socket.receive_json())["type"] == "state"
        await socket.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/harbor_env/task", {"index": "x"}),
        ("/harbor_env/task", {"index": 99}),
        ("/harbor_env/task_range", {"start": "x"}),
        ("/harbor_env/num_tasks", {"split": "other"}),
        ("/mcp", {"method": "tools/call", "params": []}),
        ("/mcp", {"method": "tools/call", "params": {"name": ["a"]}}),
        ("/v1/rollouts", {"task": float("nan")}),
        ("/v1/rollouts", {"task": HALF, "sample": HALF}),
        ("/v1/rollouts", {HALF: [float("inf"), HALF]}),
        ("/run", {"episode_id": HALF, "task": float("nan")}),
        ("/aggregate_metrics", {"verify_responses": [{"a": float("inf")}, {"a": -(10**400)}]}),
        ("/aggregate_metrics", {"verify_responses": [{"_ng_task_index": []}]}),
    ],
)
async def test_a_body_that_makes_no_sense_is_a_fault_of_the_request(path: str, body: Any) -> None:
    async with hosted(arithmetic()) as served:
        assert (await served.post(path, body))[0] in (400, 422)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "other"}, "no task 'other' is served; there is arithmetic"),
        ({"sample": "other"}, "has no sample 'other'"),
        ({"sampler": {"url": "http://127.0.0.1:1"}}, "has its own sampler"),
    ],
)
async def test_what_there_is_not_is_a_400(change: Any, message: str) -> None:
    async with hosted(arithmetic(), sampler="http://127.0.0.1:9") as served:
        body = {"task": "arithmetic", "sample": "s0", **change}
        status, answer = await served.post("/v1/rollouts", body)
    assert status == 400
    assert message in answer["detail"]


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """The signals that reach the server, whose handler this is."""
    reached: list[int] = []
    before = {number: signal.getsignal(number) for number in processes.SIGNALS}
    for number in before:
        signal.signal(number, lambda number, frame: reached.append(number))
    yield reached
    for number, handler in before.items():
        signal.signal(number, handler)


ONE = {"task": "arithmetic", "sample": "s0", "size": 1}


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_waits_for_episodes_and_readiness_ends_first(
    stopped: list[int], by: signal.Signals
) -> None:
    async def run() -> None:
        slow = Words(["1"], delay_s=0.5)
        async with serving(slow) as url, hosted(arithmetic(), sampler=url) as served:
            assert (await served.get("/ready"))[0] == 200
            running = asyncio.create_task(served.post("/v1/rollouts", ONE))
            await until(lambda: served.host.running == 1)
            os.kill(os.getpid(), by)
            os.kill(os.getpid(), by)  # as `timeout` does, to the process and to its group
            await until(lambda: served.host.draining)
            assert (await served.get("/ready"))[0] == 503
            assert (await served.post("/v1/rollouts", ONE))[0] == 503
            assert not stopped
            assert (await running)[0] == 200
            await until(lambda: stopped == [by])

    asyncio.run(run())


def test_episodes_that_wait_are_refused_by_a_signal_and_a_second_one_ends_those_that_run(
    stopped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SAME_SECONDS", -1.0)

    async def run() -> None:
        hanging = Words(["1"], delay_s=3600)
        limits = Limits(max_episodes=1)
        async with (
            serving(hanging) as url,
            hosted(arithmetic(), sampler=url, limits=limits) as served,
        ):
            running = asyncio.create_task(served.post("/v1/rollouts", ONE))
            await until(lambda: served.host.running == 1)
            waiting = asyncio.create_task(served.post("/v1/rollouts", ONE))
            await until(lambda: served.host.waiting == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await waiting == (503, {"detail": "the server is about to stop"})
            assert not stopped
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == (503, {"detail": "the server has stopped"})
            await until(lambda: bool(stopped))
            assert served.host.running == served.host.waiting == 0

    asyncio.run(run())


def test_episodes_are_ended_when_their_time_after_a_signal_is_over(stopped: list[int]) -> None:
    async def run() -> None:
        hanging = Words(["1"], delay_s=3600)
        async with (
            serving(hanging) as url,
            hosted(arithmetic(), sampler=url, patience=0.1) as served,
        ):
            running = asyncio.create_task(served.post("/v1/rollouts", ONE))
            await until(lambda: served.host.running == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == (503, {"detail": "the server has stopped"})
            await until(lambda: bool(stopped))

    asyncio.run(run())


async def test_an_episode_is_a_line_of_json_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(Words(["1"])) as url, hosted(arithmetic(), sampler=url) as served:
            body = {"task": "arithmetic", "sample": "s0", "size": 1}
            await served.post("/v1/rollouts", body)
    [record] = [each for each in caplog.records if hasattr(each, FIELDS)]
    line = json.loads(JsonFormatter().format(record))
    assert line["event"] == "episode"
    assert (line["task"], line["sample"], line["outcome"]) == ("arithmetic", "s0", "ok")


def test_the_command_refuses_to_be_reached_without_a_token(tmp_path: Path) -> None:
    short, two, key = (tmp_path / name for name in ("short", "two", "key"))
    short.write_text("short")
    two.write_text("the first of them\nand the second one")
    key.write_bytes(bytes(range(100, 200)))
    there = ["--tokenizer", str(TOKENIZER), "--renderer", "qwen3_instruct"]
    task = f"{Path(__file__).parents[1]}/rl/tasks.py@arithmetic"
    for more, message in (
        (["--host", "0.0.0.0"], "can be reached from other machines: give --token-file"),
        (["--token-file", str(short)], "less than 16 characters"),
        (["--token-file", str(two)], "or blanks"),
        (["--token-file", str(key)], f"the token in {key} cannot be read"),
    ):
        done = CliRunner().invoke(serve_command, [task, *there, *more])
        assert done.exit_code == 1
        assert message in done.output
