"""Options that commands share, written and read as ``inspect eval`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def task_options(command: Command) -> Command:
    """Options that say which task, with which arguments and solver."""
    for option in reversed(
        (
            click.argument("task", metavar="TASK"),
            click.option(
                "-T",
                "task_args",
                multiple=True,
                metavar="KEY=VALUE",
                help="One or more task arguments (e.g. -T arg=value).",
            ),
            click.option(
                "--task-config",
                metavar="FILE",
                help="YAML or JSON config file with task arguments.",
            ),
            click.option(
                "--solver",
                metavar="NAME",
                help="Solver to execute (overrides the task's solver).",
            ),
            click.option(
                "-S",
                "solver_args",
                multiple=True,
                metavar="KEY=VALUE",
                help="One or more solver arguments (e.g. -S arg=value).",
            ),
            click.option(
                "--sandbox",
                metavar="TYPE[:CONFIG]",
                help="Sandbox environment type (with optional config file), e.g. 'docker' or "
                "'docker:compose.yml'.",
            ),
            click.option(
                "--model-role",
                "model_roles",
                multiple=True,
                metavar="ROLE=MODEL",
                help="Model of a role, e.g. --model-role grader=openai/gpt-4o.",
            ),
        )
    ):
        command = option(command)
    return command


def sample_options(command: Command) -> Command:
    """Options that choose samples."""
    for option in reversed(
        (
            click.option(
                "--limit",
                metavar="N|FROM-TO",
                callback=_parse_limit,
                help="Limit samples, e.g. 10 or 10-20.",
            ),
            click.option(
                "--sample-id",
                metavar="IDS",
                callback=_parse_ids,
                help="Only specific sample(s): a comma separated list of ids or patterns.",
            ),
            click.option(
                "--sample-shuffle",
                is_flag=False,
                flag_value="true",
                metavar="[SEED]",
                callback=_parse_shuffle,
                help="Shuffle the order of samples (pass a seed to make it deterministic).",
            ),
        )
    ):
        command = option(command)
    return command


def parse_args(pairs: Sequence[str], config: str | None = None) -> dict[str, Any]:
    """Read ``key=value`` pairs over a config file.

    Values are YAML, and ``a,b`` is a list of strings. Keys may have hyphens.

    Raises:
        click.UsageError: A pair has no ``=``, or a file or value cannot be read.
    """
    import yaml

    args = _config_file(config) if config is not None else {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{pair!r} is not of the form key=value.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise click.UsageError(f"the value of {key} is not YAML: {text!r}.") from error
        if isinstance(value, str) and "," in value:
            value = value.split(",")
        args[key.replace("-", "_")] = value
    return args


def _config_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise click.UsageError(
            f"the config file {path} cannot be read: {error.strerror}."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"the config file {path} is neither YAML nor JSON.") from error
    if not isinstance(config, dict):
        raise click.UsageError(f"the config file {path} does not hold keys with values.")
    return config


def parse_sandbox(text: str | None) -> str | tuple[str, str] | None:
    """Split ``type:config``."""
    if text is None or ":" not in text:
        return text
    kind, _, config = text.partition(":")
    return kind, config


def parse_on_error(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> str | float | dict[str, str | float]:
    """Read ``--on-error``: one rule for every cause, or ``cause=rule`` as often as needed."""
    rules: dict[str, str | float] = {}
    for text in texts:
        cause, equals, rule = text.rpartition("=")
        if equals and not cause:
            raise click.BadParameter(f"{text!r} names no cause.")
        if not equals and len(texts) > 1:
            raise click.BadParameter(f"{text!r} is for every cause and goes with no other rule.")
        if cause in rules:
            raise click.BadParameter(f"{cause!r} is given twice.")
        rules[cause] = _parse_rule(rule)
    if not rules:
        return "raise"
    return rules.get("", rules)


def _parse_rule(text: str) -> str | float:
    if text == "raise":
        return text
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"expected 'raise' or a number, not {text!r}.") from None


def _parse_limit(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> int | tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    try:
        numbers = (int(first), int(last)) if dash else (1, int(first))
    except ValueError:
        raise click.BadParameter(
            f"expected a number or a range like 10-20, not {text!r}."
        ) from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise click.BadParameter(f"{text!r} leaves no sample.")
    return (numbers[0] - 1, numbers[1]) if dash else numbers[1]


def _parse_ids(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str] | None:
    return None if text is None else [id.strip() for id in text.split(",") if id.strip()]


def _parse_shuffle(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> bool | int | None:
    """Return a seed, True for an order of its own, or None for the dataset's order."""
    if text is None or text.lower() in ("false", "no"):
        return None
    if text.lower() in ("true", "yes"):
        return True
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"expected a seed, not {text!r}.") from None
