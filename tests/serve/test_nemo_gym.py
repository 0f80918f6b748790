"""NeMo Gym's own rollout collection gets the tokens and rewards of a rollout.

It needs its own environment: ``make clients`` installs it and runs them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from tests.rl.policies import Words
from tests.rl.tasks import crashing, sums
from tests.serve.engine import serving
from tests.serve.lent import own
from tests.serve.server import Served, hosted
from tests.serve.test_server import CASES, sample_id

from inspect_tinker_plugin.serve import RolloutResult

COLLECT = Path(os.environ.get("NEMO_GYM", ".clients/nemo-gym")) / "bin" / "ng_collect_rollouts"

pytestmark = pytest.mark.skipif(
    not COLLECT.exists(), reason="nemo-gym is not installed: make clients"
)


async def collected(
    served: Served, task: Task, folder: Path, *, status: int = 0
) -> list[dict[str, Any]]:
    """Collect a rollout of the first sample with its command; return the rows that it wrote."""
    row = {"task_id": {"taskset": task.name, "task_id": sample_id(task)}, "task_input": {}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    host, _, port = served.url.removeprefix("http://").partition(":")
    server = {"host": host, "port": int(port), "entrypoint": "app.py"}
    config = {
        "head_server": {"host": host, "port": 1},
        "inspect_rl": {"environment_servers": {"inspect_rl": server}},
        "environment_routing_mode": "taskset",
        "environment_server_routes": {task.name: "inspect_rl"},
        "input_jsonl_fpath": str(folder / "rows.jsonl"),
        "output_jsonl_fpath": str(folder / "rollouts.jsonl"),
    }
    process = await asyncio.create_subprocess_exec(
        COLLECT.absolute(),
        cwd=folder,
        env={**os.environ, "NEMO_GYM_CONFIG_DICT": json.dumps(config)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == status, output.decode()
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def check(rows: Sequence[dict[str, Any]], expected: RolloutResult) -> None:
    [row] = rows
    assert row["reward"] == expected.reward
    assert [each["tokens"] for each in row["response"]["branches"]] == [
        each.tokens for each in expected.branches
    ]
    last = [turn for turn in expected.turns if turn.branch == len(expected.branches) - 1]
    items = [each for each in row["response"]["output"] if "generation_token_ids" in each]
    assert [each["prompt_token_ids"] for each in items] == [each.prompt_tokens for each in last]
    assert [each["generation_token_ids"] for each in items] == [each.tokens for each in last]
    assert [each["generation_log_probs"] for each in items] == [each.logprobs for each in last]


@pytest.mark.parametrize(("task", "lines"), CASES)
def test_scripted_replies_are_collected(task: Task, lines: list[str], tmp_path: Path) -> None:
    async def run() -> list[dict[str, Any]]:
        async with serving(Words(lines)) as url, hosted(task, sampler=url) as served:
            return await collected(served, task, tmp_path)

    check(asyncio.run(run()), asyncio.run(own(task, Words(lines))))


def test_a_failure_is_no_row_and_no_zero(tmp_path: Path) -> None:
    task = Task(name="t", dataset=sums(1), scorer=crashing())

    async def run() -> list[dict[str, Any]]:
        async with serving(Words(["1"])) as url, hosted(task, sampler=url) as served:
            return await collected(served, task, tmp_path, status=1)  # a run without any score

    assert asyncio.run(run()) == []
    [failure] = map(json.loads, (tmp_path / "rollouts_failures.jsonl").read_text().splitlines())
    assert failure["_ng_failure_stage"] == "verification"
    assert "the scorer is broken" in failure["_ng_failure_message"]
    assert "reward" not in failure
