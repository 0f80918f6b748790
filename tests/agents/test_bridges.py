"""Programs in real sandboxes reach the policy at once, and nothing of the way there is left."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import eval_async
from inspect_ai.agent import sandbox_agent_bridge
from inspect_ai.model import ModelOutput
from inspect_ai.solver import Generate, TaskState
from inspect_ai.util import sandbox
from tests.agents.sandboxed import agent, free_port, plum, task_of
from tests.functions import make_solver
from tests.packages import run
from tests.tokens.conversations import Rollout, play_out
from tests.tokens.formats import renderer
from tests.tokens.test_bridged import CORPUS, answering, assert_exact, script

from inspect_tinker_plugin.agents.bridge import Calls
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import AgentBridgeError, Cause
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.options import EpisodeOptions
from inspect_tinker_plugin.testing.replies import scripted_model
from inspect_tinker_plugin.tokens.episode import DatasetRenderer

KINDS = [
    pytest.param("local", id="local"),
    pytest.param("docker_pool", id="docker_pool", marks=pytest.mark.docker),
    pytest.param("docker", id="docker", marks=pytest.mark.docker),
]
STOCK_NIGHTLY = [
    *KINDS[:2],
    pytest.param("docker", id="docker", marks=[pytest.mark.docker, pytest.mark.nightly]),
]
"""The stock provider takes long to stop, and is used per change by the other tests."""

WALLED = KINDS[1:]


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Inspect's own way fail, so that nobody takes it unseen."""

    async def poll(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the sandbox was polled")

    from inspect_ai.util._sandbox.service import SandboxService  # private: what is not to be used

    monkeypatch.setattr(SandboxService, "handle_requests", poll)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
@pytest.mark.usefixtures("no_polling")
async def test_a_program_in_a_sandbox_keeps_one_sequence(
    kind: str, dialect: str, tmp_path: Path
) -> None:
    run = agent(port=free_port(), dialect=dialect, turns=len(CORPUS))
    task = task_of(kind, tmp_path, run)
    rollout = Rollout(DatasetRenderer(renderer("qwen3_keep_thinking")))
    result = await play_out(task, answering(rollout, script(list(CORPUS.values()))))
    assert result.error is None, result.error.__cause__
    assert result.turns == len(CORPUS)
    assert len(rollout.data()) == 1
    assert_exact(rollout)


@pytest.mark.usefixtures("no_polling")
async def test_a_program_that_speaks_googles_api_is_trained_exactly(tmp_path: Path) -> None:
    pytest.importorskip("google.genai", reason="the extra `agents`")
    run = agent(port=free_port(), dialect="google", turns=len(CORPUS))
    rollout = Rollout(DatasetRenderer(renderer("qwen3_keep_thinking")))
    answers = answering(rollout, script(list(CORPUS.values())))
    result = await play_out(task_of("local", tmp_path, run), answers)
    assert result.error is None, result.error.__cause__
    assert result.turns == len(CORPUS)
    # Calls have no ids there: what is rendered otherwise than it was sampled begins a sequence.
    assert 1 < len(rollout.data()) < len(CORPUS)
    assert_exact(rollout)


GIVEN_UP = """
import json, sys
sys.path.insert(0, "agent")
import program
body = json.dumps({"model": "inspect", "messages": [{"role": "user", "content": "Do it, again."}]})
head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
with program.connect(PORT) as given_up:
    lines = [*head, f"Content-Length: {len(body)}", "", body]
    given_up.sendall("\\r\\n".join(lines).encode())
program.converse(program.chat, PORT, "again", 3, [])
"""


async def test_a_call_that_is_given_up_and_made_again_is_one_more_sequence(tmp_path: Path) -> None:
    port = free_port()
    run = agent(["python3", "-c", f"PORT = {port}{GIVEN_UP}"], port=port)
    rollout = Rollout(DatasetRenderer(renderer("qwen3_keep_thinking")))
    result = await play_out(
        task_of("local", tmp_path, run), lambda request: rollout.answer(request, "plum")
    )
    assert result.error is None, result.error.__cause__
    assert result.turns == 4
    assert len(rollout.data()) == 2
    assert_exact(rollout)


@pytest.mark.parametrize("kind", STOCK_NIGHTLY)
@pytest.mark.usefixtures("no_polling")
async def test_eight_conversations_at_once_are_all_answered(kind: str, tmp_path: Path) -> None:
    result = await play_out(
        task_of(kind, tmp_path, agent(port=free_port(), turns=4, talks=8)), plum
    )
    assert result.error is None, result.error.__cause__
    assert result.turns == len(json.loads(result.state.metadata["printed"])) == 32
    assert result.scores["includes"].score.value == "C"


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_a_limit_ends_the_program_and_the_state_is_scored(kind: str, tmp_path: Path) -> None:
    task = task_of(kind, tmp_path, agent(port=free_port(), turns=100))
    result = await play_out(task, plum, EpisodeOptions(max_turns=3))
    assert result.error is None, result.error.__cause__
    assert result.limit is not None
    assert result.limit.type == "turn"
    assert result.turns == 3
    assert set(result.scores) == {"includes"}


@make_solver
async def looking_after(
    state: TaskState, generate: Generate, port: int, seen: dict[str, list[str]]
) -> TaskState:
    """Open a bridge twice, and look at what is there then."""
    look = "ls -A /var/tmp; cat /proc/[0-9]*/comm"
    seen["before"] = sorted((await sandbox().exec(["sh", "-c", look])).stdout.split())
    for _ in range(2):
        async with sandbox_agent_bridge(port=port):
            asked = {"dialect": "chat", "turns": 1, "talks": 1, "port": port}
            await sandbox().exec(["python3", "agent/program.py", json.dumps(asked)])
    seen["after"] = sorted((await sandbox().exec(["sh", "-c", look])).stdout.split())
    return state


@pytest.mark.parametrize("kind", WALLED)
async def test_nothing_of_a_bridge_is_left_in_the_sandbox(kind: str, tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}
    result = await play_out(task_of(kind, tmp_path, looking_after(free_port(), seen)), plum)
    assert result.error is None, result.error.__cause__
    assert result.turns == 2
    assert "relay" not in seen["after"]
    assert seen["after"] == seen["before"]


@pytest.mark.parametrize("kind", STOCK_NIGHTLY)
async def test_an_episode_that_is_closed_while_it_waits_leaves_no_port(
    kind: str, tmp_path: Path
) -> None:
    port = free_port()
    task = task_of(kind, tmp_path, agent(port=port))
    for _ in range(2):
        episode = EpisodeRunner(task).episode(task.dataset[0])
        assert isinstance(await episode.start(), TurnRequest)
        await episode.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def assert_bridge_failed(result: EpisodeResult, *says: str) -> None:
    assert result.error is not None
    assert isinstance(result.error.__cause__, AgentBridgeError)
    assert all(text in str(result.error) for text in says), result.error


@pytest.mark.docker
async def test_a_program_that_ends_the_relay_gets_an_error_laid_to_it(tmp_path: Path) -> None:
    kill = "for p in /proc/[0-9]*; do grep -q relay $p/comm && kill -9 ${p#/proc/}; done; sleep 60"
    ask = 'cd agent && python3 program.py \'{"dialect":"chat","turns":1,"talks":1,"port":13131}\''
    run = agent(["sh", "-c", f"({ask}); {kill}"], port=13131)
    result = await play_out(task_of("docker_pool", tmp_path, run), plum)
    assert_bridge_failed(result, "13131")
    assert result.error is not None
    assert result.error.cause is Cause.INSIDE_SANDBOX


async def test_a_port_that_is_taken_is_an_error_before_the_program_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = await play_out(task_of("local", tmp_path, agent(port=port)), plum)
    assert_bridge_failed(result, str(port), "sample 1")
    assert result.turns == 0


@pytest.mark.docker
async def test_a_port_that_is_taken_in_a_container_is_an_error(tmp_path: Path) -> None:
    @make_solver
    async def twice(state: TaskState, generate: Generate) -> TaskState:
        async with sandbox_agent_bridge(port=13131), sandbox_agent_bridge(port=13131):
            return state

    result = await play_out(task_of("docker_pool", tmp_path, twice()), plum)
    assert_bridge_failed(result, "in use")


@pytest.mark.docker
@pytest.mark.slow  # Inspect's own bridge takes seconds to start, and polls
async def test_an_eval_beside_an_episode_goes_inspects_own_way(tmp_path: Path) -> None:
    run = agent(port=13131, turns=2)
    task = task_of("docker_pool", tmp_path, run)
    replies = ["No.", "It is plum."]
    log, result = await asyncio.gather(
        eval_async(task, model=scripted_model(replies), log_dir=str(tmp_path)),
        play_out(
            task, lambda request: ModelOutput.from_content("rl/policy", replies[request.index])
        ),
    )
    (sample,) = log[0].samples or []
    assert result.error is None, result.error.__cause__
    assert sample.error is None, sample.error.traceback
    assert sample.scores is not None
    assert sample.scores["includes"].value == result.scores["includes"].score.value == "C"
    calls = [event for event in sample.events if event.event == "model"]
    assert len(calls) == result.turns == 2


async def test_methods_are_given_what_they_take() -> None:
    # Those of Inspect 0.3.270 take no headers.
    async def without(json_data: dict[str, Any]) -> Any:
        return json_data

    async def with_headers(json_data: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return headers

    params = {"json_data": {"model": "m"}, "headers": {"accept": "all"}}
    async with anyio.create_task_group() as tasks:
        calls = Calls("service", {"without": without, "with": with_headers}, tasks)
        assert await calls.call("without", params) == {"model": "m"}
        assert await calls.call("with", params) == {"accept": "all"}


FAILURES = {
    "a status": (["sh", "-c", "echo broken >&2; exit 3"], "broken"),
    "a signal": (["sh", "-c", "echo dying >&2; kill -9 $$"], "dying"),
    "no such program": (["sh", "-c", "nonsense"], "nonsense"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_program_that_fails_is_an_error_of_the_solver(failure: str, tmp_path: Path) -> None:
    command, said = FAILURES[failure]
    result = await play_out(task_of("local", tmp_path, agent(command, port=free_port())), plum)
    assert result.error is not None
    assert result.error.cause is Cause.SOLVER
    assert said in str(result.error)
    assert not result.scores


IN_A_FRESH_PROCESS = """
import asyncio
from inspect_swe._util.trace import trace
from inspect_tinker_plugin.agents.bridge import serve_agents

async def main():
    async with serve_agents([], lambda operation: operation):
        trace("started")

asyncio.run(main())
"""


def test_agents_of_inspect_swe_need_no_eval_before_them() -> None:
    """They log at a level by its name, which an eval in this process has given it long ago."""
    pytest.importorskip("inspect_swe", reason="the extra `agents`")
    run(sys.executable, "-W", "ignore", "-c", IN_A_FRESH_PROCESS)
