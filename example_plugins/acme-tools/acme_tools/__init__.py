"""Hooks of acme-tools: each only names its objects; other modules implement them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import click
from inspect_ai import Task
from inspect_ai.scorer import Scorer
from inspect_ai.util import SandboxEnvironmentSpec

from acme_tools.command import words
from acme_tools.observer import observers
from acme_tools.probe import Shouting
from acme_tools.recording import RecordedExecutor
from acme_tools.sampler import ByLevel
from acme_tools.samples import question_stage
from acme_tools.sandboxes import on_this_machine
from acme_tools.scorers import answer_words
from inspect_rl_audit import Probe
from inspect_tinker_plugin.plugins import (
    EpisodeObserver,
    Sampler,
    SampleStage,
    ToolExecutor,
    hookimpl,
)


@hookimpl
def inspect_rl_tool_executors() -> Mapping[str, Callable[..., ToolExecutor]]:
    return {"recorded": RecordedExecutor}


@hookimpl
def inspect_rl_sandbox_providers() -> Mapping[
    str, Callable[[SandboxEnvironmentSpec], SandboxEnvironmentSpec]
]:
    return {"on_this_machine": on_this_machine}


@hookimpl
def inspect_rl_samples(task: Task) -> SampleStage | None:
    return question_stage(task)


@hookimpl
def inspect_rl_scorers(task: Task) -> Sequence[Scorer]:
    return [answer_words()] if (task.metadata or {}).get("acme_answer_words") else []


@hookimpl
def inspect_rl_episode_observers(task: Task) -> Sequence[EpisodeObserver]:
    return observers(task)


@hookimpl
def inspect_rl_audit_probes() -> Mapping[str, Callable[..., Probe]]:
    return {"shouting": Shouting}


@hookimpl
def inspect_rl_samplers() -> Mapping[str, Callable[..., Sampler]]:
    return {"by_level": ByLevel}


@hookimpl
def inspect_rl_commands() -> Mapping[str, click.Command]:
    return {"words": words}
