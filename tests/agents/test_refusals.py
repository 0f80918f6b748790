"""What a program asks that no prompt can hold is refused, once the policy may have caused it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState
from tests.agents.sandboxed import agent, free_port, task_of
from tests.functions import make_solver
from tests.rl.policies import roll_out_task
from tinker_cookbook.rl.data_processing import trajectory_to_data

from inspect_tinker_plugin.contracts.errors import Cause, EpisodeError, RendererError

openai = pytest.importorskip("openai", reason="the extra `agents`")

ASK = """
import sys
sys.path.insert(0, "agent")
import program
for body in BODIES:
    try:
        said = program.post(PORT, "/v1/chat/completions", {"model": "inspect", **body})
        print(said["choices"][0]["message"]["content"])
    except RuntimeError as ex:
        print("refused" if " 400 " in str(ex) else ex)
"""

PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "Well?"}]}
LOOK = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LISTEN = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
REFUSED: dict[str, dict[str, Any]] = {
    "an image": {"messages": [{"role": "user", "content": [LOOK]}]},
    "a sound": {"messages": [{"role": "user", "content": [LISTEN]}]},
    "two replies": PLAIN | {"n": 2},
    "less than no tokens": PLAIN | {"max_tokens": -1},
    "a text for a number": PLAIN | {"max_tokens": "5"},
}
HALF = "\ud800"
HALF_TOOL = {
    "name": f"a{HALF}",
    "description": HALF,
    "parameters": {"type": "object", "properties": {HALF: {"type": "string", "description": HALF}}},
}
HALF_CALL = {"name": HALF, "arguments": '{"\\ud800": "\\ud800"}'}
READ: dict[str, dict[str, Any]] = {
    "half a pair in a tool": PLAIN | {"tools": [{"type": "function", "function": HALF_TOOL}]},
    "half a pair in a stop sequence": PLAIN | {"stop": [HALF]},
    "half a pair in a conversation": {
        "messages": [
            {"role": "user", "content": HALF},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": HALF, "type": "function", "function": HALF_CALL}],
            },
            {"role": "tool", "tool_call_id": HALF, "content": HALF},
        ]
    },
}


async def roll(
    folder: Path, bodies: list[dict[str, Any]]
) -> tuple[list[str], float, dict[str, Any], int]:
    """Return what a program printed, the reward, the metrics and the number of data."""
    port = free_port()
    printed: list[str] = []
    text = f"PORT, BODIES = {port}, {bodies!r}" + ASK
    run = agent(
        ["python3", "-c", text],
        port=port,
        printed=printed,
        bridged={"forward_generation_config": True},
    )
    group = await roll_out_task(task_of("local", folder, run), ["plum"])
    [trajectory] = group.trajectories_G
    metrics = group.metrics_G[0] | trajectory.transitions[-1].metrics
    data = trajectory_to_data(trajectory, 1.0)
    return printed, group.get_total_rewards()[0], metrics, len(data)


@pytest.mark.parametrize("what", REFUSED)
async def test_a_program_is_refused_and_goes_on(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    printed, reward, metrics, data = await roll(tmp_path, [PLAIN, REFUSED[what], PLAIN])
    assert printed == ["plum", "refused", "plum"]
    assert reward == 1.0
    assert metrics["tokens/refused"] == 1
    assert data == 2
    assert "shown an error of its model API" in caplog.text


@pytest.mark.parametrize("what", READ)
async def test_half_a_surrogate_pair_is_spelt_out(what: str, tmp_path: Path) -> None:
    printed, reward, metrics, _ = await roll(tmp_path, [READ[what]])
    assert printed == ["plum"]
    assert reward == 1.0
    assert metrics["tokens/refused"] == 0


async def test_before_the_first_reply_the_renderer_does_not_fit_the_task(tmp_path: Path) -> None:
    with pytest.raises(RendererError, match="an image"):
        await roll(tmp_path, [REFUSED["an image"]])


@make_solver
async def shows_an_image(state: TaskState, generate: Generate, *, bridged: bool) -> TaskState:
    """Ask in words, and then with an image, as a solver or through OpenAI's client."""
    if not bridged:
        state = await generate(state)
        state.messages.append(
            ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
        )
        return await generate(state)
    async with agent_bridge(state=None), openai.AsyncOpenAI(api_key="none") as client:
        for body in (PLAIN, REFUSED["an image"]):
            await client.chat.completions.create(model="inspect", **body)
    return state


@pytest.mark.parametrize("bridged", [True, False])
async def test_what_nobody_catches_is_the_policys_failure_and_has_its_price(bridged: bool) -> None:
    task = Task(
        dataset=[Sample(input="Well?", target="yes")],
        solver=shows_an_image(bridged=bridged),
        scorer=includes(),
    )
    with pytest.raises(EpisodeError, match="an image") as caught:
        await roll_out_task(task, ["yes"])
    assert caught.value.cause is Cause.POLICY
    group = await roll_out_task(task, ["yes"], on_error={"policy": -1.0})
    assert group.get_total_rewards() == [-1.0]
