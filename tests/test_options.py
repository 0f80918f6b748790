"""Every option is declared once: signatures, builder, commands and pages follow the declaration."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, ForwardRef

import chz
import click
import pytest
from click.testing import CliRunner
from inspect_ai import Task
from inspect_ai.util import TokenLimit
from tests.rl.policies import renderer
from tests.tasks.test_samples import task

from inspect_tinker_plugin import InspectRLDatasetBuilder, as_rl_dataset
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import (
    DatasetKeywords,
    DatasetOptions,
    declared_options,
    read_token_limit,
)

ROOT = Path(__file__).parents[1]
OPTIONS = {each.name: each for each in declared_options()}


def test_the_keywords_for_type_checkers_are_the_declared_options() -> None:
    keywords = {
        name: each.__forward_arg__ if isinstance(each, ForwardRef) else str(each)
        for name, each in DatasetKeywords.__annotations__.items()
    }
    assert keywords == {each.name: each.annotation for each in OPTIONS.values()}


@pytest.mark.parametrize("function", [as_rl_dataset, getattr(Task, "as_rl_dataset")])  # noqa: B009
def test_signatures_and_docstrings_name_every_option(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    for option in OPTIONS.values():
        assert parameters[option.name].default == option.default
        assert parameters[option.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{option.name}: {option.help}" in function.__doc__


def test_the_builder_has_a_field_for_every_option() -> None:
    of_builder = chz.chz_fields(InspectRLDatasetBuilder)
    own_default = {"shuffle", "model_roles", "side_models", "monitor_penalty"}
    own_sentence = {"log_dir"}
    for option in OPTIONS.values():
        field = of_builder[option.name]
        if option.name not in own_default:
            assert field._default == option.default, option.name
        if option.name not in own_sentence:
            assert field._doc == option.help, option.name


def test_the_builder_hands_every_option_on() -> None:
    builder: Any = InspectRLDatasetBuilder
    given: dict[str, Any] = {
        "limit": 3,
        "on_error": {"scorer": -1},
        "cost_limit": 0.5,
        "score_on_error": True,
        "max_turns": 4,
        "log_dir": "/logs",
    }
    made = builder(task="t", model_name="m", options={"on_error": -1}, **given)
    options = made.dataset_options()
    assert (options.limit, options.max_turns, options.cost_limit) == (3, 4, 0.5)
    assert options.on_error == -1, "what `options` holds wins, and takes nothing else away"
    assert options.score_on_error is True
    assert str(options.log_dir) == "/logs/train"
    for each in fields(DatasetOptions):
        assert hasattr(made, each.name)


def flags(command: str) -> dict[str, click.Option]:
    made = rl.get_command(click.Context(rl), command)
    assert made is not None
    return {str(each.name): each for each in made.params if isinstance(each, click.Option)}


@pytest.mark.parametrize("command", sorted(set(rl.commands) - {"plugins"}))
def test_commands_have_the_options_that_apply_to_them(command: str) -> None:
    of_command = flags(command)
    for option in OPTIONS.values():
        if command not in option.commands:
            continue
        assert option.name in of_command, f"{command} has no option for {option.name}"
        assert (of_command[option.name].help or "").startswith(option.help.rstrip("."))


def test_train_has_every_option_that_a_rollout_has() -> None:
    assert not {
        each.name
        for each in OPTIONS.values()
        if "rollout" in each.commands and "train" not in each.commands
    } - {"log_dir"}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_page_of_options_has_a_row_for_every_option(name: str) -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{name}` \|", text, re.MULTILINE)


def test_a_misspelt_option_is_met_with_a_suggestion() -> None:
    wrong: dict[str, Any] = {"group_sise": 2}
    with pytest.raises(TypeError, match=r"argument 'group_sise'. Did you mean group_size"):
        as_rl_dataset(task(), renderer(), **wrong)
    builder: Any = InspectRLDatasetBuilder
    with pytest.raises(ConfigError, match="Did you mean group_size"):
        builder(task="t", model_name="m", options=wrong).dataset_options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shuffle", "yes"),
        ("score_on_error", "x"),
        ("max_sandboxes", 0),
        ("batch_size", None),
        ("context_window", True),
        ("cost_limit", float("nan")),
        ("cost_limit", "1"),
        ("cost_limit", False),
        ("message_limit", -1),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be"):
        as_rl_dataset(task(), renderer(), **options)


def test_limits_may_be_zero_as_in_an_eval() -> None:
    names = [f"{each}_limit" for each in ("message", "token", "time", "working", "cost")]
    DatasetOptions(**dict.fromkeys(names, 0))  # type: ignore[arg-type]
    for name in names:
        flag = flags("train")[name]
        assert flag.type_cast_value(click.Context(rl), "0") in (0, "0"), name


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (7, (7, "all")),
        ("0", (0, "all")),
        ("500k", (500_000, "all")),
        ("output:1m", (1_000_000, "output")),
        ("(input*0.1)+output:2", (2, "(input*0.1)+output")),
        (TokenLimit(tokens=3, type="output"), (3, "output")),
    ],
)
def test_a_token_limit_is_what_inspect_takes(given: Any, read: tuple[int, str]) -> None:
    assert read_token_limit(given) == read


@pytest.mark.parametrize("given", [True, 1.5, -1, "-1", "many", "output:", "cost:3"])
def test_what_inspect_does_not_take_is_no_token_limit(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"token[_ ]limit"):
        DatasetOptions(token_limit=given)
    done = CliRunner().invoke(rl, ["serve", "x.py", "--token-limit", str(given)])
    assert done.exit_code == 2, done.output
    assert "--token-limit" in done.output
