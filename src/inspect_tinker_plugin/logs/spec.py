"""The ``EvalSpec`` of a dataset's logs: task, data, limits and versions, as in an eval's log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from inspect_ai import Task
from inspect_ai.log import EvalConfig, EvalDataset, EvalSpec
from inspect_ai.util import SandboxEnvironmentSpec, registry_info

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.policy import POLICY_NAME, POLICY_PROVIDER
from inspect_tinker_plugin.episode.task import PreparedTask

EXPECTED_SCORES = "expected_scores"
"""Entry of the header's metadata with the names of the task's scorers, each with its keys."""

_PACKAGES = ("inspect_ai", "inspect-tinker-plugin", "tinker", "tinker-cookbook")


def eval_spec(
    prepared: PreparedTask,
    *,
    run_id: str,
    group_size: int,
    metadata: Mapping[str, Any],
    model: str | None = None,
) -> EvalSpec:
    """Describe the rollouts of a dataset.

    Args:
        prepared: The task with its limits after overrides.
        run_id: Unique id of the dataset.
        group_size: Rollouts per sample, which a log shows as epochs.
        metadata: Further entries of the log's header (reward expression, renderer …).
        model: The model under training, if it is known.
    """
    task, limits = prepared.task, prepared.limits
    size = len(task.dataset)
    return EvalSpec(
        eval_id=run_id,
        run_id=run_id,
        task_id=run_id,
        created=datetime.now(UTC).isoformat(),
        task=prepared.name,
        task_version=task.version,
        task_file=internals.task_file(task),
        task_registry_name=task.registry_name,
        task_args=_arguments(task),
        task_args_passed=_arguments(task),
        solver=_solver(prepared),
        dataset=EvalDataset(
            name=task.dataset.name,
            location=task.dataset.location,
            samples=size or None,
            shuffled=task.dataset.shuffled,
        ),
        sandbox=_sandbox(prepared.sandbox),
        model=f"{POLICY_PROVIDER}/{model or POLICY_NAME}",
        model_generate_config=prepared.config,
        config=EvalConfig(
            epochs=group_size,
            fail_on_error=False,
            message_limit=limits.message,
            token_limit=limits.token,
            turn_limit=_least(prepared.options.max_turns, limits.turn),
            time_limit=limits.time,
            working_limit=limits.working,
            cost_limit=limits.cost,
            max_sandboxes=prepared.options.max_sandboxes,
            max_subprocesses=prepared.options.max_subprocesses,
        ),
        packages=_versions(),
        tags=["rollouts", "train" if metadata.get("asked_every") is None else "test"],
        metadata={
            **(task.metadata or {}),
            **metadata,
            EXPECTED_SCORES: {named.name: list(named.keys) for named in prepared.scorers},
        },
        **internals.scoring_in_logs(task, prepared.model_roles),
    )


def _arguments(task: Task) -> dict[str, Any]:
    try:
        return dict(internals.registry_params(task))
    except ValueError:
        return {}


def _solver(prepared: PreparedTask) -> str | None:
    names = []
    for step in prepared.plan.steps:
        try:
            names.append(internals.unqualified_name(registry_info(step).name))
        except ValueError:
            names.append(getattr(step, "__name__", type(step).__name__))
    return ", ".join(names) or None


def _sandbox(spec: SandboxEnvironmentSpec | None) -> SandboxEnvironmentSpec | None:
    """Return the provider with its file; a configuration object is not for a log's header."""
    if spec is None or isinstance(spec.config, str | None):
        return spec
    return SandboxEnvironmentSpec(type=spec.type)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
