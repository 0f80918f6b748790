"""Models of roles are read as `inspect eval --model-role` reads them."""

from __future__ import annotations

from typing import Any

import click
import pytest
from inspect_ai.model import GenerateConfig

from inspect_tinker_plugin.cli.options import parse_roles
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.episode.task import resolve_roles


def read_roles(written: str) -> dict[str, Any]:
    option = click.Option(["--model-role"], multiple=True, callback=parse_roles)
    return parse_roles(click.Context(click.Command("rl")), option, [written])


PLAIN: tuple[str, dict[str, float]] = ("mockllm/a", {})
WARM = ("mockllm/b", {"temperature": 0.5})


@pytest.mark.parametrize(
    ("written", "models"),
    [
        ("grader=mockllm/a", [PLAIN]),
        ("grader=mockllm/a, mockllm/a,", [PLAIN, PLAIN]),
        ("grader={model: mockllm/b, temperature: 0.5}", [WARM]),
        ('grader={"model": "mockllm/b", "temperature": 0.5, "model_args": {}}', [WARM]),
        ("grader=[mockllm/a, {model: mockllm/b, temperature: 0.5}]", [PLAIN, WARM]),
    ],
)
def test_a_role_is_written_as_for_an_eval(written: str, models: list[Any]) -> None:
    bound = resolve_roles({}, read_roles(written))["grader"]
    several = bound if isinstance(bound, list) else [bound]
    assert [(str(each), each.config.model_dump(exclude_none=True)) for each in several] == models
    assert all(each.role == "grader" for each in several)


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ({"temperature": 1}, "names no model"),
        ({"model": "mockllm/a", "warmth": 1}, "warmth"),
        ({"model": "mockllm/a", "temperature": "high"}, "temperature"),
        ({}, "names no model"),
        ([], "name a model"),
    ],
)
def test_what_names_no_model_is_refused_with_the_role(bound: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"'grader'.*{reason}"):
        resolve_roles({}, {"grader": bound})


def test_a_role_of_the_task_is_overridden() -> None:
    given = {"grader": {"model": "mockllm/b", "max_tokens": 7}}
    grader = resolve_roles({"grader": "mockllm/a"}, given)["grader"]
    assert not isinstance(grader, list)
    assert (str(grader), grader.config) == ("mockllm/b", GenerateConfig(max_tokens=7))
