"""The export of a sample, for any kind of target, metadata, files and messages."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
)
from inspect_ai.solver import generate, multiple_choice, prompt_template, system_message, use_tools
from inspect_ai.tool import ToolCall, bash
from pydantic import BaseModel
from tests.export.logged_runs import loaded

from inspect_tinker_plugin.export.options import ExportOptions
from inspect_tinker_plugin.export.pipeline import ExportReport, export_task
from inspect_tinker_plugin.tasks.reference import ResolvedTask

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY"
    "42YAAAAASUVORK5CYII="
)


async def exported(
    task: Task, folder: Path, options: ExportOptions | None = None
) -> list[dict[str, Any]]:
    await export(task, folder, options)
    rows = loaded(folder)
    assert list(rows[0]) == ["id", "prompt", "answer", "info", "task", "tools"]
    return rows


async def export(task: Task, folder: Path, options: ExportOptions | None = None) -> ExportReport:
    return await export_task(ResolvedTask(task, None), folder, options)


async def test_the_prompt_is_what_the_solver_would_send_first(tmp_path: Path) -> None:
    task = Task(
        name="sums",
        dataset=[Sample(id=7, input="1+1", target="2")],
        solver=[system_message("Be brief."), prompt_template("Solve: {prompt}"), generate()],
    )
    assert await exported(task, tmp_path / "out") == [
        {
            "id": "7",
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Solve: 1+1"},
            ],
            "answer": "2",
            "info": json.dumps(
                {
                    "sample_id": 7,
                    "target": "2",
                    "choices": None,
                    "metadata": {},
                    "files": [],
                    "sandbox": None,
                },
                separators=(",", ":"),
            ),
            "task": "sums",
            "tools": "[]",
        }
    ]


async def test_tools_are_described_as_chat_templates_expect_them(tmp_path: Path) -> None:
    task = Task(dataset=[Sample(input="x")], solver=[use_tools(bash()), generate()])
    (row,) = await exported(task, tmp_path / "out")
    (tool,) = json.loads(row["tools"])
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "bash"
    assert tool["function"]["parameters"]["required"] == ["command"]


@pytest.mark.parametrize(
    ("target", "answer"),
    [("a", "a"), ("", ""), (["a"], "a"), (["a", "b"], '["a","b"]'), ([], "")],
    ids=["text", "none", "one", "several", "empty"],
)
async def test_targets_of_every_kind_become_one_string(
    tmp_path: Path, target: str | list[str], answer: str
) -> None:
    (row,) = await exported(Task(dataset=[Sample(input="x", target=target)]), tmp_path / "out")
    assert row["answer"] == answer
    assert json.loads(row["info"])["target"] == target


class Place(BaseModel):
    city: str


@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow"])
async def test_samples_that_differ_in_metadata_files_and_targets_share_a_schema(
    tmp_path: Path, format: Any
) -> None:
    day = datetime(2024, 5, 1, 12, tzinfo=UTC)
    task = Task(
        dataset=[
            Sample(input="a", target="2024-05-01", metadata={"when": day, "n": 1}),
            Sample(
                input="b", target=["x", "y"], metadata={"n": "one", "where": Place(city="Rome")}
            ),
            Sample(input="c", metadata={"n": [1, {"d": date(2024, 5, 1)}], "bad": float("nan")}),
            Sample(input="d", files={"one.txt": "1"}, metadata={"path": Path("a/b")}),
            Sample(input="e", files={"two.txt": "2"}, choices=["p", "q"]),
        ]
    )
    rows = await exported(task, tmp_path / "out", ExportOptions(format=format))
    metadata = [json.loads(row["info"])["metadata"] for row in rows]
    assert metadata[0] == {"when": "2024-05-01T12:00:00Z", "n": 1}
    assert metadata[1] == {"n": "one", "where": {"city": "Rome"}}
    assert metadata[2] == {"n": [1, {"d": "2024-05-01"}], "bad": "NaN"}
    assert [row["id"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0]["answer"] == "2024-05-01"
    assert json.loads(rows[4]["info"])["files"] == ["two.txt"]


def few_shot() -> list[ChatMessage]:
    return [
        ChatMessageSystem(content="Use the tool."),
        ChatMessageUser(content="How many?"),
        ChatMessageAssistant(
            content=[ContentReasoning(reasoning="Count."), ContentText(text="Counting.")],
            tool_calls=[ToolCall(id="c1", function="count", arguments={"of": ["a", 1]})],
        ),
        ChatMessageTool(content="3", tool_call_id="c1", function="count"),
        ChatMessageUser(content="And now?"),
    ]


@pytest.mark.parametrize("name", ["FILE_BYTES", "CHUNK_ROWS"])
@pytest.mark.parametrize("format", ["parquet", "jsonl", "arrow"])
async def test_tool_calls_in_a_prompt_are_kept_and_every_file_gets_their_schema(
    tmp_path: Path,
    format: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"inspect_tinker_plugin.export.folder.{name}", 1)
    plain = [Sample(input=f"plain {number}") for number in range(3)]
    task = Task(dataset=[*plain, Sample(input=few_shot()), *plain])
    rows = await exported(task, tmp_path / "out", ExportOptions(format=format))
    assert len(list((tmp_path / "out").glob("train-*"))) == (7 if name == "FILE_BYTES" else 1)
    assert len(rows) == 7
    empty = {"reasoning_content": None, "tool_calls": None, "tool_call_id": None, "name": None}
    assert rows[0]["prompt"] == [{"role": "user", "content": "plain 0", **empty}]
    assert rows[3]["prompt"][2:4] == [
        {
            "role": "assistant",
            "content": "Counting.",
            "reasoning_content": "Count.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "count", "arguments": '{"of":["a",1]}'},
                }
            ],
            "tool_call_id": None,
            "name": None,
        },
        {
            "role": "tool",
            "content": "3",
            "reasoning_content": None,
            "tool_calls": None,
            "tool_call_id": "c1",
            "name": "count",
        },
    ]


async def test_what_a_column_cannot_carry_is_a_failure_of_that_sample_only(tmp_path: Path) -> None:
    image = ChatMessageUser(content=[ContentText(text="see"), ContentImage(image=PIXEL)])
    task = Task(
        dataset=[
            Sample(id="image", input=[image]),
            Sample(id="surrogate", input="\ud800"),
            Sample(id="fine", input="é\u2028\x00"),
        ]
    )
    report = await export(task, tmp_path / "out")
    assert [row["prompt"][0]["content"] for row in loaded(tmp_path / "out")] == ["é\u2028\x00"]
    reasons = {failure.id: failure.reason for failure in report.failures}
    assert reasons == {
        "image": "it has content of type 'image' in a user message; an export carries text only.",
        "surrogate": "its text cannot be written as UTF-8 (surrogates not allowed).",
    }


@pytest.mark.parametrize(
    ("target", "right"),
    [("A", [0]), ("b, D", [1, 3]), ("AC", [0, 2]), ("2", [27]), ("Apples", []), ("DAB", [])],
)
async def test_the_answer_follows_choices_that_the_solver_shuffles(
    target: str, right: list[int], tmp_path: Path
) -> None:
    """A target that is the text of a choice, or another text, stays as it is."""
    choices = ["Apple", "Banana", "DAB", *(f"choice {n}" for n in range(25))]
    samples = [Sample(input=f"{n}?", choices=choices, target=target) for n in range(8)]
    solver = multiple_choice(multiple_correct=True, shuffle=Random(1))
    rows = await exported(Task(dataset=samples, solver=solver), tmp_path / "out")
    for row in rows:
        named = re.findall(r"\d+|[A-Za-z]", row["answer"]) if right else []
        shown = [line.partition(") ") for line in row["prompt"][0]["content"].splitlines()]
        by_name = {name: choice for name, _, choice in shown}
        assert [by_name[name] for name in named] == [choices[place] for place in right]
    assert (len({row["answer"] for row in rows}) > 1) is bool(right)
    assert right or rows[0]["answer"] == target
