"""The older bridge's call, kept with its meaning for code that already uses it."""

from __future__ import annotations

import copy
from typing import Any, Literal

from inspect_ai import Task
from inspect_ai.agent import AgentPrompt, AgentSubmit, react
from inspect_ai.solver import Solver
from inspect_ai.tool import bash, python
from tinker_cookbook.renderers import Renderer

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import SolverLike
from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.rl.dataset import InspectRLDataset, TaskLike, as_rl_dataset
from inspect_tinker_plugin.tasks.reference import resolve_task

_TOOL_TIMEOUT_S = 180


def load_environment(
    task: TaskLike,
    renderer: Renderer,
    env_type: Literal["single_turn", "multi_turn"] = "single_turn",
    max_samples: int | None = None,
    max_turns: int = 10,
    num_envs_per_group: int = 1,
    batch_size: int = 1,
    sandbox_type: Literal["docker", "local"] | None = None,
    sandbox_config: Any = None,
    submit_instruction: str | None = None,
) -> InspectRLDataset:
    """Turn a task into an RL dataset with the parameters of the older bridge.

    Args:
        task: As in :func:`as_rl_dataset`.
        renderer: A cookbook renderer.
        env_type: ``"single_turn"``: the task's own solver, one model call.
            ``"multi_turn"``: the task's own agent up to ``max_turns`` calls; a task whose
            solver has no agent and no tools gets Inspect's ``react()`` with ``bash``,
            ``python`` and ``submit``, behind the task's own prompt solvers.
        max_samples: Use only this many samples, from the first on.
        max_turns: Maximum model calls per episode (``multi_turn``).
        num_envs_per_group: Episodes per group (G).
        batch_size: Groups per batch (P).
        sandbox_type: Replaces the task's sandbox; ``None`` keeps it.
        sandbox_config: Configuration for ``sandbox_type``.
        submit_instruction: Prompt of the added agent; its own when ``None``.

    Raises:
        ConfigError: An option is not usable.
    """
    if env_type not in ("single_turn", "multi_turn"):
        raise ConfigError(f"env_type must be 'single_turn' or 'multi_turn', got {env_type!r}")
    resolved = resolve_task(task, None)
    solver: SolverLike | None = None
    if env_type == "multi_turn" and not _has_agent(resolved.task):
        solver = _with_agent(resolved.task, submit_instruction)
        if sandbox_type is None and resolved.task.sandbox is None:
            _require_sandbox(resolved.task)
    return as_rl_dataset(
        resolved.ref or resolved.task,
        renderer,
        batch_size=batch_size,
        group_size=num_envs_per_group,
        limit=max_samples,
        solver=solver,
        max_turns=1 if env_type == "single_turn" else max_turns,
        sandbox=sandbox_type,
        sandbox_config=sandbox_config,
    )


def _steps(task: Task) -> list[Solver]:
    return list(internals.resolve_plan(_without_setup(task), None).steps)


def _without_setup(task: Task) -> Task:
    bare = copy.copy(task)
    bare.setup = None
    return bare


_PROMPT_SOLVERS = frozenset(
    {
        "chain_of_thought",
        "generate",
        "multiple_choice",
        "prompt_template",
        "self_critique",
        "system_message",
        "user_message",
        "assistant_message",
    }
)
"""Inspect's solvers that are not agents: an agent is added only after these."""


def _name(solver: Solver) -> str:
    try:
        return internals.registry_unqualified_name(solver)
    except ValueError:
        return ""


def _has_agent(task: Task) -> bool:
    return any(_name(step) not in _PROMPT_SOLVERS for step in _steps(task))


def _with_agent(task: Task, submit_instruction: str | None) -> SolverLike:
    prompts = [step for step in _steps(task) if _name(step) != "generate"]
    agent = react(
        prompt=AgentPrompt(submit_prompt=submit_instruction)
        if submit_instruction is not None
        else AgentPrompt(),
        tools=[bash(timeout=_TOOL_TIMEOUT_S), python(timeout=_TOOL_TIMEOUT_S)],
        submit=AgentSubmit(),
    )
    return [*prompts, agent]


def _require_sandbox(task: Task) -> None:
    samples = task.dataset
    if len(samples) and samples[0].sandbox is None:
        raise ConfigError(
            f"task {task.name!r} has no sandbox for the bash and python tools of a "
            "multi-turn episode; give sandbox_type='docker' or 'local'"
        )
