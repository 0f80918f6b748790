"""Tasks: how Inspect loads, names and watches them, and how it reports bad input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from inspect_ai import Task
from inspect_ai._eval.loader import (
    create_file_tasks,
    load_file_tasks,
    load_task_spec,
    solver_from_spec,
)
from inspect_ai._eval.score import resolve_scorers
from inspect_ai._eval.task.log import resolve_eval_metrics, resolve_eval_scorers
from inspect_ai._eval.task.util import task_file, task_run_dir
from inspect_ai._util.decorator import parse_decorators
from inspect_ai._util.dotenv import init_dotenv
from inspect_ai._util.error import PrerequisiteError
from inspect_ai._util.registry import (
    is_registry_object,
    registry_find,
    registry_lookup,
    registry_params,
    registry_unqualified_name,
)
from inspect_ai.model import Model
from inspect_ai.model._model import _model_roles, active_model, active_model_context_var
from inspect_ai.model._model_config import model_roles_to_model_roles_config
from inspect_ai.scorer._metric import to_metric_specs
from inspect_ai.scorer._scorer import as_scorer_spec, unique_scorer_name
from inspect_ai.solver._solver import SolverSpec
from inspect_ai.util import registry_info

__all__ = [
    "PrerequisiteError",
    "SentinelFailure",
    "SolverSpec",
    "active_model",
    "bind_model",
    "bind_roles",
    "create_file_tasks",
    "in_one_line",
    "init_dotenv",
    "is_protocol",
    "load_file_tasks",
    "load_task_spec",
    "parse_decorators",
    "registry_find",
    "registry_lookup",
    "registry_params",
    "registry_unqualified_name",
    "resolve_scorers",
    "resolve_sentinel",
    "scoring_in_logs",
    "sentinel_solving",
    "solver_from_spec",
    "task_file",
    "task_run_dir",
    "unique_scorer_name",
    "without_markup",
]


def in_one_line(error: BaseException) -> str:
    """Return the message of an error, without line breaks and without Inspect's markup."""
    text = without_markup(str(getattr(error, "message", None) or error))
    return " ".join(text.split()).removeprefix("ERROR: ") or repr(error)


def without_markup(text: str) -> str:
    """Return a message of Inspect without the markup that it gives its own display."""
    return re.sub(r"\[/?(?:bold|italic|red|green|yellow|blue|magenta|cyan|link)\b[^]]*\]", "", text)


@contextmanager
def bind_model(model: Model) -> Iterator[None]:
    """Make a model the active one, as `inspect eval` does before it makes tasks and solvers."""
    token = active_model_context_var.set(model)
    try:
        yield
    finally:
        active_model_context_var.reset(token)


@contextmanager
def bind_roles(roles: dict[str, Model | list[Model]]) -> Iterator[None]:
    """Bind model roles, as `inspect eval` does before it makes tasks and solvers."""
    token = _model_roles.set(roles)
    try:
        yield
    finally:
        _model_roles.reset(token)


def scoring_in_logs(task: Task, model_roles: dict[str, Model | list[Model]]) -> dict[str, Any]:
    """Return the fields of an ``EvalSpec`` that `inspect score` makes scorers and judges from.

    As in an eval's log, keys of APIs are left out. A scorer that no ``@scorer`` function made
    cannot be made again: it is left out, too.
    """
    scorers = [as_scorer_spec(each) for each in task.scorer or [] if is_registry_object(each)]
    metrics = None if task.metrics is None else to_metric_specs(task.metrics)
    return {
        "scorers": resolve_eval_scorers(scorers),
        "metrics": resolve_eval_metrics(metrics),
        "model_roles": model_roles_to_model_roles_config(model_roles) or None,
    }


try:
    from inspect_ai._sentinel._config import (
        SentinelConfig,
        _is_constructed,
        _require_sentinel,
        resolve_sentinel_root,
        sentinel_config,
    )
    from inspect_ai._sentinel._context import SentinelFailure
    from inspect_ai._sentinel._scope import sentinel_solving
except ImportError:  # up to 0.3.277 there are none

    class SentinelFailure(Exception):  # type: ignore[no-redef]
        """What Inspect raises for a monitor or protocol that raised ``error``."""

        error: Exception

    def sentinel_solving() -> AbstractContextManager[None]:  # type: ignore[misc]
        """Mark nothing."""
        return nullcontext()

    def _require_sentinel() -> None:
        raise PrerequisiteError("this release of inspect-ai has no sentinels")


def resolve_sentinel(spec: Any) -> tuple[Any, Any]:
    """Make the monitors and protocols of a task; those without a protocol are only observed.

    Args:
        spec: What ``Task(sentinel=...)`` and ``--sentinel`` take, or monitors alone.

    Returns:
        The protocol at the root, and the configuration that a log states.
    """
    _require_sentinel()
    package: Any = import_module("inspect_sentinel")
    if isinstance(spec, str | SentinelConfig) or not _is_constructed(spec):
        spec = import_module("inspect_sentinel._integration").sentinel_from_config(spec)
    listed = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else [spec]
    if all(registry_info(each).type == "monitor" for each in listed):
        spec = package.observe_only(spec if isinstance(spec, dict) else list(listed))
    return resolve_sentinel_root(spec), sentinel_config(spec)


def is_protocol(name: str) -> bool:
    """Whether a protocol has this registry name, rather than a monitor."""
    names = (name, f"inspect_sentinel/{name}")
    return any(registry_lookup("protocol", each) is not None for each in names)
