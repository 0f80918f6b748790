"""NeMo Gym's environment server: ``/run`` and ``/aggregate_metrics``.

The wire types are those of nemo-gym 0.7 (``episode_types.py``, ``base_environment_server.py``,
``failure_kinds.py``), which a client validates; its package is not needed to serve them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from inspect_tinker_plugin.contracts.errors import Cause, ConfigError
from inspect_tinker_plugin.serve.host import BusyError, Host, TooLongError
from inspect_tinker_plugin.serve.results import (
    Failure,
    RolloutResult,
    SampledTurn,
    write_message,
    write_result,
)
from inspect_tinker_plugin.serve.samplers import LentSampler

_KINDS = {
    Cause.JUDGE: ("judge_failed", "verification"),
    Cause.SCORER: ("verifier_error", "verification"),
    Cause.UNSCORED: ("verifier_error", "verification"),
    Cause.REWARD: ("verifier_error", "verification"),
    Cause.SANDBOX: ("provider_unavailable", "seed"),
    "sampler": ("agent_request_failed", "agent"),
}
"""Kind and stage by cause; what else fails, fails in the agent."""

TASK_INDEX = "_ng_task_index"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EpisodeId(_Strict):
    """One attempt of a rollout."""

    rollout_id: str = Field(min_length=1, max_length=500, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    attempt: int = Field(default=0, ge=0)


class TaskId(_Strict):
    """A sample: ``taskset`` is the name of the task, ``task_id`` the id of the sample."""

    taskset: str = Field(min_length=1)
    task_id: str = Field(min_length=1)


class TaskInput(BaseModel):
    """What a row may say beside its id; what else it holds is not used."""

    model_config = ConfigDict(extra="ignore")

    sampler: LentSampler | None = None


class MaterializedTask(_Strict):
    """A row of a dataset."""

    task_id: TaskId
    task_input: TaskInput = TaskInput()


class EpisodeRequest(_Strict):
    """The body of ``/run``."""

    episode_id: EpisodeId
    task: MaterializedTask


class AggregateRequest(BaseModel):
    """The body of ``/aggregate_metrics``."""

    verify_responses: list[dict[str, Any]]


async def run_episode(host: Host, request: EpisodeRequest) -> dict[str, Any]:
    """Run one episode; a failure is part of the answer."""
    task = request.task.task_id
    answer: dict[str, Any] = {
        "episode_id": request.episode_id.model_dump(),
        "task_id": task.model_dump(),
    }
    try:
        # A taskset of a blended run is named environment:taskset.
        name = task.taskset.rpartition(":")[2]
        lent = request.task.task_input.sampler
        [result] = await host.run(name, task.task_id, lent, size=1)
    except BusyError as error:
        return {**answer, "failure": _describe_failure(str(error), "admission")}
    except TooLongError as error:
        return {**answer, "failure": _describe_failure(str(error), "agent", "agent_timeout")}
    except ConfigError as error:
        return {**answer, "failure": _describe_failure(str(error), "admission", terminal=True)}
    if result.failure is not None:
        return {**answer, "failure": _failure(result.failure)}
    return {**answer, "result": _result(result)}


def _failure(failure: Failure) -> dict[str, Any]:
    kind, stage = _KINDS.get(failure.cause, ("agent_run_error", "agent"))
    return _describe_failure(failure.message, stage, kind)


def _describe_failure(
    reason: str, stage: str, kind: str | None = None, *, terminal: bool = False
) -> dict[str, Any]:
    failure = {"failure_reason": reason[:2000], "stage": stage, "terminal": terminal}
    return failure if kind is None else {**failure, "failure_kind": kind}


def _result(result: RolloutResult) -> dict[str, Any]:
    """Write a result: the reward at the top, the last trained branch as a response of their API."""
    written = write_result(result)
    # Numbers at the top are aggregated: all but the response is sent back when a run has ended.
    del written["failure"], written["number"]
    large = {name: written.pop(name) for name in ("branches", "messages")}
    branch = max((turn.branch for turn in result.turns if turn.trained), default=-1)
    last = [turn for turn in result.turns if turn.branch == branch]
    numbers = {
        name: score["value"]
        for name, score in result.scores.items()
        if isinstance(score.get("value"), int | float)
    }
    opening = [write_message(each) for each in last[0].messages] if last else []
    return {
        **{f"score_{name}": value for name, value in numbers.items()},
        **written,
        "responses_create_params": {
            "input": [{"role": each["role"], "content": each["content"]} for each in opening]
        },
        "response": {
            "id": f"resp_{result.task}_{result.sample_id}",
            "object": "response",
            "created_at": 0,
            "model": result.task,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "output": [item for place, _ in enumerate(last) for item in _items(last, place)],
            **large,
        },
    }


def _items(turns: Sequence[SampledTurn], place: int) -> list[dict[str, Any]]:
    """Write a turn, with what the tools answered to the one before it, as output items."""
    turn = turns[place]
    known = 0 if place == 0 else len(turns[place - 1].messages) + 1
    new = [] if place == 0 else [write_message(each) for each in turn.messages[known:]]
    items: list[dict[str, Any]] = [
        {
            "type": "function_call_output",
            "call_id": each["tool_call_id"],
            "output": each["content"],
        }
        if each["role"] == "tool"
        else {"type": "message", "role": each["role"], "content": each["content"]}
        for each in new
    ]
    reply = write_message(turn.reply)
    calls = reply.get("tool_calls", [])
    if reply["content"] or not calls:
        items.append(
            {
                "id": f"msg_{place}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": reply["content"], "annotations": []}],
            }
        )
    items += [
        {"type": "function_call", "call_id": each["id"], **each["function"]} for each in calls
    ]
    if turn.trained:  # as their model servers do, the last item of a call carries its tokens
        items[-1] |= {
            "prompt_token_ids": list(turn.prompt_tokens),
            "generation_token_ids": list(turn.tokens),
            "generation_log_probs": list(turn.logprobs),
        }
    return items


def aggregate(responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the numbers of rollouts, by task and over all; masked ones have no valid reward."""
    measured = [each for each in responses if not each.get("mask_sample")]
    by_task: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for each in measured:
        by_task[_task_index(each)].append(each)
    overall = _summary(measured)
    return {
        "group_level_metrics": [
            {TASK_INDEX: index, "num_rollouts": len(group), **_summary(group)}
            for index, group in sorted(by_task.items())
        ],
        "agent_metrics": overall,
        "key_metrics": {name: value for name, value in overall.items() if name == "mean/reward"},
        "repeat_level_metrics": [],
    }


def _task_index(response: Mapping[str, Any]) -> int:
    index = response.get(TASK_INDEX, 0)
    if not isinstance(index, int):
        raise ConfigError(f"{TASK_INDEX} is a number, not {index!r:.40}")
    return index


def _summary(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for each in responses:
        for name, value in each.items():
            if isinstance(value, int | float) and not name.startswith("_"):
                if not -1e300 < value < 1e300:
                    raise ConfigError(f"{name} is {value!r:.40}, which cannot be summarised")
                found[name].append(float(value))
    summary: dict[str, float] = {}
    for name, values in found.items():
        summary |= {
            f"mean/{name}": statistics.fmean(values),
            f"max/{name}": max(values),
            f"min/{name}": min(values),
            f"median/{name}": statistics.median(values),
            f"std/{name}": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
    return summary
