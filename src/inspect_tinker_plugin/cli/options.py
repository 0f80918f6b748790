"""Options that commands share, written and read as ``inspect eval`` does."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.options import (
    LEAST,
    Option,
    declared_options,
    options_of,
    read_token_limit,
)

if TYPE_CHECKING:
    from inspect_ai.solver import Solver

    from inspect_tinker_plugin.tasks.reference import ResolvedTask

Command = TypeVar("Command", bound=Callable[..., Any])


def _adding(*decorators: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


task_arguments = _adding(
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
)
"""Adds the options for the arguments of a task."""

task_options = _adding(click.argument("task", metavar="TASK"), task_arguments)
"""Adds the argument for a task, and the options for its arguments."""


def test_task_options(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--test-task``, with this help, and ``--test-arg``."""
    return _adding(
        click.option("--test-task", metavar="TASK", help=help),
        click.option(
            "--test-arg",
            "test_args",
            multiple=True,
            metavar="KEY=VALUE",
            help="Arguments of the test task.",
        ),
    )


class Number(click.FloatRange):
    """A number within bounds, as ``click.FloatRange``, which also takes ``nan``."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


renderer_options = _adding(
    click.option("--tokenizer", metavar="NAME", help="Tokenizer, if not the model's own."),
    click.option("--renderer", metavar="NAME", help="Renderer, if not the model's own."),
)
"""Adds the tokenizer and the renderer of the policy."""

sampling_options = _adding(
    renderer_options,
    click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True),
    click.option("--temperature", type=Number(0), default=1.0, show_default=True),
)
"""Adds these, and how the policy is sampled."""


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def listening_options(*, port: int, sent_as: str) -> Callable[[Command], Command]:
    """Return a decorator that adds where a server listens, and the token that clients send it."""
    return _adding(
        click.option("--port", type=click.IntRange(0, 65535), default=port, show_default=True),
        click.option(
            "--host",
            default=LOOPBACK[0],
            show_default=True,
            help="Address to listen at; any other than this machine's own needs --token-file.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help=f"File with the token that clients send as {sent_as}.",
        ),
    )


def price_option(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--price``, a file with prices."""
    return click.option("--price", type=click.Path(path_type=Path), metavar="FILE", help=help)


