"""OpenEnv's Harbor server, whose rollouts are training traces: Task API, sessions and one tool.

The wire is that of openenv 0.10 (``openenv.harbor.client.HarborEnv``), through which TRL's
asynchronous trainer and others read tokens. Of its arguments, ``split`` is the name of a task and
``task_index`` the position of a sample; harness and sandbox are the task's own.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from inspect_tinker_plugin.contracts.errors import ConfigError, InspectRLError
from inspect_tinker_plugin.contracts.wording import write_json
from inspect_tinker_plugin.serve.host import Host
from inspect_tinker_plugin.serve.results import (
    RolloutResult,
    SampledTurn,
    write_message,
)
from inspect_tinker_plugin.serve.samplers import LentSampler
from inspect_tinker_plugin.serve.service import RolloutService

TOOLS = [
    {
        "name": "run_rollout",
        "description": "Run one episode of a sample and return a JSON HarborRolloutResult.",
        "input_schema": {
            "type": "object",
            "properties": {"split": {"type": "string"}, "task_index": {"type": "integer"}},
        },
    },
    {"name": "capabilities", "description": "The tasks of this server.", "input_schema": {}},
]


class RolloutArguments(BaseModel):
    """Arguments of ``run_rollout``; those that choose harness and sandbox are not used."""

    model_config = ConfigDict(extra="ignore")

    split: str = ""
    task_index: int = 0
    llm_url: str = ""
    model: str = ""
    api_key: str = ""
    sampling: dict[str, Any] | None = None


def splits(host: Host) -> list[dict[str, Any]]:
    """Return the tasks."""
    return [
        {"name": name, "type": "train", "num_tasks": len(service.samples)}
        for name, service in host.services.items()
    ]


def find_service(host: Host, split: str) -> RolloutService:
    """Return a task by its name, or the first one by none.

    Raises:
        ConfigError: It is not served.
    """
    return host.service(split or next(iter(host.services)))


def task_ref(host: Host, split: str, index: int) -> dict[str, Any]:
    """Return a sample as a task.

    Raises:
        ConfigError: It is not served.
    """
    service = find_service(host, split)
    sample = service.sample(index)
    asked = sample.input if isinstance(sample.input, str) else sample.input[-1].text
    return {
        "index": index,
        "task_id": str(sample.id),
        "task_name": service.name,
        "dataset": service.name,
        "instruction": asked,
    }


async def call_tool(host: Host, name: Any, arguments: Any) -> str:
    """Carry out a tool; what fails is part of the result, as it is theirs.

    Raises:
        ConfigError: There is no such tool.
    """
    if name == "capabilities":
        return json.dumps({"datasets": list(host.services), "harnesses": [], "sandboxes": []})
    if name != "run_rollout":
        raise ConfigError(f"there is no tool {name!r}")
    started = time.monotonic()
    try:
        asked = RolloutArguments.model_validate(arguments)
        task = find_service(host, asked.split).name
        lent = None
        if asked.llm_url:
            lent = LentSampler(
                url=asked.llm_url,
                model=asked.model,
                api_key=asked.api_key or None,
                sampling=asked.sampling or {},
            )
        [result] = await host.run(task, asked.task_index, lent, size=1)
    except (InspectRLError, ValidationError) as error:
        kind = type(error).__name__
        return json.dumps({"ok": False, "error": str(error)[:2000], "exception_type": kind})
    return write_json(_rollout(result, time.monotonic() - started)).decode()


def _rollout(result: RolloutResult, seconds: float) -> dict[str, Any]:
    turns = [_turn(turn, index) for index, turn in enumerate(result.turns)]
    failure = result.failure
    return {
        "task_id": str(result.sample_id),
        "task_name": result.task,
        "dataset": result.task,
        "harness": "inspect",
        "sandbox": "inspect",
        "trial_name": f"{result.task}__{result.sample_id}",
        "session_id": uuid.uuid4().hex,
        "reward": result.reward,
        "rewards": {} if result.reward is None else {"reward": result.reward},
        "reward_key": "reward",
        "turns": turns,
        "n_turns": len(turns),
        "n_roots": len(result.branches),
        "n_trainable_tokens": sum(sum(branch.mask) for branch in result.branches),
        "multi_turn": len(turns) > 1,
        "wall_s": seconds,
        "ok": failure is None,
        "error": None if failure is None else failure.message,
        "exception_type": None if failure is None else failure.cause,
    }


def _turn(turn: SampledTurn, index: int) -> dict[str, Any]:
    reply = write_message(turn.reply)
    return {
        "turn": index,
        "node_id": f"turn-{index}",
        "finish_reason": "tool_calls" if reply.get("tool_calls") else turn.stop_reason,
        "prompt_token_ids": list(turn.prompt_tokens),
        "completion_token_ids": list(turn.tokens),
        "per_token_logps": list(turn.logprobs),
        "loss_mask": [0] * len(turn.prompt_tokens) + [int(turn.trained)] * len(turn.tokens),
        "trainable": turn.trained,
        "n_tools": len(turn.tools),
        "text": reply["content"],
        "tool_calls": [
            {"id": call["id"], **call["function"]} for call in reply.get("tool_calls", [])
        ],
        "request_messages": [write_message(each) for each in turn.messages],
        "request_tools": [
            {"type": "function", "function": info.model_dump(mode="json", exclude_none=True)}
            for info in turn.tools
        ]
        or None,
    }
