"""The parts of Inspect's public API that the package depends on: a change fails here first."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import inspect_ai
import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, EvalSampleLimit
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import SampleScore, Score, value_to_float
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolCall, ToolInfo
from inspect_ai.util import SandboxEnvironment
from packaging.requirements import Requirement
from packaging.version import Version

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.inspect_internals.releases import TRIED

ROOT = Path(__file__).parents[2]


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "needed"),
    [
        (
            Task,
            {"dataset", "setup", "solver", "cleanup", "scorer", "model", "model_roles", "sandbox"}
            | {"approval", "config", "message_limit", "token_limit", "time_limit"}
            | {"working_limit", "cost_limit", "epochs", "name", "metadata"},
        ),
        (
            inspect_ai.eval,
            {"model", "model_roles", "task_args", "solver", "sandbox", "sample_id", "limit"}
            | {"log_dir", "display", "score_on_error"},
        ),
        (get_model, {"model", "config", "memoize"}),
        (react, {"prompt", "tools", "attempts", "submit", "on_continue"}),
        (value_to_float, {"correct", "incorrect", "partial", "noanswer"}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_parameters_that_we_pass_by_name(function: Callable[..., Any], needed: set[str]) -> None:
    assert needed <= parameters(function)


def test_a_model_provider_is_asked_for_this() -> None:
    names = list(inspect.signature(ModelAPI.generate).parameters)
    assert names == ["self", "input", "tools", "tool_choice", "config"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("exec", {"cmd", "input", "cwd", "env", "user", "timeout"}),
        ("read_file", {"file", "text"}),
        ("write_file", {"file", "contents"}),
        ("task_init", {"task_name", "config"}),
        ("task_cleanup", {"task_name", "config", "cleanup"}),
        ("sample_init", {"task_name", "config", "metadata"}),
        ("sample_cleanup", {"task_name", "config", "environments", "interrupted"}),
        ("cli_cleanup", {"id"}),
    ],
)
def test_a_sandbox_is_asked_for_this(method: str, expected: set[str]) -> None:
    assert expected <= parameters(getattr(SandboxEnvironment, method))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (Sample, {"input", "choices", "target", "id", "metadata", "sandbox", "files", "setup"}),
        (Score, {"value", "answer", "explanation", "metadata"}),
        (SampleScore, {"score", "sample_id", "scorer"}),
        (EvalSampleLimit, {"type", "limit"}),
        (EvalSample, {"id", "epoch", "messages", "output", "scores", "store", "error", "limit"}),
        (ModelOutput, {"model", "choices", "usage", "error"}),
        (ModelUsage, {"input_tokens", "output_tokens", "total_tokens"}),
        (ChatMessageAssistant, {"content", "tool_calls", "source", "model"}),
        (ChatMessageTool, {"content", "tool_call_id", "function", "error"}),
        (ToolInfo, {"name", "description", "parameters"}),
        (GenerateConfig, {"max_tokens", "temperature", "stop_seqs", "num_choices"}),
        (GenerateConfig, {"max_connections", "adaptive_connections"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fields_that_we_read_or_fill(model: Any, fields: set[str]) -> None:
    assert fields <= set(model.model_fields)


def test_a_tool_call_can_say_that_it_did_not_parse() -> None:
    assert {"id", "function", "arguments", "parse_error"} <= parameters(ToolCall)


def test_a_state_has_what_an_episode_reports() -> None:
    state = TaskState(model="m", sample_id=1, epoch=1, input="x", messages=[])  # type: ignore[arg-type]  # Inspect's alias of str
    for name in ("messages", "output", "store", "metadata", "scores", "target", "tools"):
        assert hasattr(state, name)


def test_limits_that_an_episode_can_hit() -> None:
    known = set(get_args(EvalSampleLimit.model_fields["type"].annotation))
    assert {"message", "token", "time", "working", "cost", "operator", "custom"} <= known


def declared(name: str) -> Requirement:
    """Return the project's requirements in this tree: installed metadata may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    return next(found for found in requirements if found.name == name)


def test_the_supported_range_is_the_declared_one_and_holds_the_installed_release() -> None:
    wanted = declared("inspect-ai").specifier
    assert str(wanted) == str(Requirement(f"x{inspect_internals.SUPPORTED_INSPECT}").specifier)
    assert version("inspect-ai") in wanted


@pytest.mark.parametrize("name", TRIED)
def test_the_declared_range_starts_with_the_oldest_release_that_was_tried(name: str) -> None:
    oldest, newest = TRIED[name]
    wanted = declared(name).specifier
    assert f">={oldest}" in str(wanted)
    assert newest in wanted


def test_the_fast_paths_are_on_for_each_release_in_which_they_do_the_same() -> None:
    known = Version(version("inspect-ai")) >= Version("0.3.281")
    assert inspect_internals.knows_model_calls() == known