def output_option(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds ``--output``, the folder that the command writes."""
    return click.option(
        *("--output", "-o"),
        metavar="DIR",
        required=True,
        type=click.Path(path_type=Path),
        help=help,
    )


def load_task(choices: dict[str, Any], roles: Mapping[str, Any] | None = None) -> ResolvedTask:
    """Take a command's task and its arguments out of its choices, and make the task.

    Args:
        choices: The command's choices.
        roles: Models by role, which the task may ask for while it is made.
    """
    from inspect_tinker_plugin.tasks.reference import resolve_task

    args = parse_args(choices.pop("task_args"), choices.pop("task_config"))
    return resolve_task(choices.pop("task"), args, roles=roles)


def dataset_options(
    name: str, *, hints: Mapping[str, str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Add every option of a dataset that applies to a command, as it is declared.

    Args:
        name: The command.
        hints: Text that the command's help adds to an option's sentence, in parentheses.
        defaults: The command's own defaults, by option.
    """
    decorators: list[Any] = []
    for option in declared_options():
        if name in option.commands:
            hint = (hints or {}).get(option.name)
            text = option.help if hint is None else f"{option.help.rstrip('.')} ({hint})."
            decorators += _options(option, text, defaults.get(option.name, option.default))
    return _adding(*decorators)


def field_options(
    of: type, written: Mapping[str, Mapping[str, Any]]
) -> Callable[[Command], Command]:
    """Add all options that are declared as fields of a dataclass.

    Args:
        of: The dataclass.
        written: How they are written on the command line if their type does not say it.
    """
    decorators: list[Any] = []
    for each in options_of(of):
        decorators += _options(each, each.help, each.default, written.get(each.name, {}))
    return _adding(*decorators)


def dataset_choices(
    name: str, choices: dict[str, Any], *, limit: int | None = None
) -> dict[str, Any]:
    """Take the options of a dataset out of a command's choices, as ``as_rl_dataset`` takes them.

    Args:
        name: The command.
        choices: Its choices.
        limit: How many samples it takes if no option says which; all of them if not given.
    """
    names = [option.name for option in declared_options() if name in option.commands]
    make_solver = solver_maker(choices)
    del choices["solver_args"]
    chosen = {each: choices.pop(each) for each in names}
    chosen["solver"] = None if make_solver is None else make_solver()
    if chosen["sample_id"] is None and chosen["limit"] is None:
        chosen["limit"] = limit
    return chosen


def solver_maker(choices: Mapping[str, Any]) -> Callable[[], Solver] | None:
    """Return a function that makes the solver of ``--solver`` and ``-S``, if there is one."""
    name, args = choices["solver"], parse_args(choices["solver_args"])
    if name is None:
        if args:
            raise click.UsageError("-S needs --solver.")
        return None
    from inspect_tinker_plugin.tasks.loading import create_solver

    return lambda: create_solver(name, args)


def _options(
    option: Option, help: str, default: Any, how: Mapping[str, Any] | None = None
) -> list[Any]:
    """Make the command-line options of one declared option: ``solver`` has two, all others one."""
    flag = f"--{option.name.replace('_', '-')}"
    written: dict[str, Any] = {"help": help, "default": default, "show_default": bool(default)}
    written |= _PARAMETERS.get(option.name, {}) if how is None else how
    if "flag" in written:
        flag = written.pop("flag")
    if option.annotation in _TYPES:
        written.setdefault("type", _TYPES[option.annotation])
    elif option.annotation == "bool":
        written.setdefault("is_flag", True)
    made = [click.option(flag, option.name, **written)]
    if option.name == "solver":
        made.append(
            click.option(
                "-S",
                "solver_args",
                multiple=True,
                metavar="KEY=VALUE",
                help="One or more solver arguments (e.g. -S arg=value).",
            )
        )
    return made


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
        text = Path(path).read_text(encoding="utf-8")
        try:
            config = json.loads(text)  # YAML has other numbers and escapes
        except ValueError:
            config = yaml.safe_load(text)
    except OSError as error:
        raise click.UsageError(
            f"the config file {path} cannot be read: {error.strerror}."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"the config file {path} is neither YAML nor JSON.") from error
    if not isinstance(config, dict):
        raise click.UsageError(f"the config file {path} does not hold keys with values.")
    return config


def _parse_sandbox(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> str | tuple[str, str] | None:
    """Split ``type:config``."""
    if text is None or ":" not in text:
        return text
    kind, _, config = text.partition(":")
    return kind, config


def parse_roles(ctx: click.Context, param: click.Parameter, pairs: Sequence[str]) -> dict[str, Any]:
    """Read the models of roles; of several models, blanks and a trailing comma mean nothing."""

    def names(several: list[Any]) -> list[Any]:
        named = [each.strip() if isinstance(each, str) else each for each in several]
        return [each for each in named if each != ""]

    roles = parse_args(pairs)
    return {
        role: names(bound) if isinstance(bound, list) else bound for role, bound in roles.items()
    }


def _parse_several(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> list[str] | None:
    return list(texts) or None


def _parse_side_models(
    ctx: click.Context, param: click.Parameter, pairs: Sequence[str]
) -> dict[str, str]:
    rules = {}
    for pair in pairs:
        name, equals, what = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} is not NAME=WHAT.")
        rules[name] = what
    return rules


def _parse_penalties(
    ctx: click.Context, param: click.Parameter, pairs: Sequence[str]
) -> dict[str, float]:
    penalties = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        try:
            penalties[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise click.BadParameter(f"{pair!r} is not NAME=NUMBER.")
    return penalties


def _parse_on_error(
    ctx: click.Context, param: click.Parameter, texts: Sequence[str]
) -> str | float | dict[str, str | float]:
    """Read ``--on-error``: one rule for every cause, or repeated ``cause=rule``."""
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


def _parse_token_limit(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> int | str | None:
    if text is None:
        return None
    try:
        tokens, counted = read_token_limit(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return tokens if counted == "all" else text


def _parse_ids(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str] | None:
    """Read ids and patterns, or a file with one exact id per line."""
    if text is None or not text.startswith("@"):
        return None if text is None else [id.strip() for id in text.split(",") if id.strip()]
    try:
        lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"the file {text[1:]!r} cannot be read: {error}") from error
    ids = [glob.escape(line.strip()) for line in lines if line.strip()]
    if not ids:
        raise click.BadParameter(f"the file {text[1:]!r} has no ids.")
    return ids


def _parse_shuffle(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> bool | int | None:
    """Return a seed, True for a random order, or None for the dataset's order."""
    if text is None or text.lower() in ("false", "no", "0"):
        return None
    if text.lower() in ("true", "yes"):
        return True
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"expected a seed, not {text!r}.") from None


_TYPES: dict[str, Any] = {
    "int": click.IntRange(1),
    "int | None": click.IntRange(1),
    "float": Number(0, min_open=True),
    "float | None": Number(0, min_open=True),
}
"""How a value of a declared type is written on a command line."""

_PARAMETERS: dict[str, dict[str, Any]] = {
    "limit": {"metavar": "N|FROM-TO", "callback": _parse_limit},
    "sample_id": {"metavar": "IDS|@FILE", "callback": _parse_ids},
    "sample_shuffle": {
        "is_flag": False,
        "flag_value": "true",
        "metavar": "[SEED]",
        "callback": _parse_shuffle,
    },
    "shuffle": {"flag": "--shuffle/--no-shuffle"},
    "seed": {"type": int},
    "sampler": {"metavar": "EXPR"},
    "sampler_logs": {
        "multiple": True,
        "default": (),
        "metavar": "LOGS",
        "callback": _parse_several,
    },
    **{name: {"type": click.IntRange(least)} for name, least in LEAST.items()},
    "token_limit": {"metavar": "TOKENS", "callback": _parse_token_limit},
    "cost_limit": {"type": Number(0)},
    "score_sandbox": {"type": click.Choice(["same", "fresh"])},
    "score_files": {
        "flag": "--score-file",
        "multiple": True,
        "default": (),
        "metavar": "PATTERN",
        "callback": _parse_several,
    },
    "solver": {"metavar": "NAME"},
    "sandbox": {"metavar": "TYPE[:CONFIG]", "callback": _parse_sandbox},
    "model_roles": {
        "flag": "--model-role",
        "multiple": True,
        "default": (),
        "metavar": "ROLE=MODEL",
        "callback": parse_roles,
    },
    "side_models": {
        "flag": "--side-model",
        "multiple": True,
        "default": (),
        "metavar": "NAME=WHAT",
        "callback": _parse_side_models,
    },
    "tool_executor": {"metavar": "NAME"},
    "reward": {"metavar": "EXPR"},
    "group_reward": {"metavar": "EXPR"},
    "sentinel": {"metavar": "NAME|FILE"},
    "monitor_penalty": {
        "multiple": True,
        "default": (),
        "metavar": "NAME=NUMBER",
        "callback": _parse_penalties,
    },
    "on_error": {
        "multiple": True,
        "default": (),
        "show_default": False,
        "metavar": "raise|NUMBER|CAUSE=NUMBER",
        "callback": _parse_on_error,
    },
    "log_dir": {"metavar": "DIR"},
}
"""How options are written if their type does not say it."""
