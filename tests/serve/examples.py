"""The example tasks that clients of others run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task

from inspect_tinker_plugin import TaskRef

FOLDER = Path(__file__).parents[2] / "example_tasks"
OPTIONS: dict[str, Any] = {"group_size": 2, "message_limit": 8, "score_sandbox": None}
EXAMPLES = [
    pytest.param("science_quiz", {}, id="single turn"),
    pytest.param("log_search", {"sandbox": "local"}, id="react with tools"),
    pytest.param("write_function", {"sandbox": "local"}, id="sandbox"),
    pytest.param("travel_desk", {}, id="several agents"),
]


def example(name: str, args: dict[str, Any]) -> Task:
    return TaskRef(f"{FOLDER / name}.py@{name}", args).resolve()
