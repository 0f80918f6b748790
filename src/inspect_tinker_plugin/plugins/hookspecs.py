"""The hooks that other packages implement; read from top to bottom, this is the extension manual.

A package names a module (or any object) with implementations in its ``pyproject.toml``::

    [project.entry-points.inspect_tinker_plugin]
    acme = "acme_rewards"

and marks its functions with ``inspect_tinker_plugin.hookimpl``. Hooks register or choose; the
objects that they return do the work. A hook may leave out parameters that it does not need.
``docs/hooks.md`` has an example of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click
    from inspect_ai import Task
    from inspect_ai.scorer import Scorer
    from inspect_ai.util import SandboxEnvironmentSpec

    from inspect_tinker_plugin.contracts.hooks import (
        EpisodeObserver,
        Sampler,
        SampleStage,
        ToolExecutor,
    )
    from inspect_tinker_plugin.contracts.rewards import GroupAggregator, RewardAggregator

PROJECT = "inspect_tinker_plugin"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of the hook of the same name."""


@hookspec
def inspect_rl_reward_aggregators() -> Mapping[str, Callable[..., RewardAggregator]]:
    """Add reward aggregators that ``reward=`` and ``--reward`` take by name.

    Returns:
        Factories by name: letters, digits and ``_``, unique among all packages. In
        ``brevity(mean, target=50)`` the factory ``brevity`` is called with the aggregator
        ``mean`` and ``target=50``; arguments are aggregators, numbers, strings and truth values.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_group_aggregators() -> Mapping[str, Callable[..., GroupAggregator]]:
    """Add group aggregators that ``group_reward=`` takes by name.

    Returns:
        Factories by name, called with the arguments of the expression.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_tool_executors() -> Mapping[str, Callable[..., ToolExecutor]]:
    """Add tool executors that ``tool_executor=`` takes by name.

    Returns:
        Factories by name, called with the arguments of the expression.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_sandbox_providers() -> Mapping[
    str, Callable[[SandboxEnvironmentSpec], SandboxEnvironmentSpec]
]:
    """Add sandbox providers that ``sandbox=`` and ``--sandbox`` take by name.

    A provider is a mapping of sandbox specifications. What runs is an Inspect
    ``SandboxEnvironment``, found by its type in Inspect's registry; a package that brings
    its own registers it there, with ``@sandboxenv`` and an ``inspect_ai`` entry point.

    Returns:
        Functions by name. Each is given what the task or the sample asks for (type and
        config) and returns what it gets instead.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_samples(task: Task) -> SampleStage | None:
    """Filter or transform the samples of a task before a dataset is built from them.

    Stages of several packages follow one another, in alphabetical order of the packages.

    Args:
        task: the task; its dataset must be left as it is.

    Returns:
        A stage, or ``None`` for tasks that this plugin does not handle.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_scorers(task: Task) -> Sequence[Scorer]:
    """Add scorers to a task: for rewards that need the live sandbox or a judge.

    They run after the task's own, in the same way; every aggregator can use their scores
    under the scorers' names.

    Args:
        task: the task; it must not be changed.

    Returns:
        Scorers to add; none for tasks that this plugin does not handle.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_episode_observers(task: Task) -> Sequence[EpisodeObserver]:
    """Watch episodes start, take turns and end; an observer cannot change an outcome.

    Args:
        task: the task whose episodes will run.

    Returns:
        Observers; none for tasks that this plugin does not handle.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_audit_probes() -> Mapping[str, Callable[..., Callable[..., Awaitable[Any]]]]:
    """Add probes that ``inspect rl audit`` runs, all of them or those that ``--probe`` names.

    Returns:
        Factories of ``inspect_rl_audit.Probe`` by name, called with the arguments of the
        expression; without arguments when every installed probe is run.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_samplers() -> Mapping[str, Callable[..., Sampler]]:
    """Add samplers that ``sampler=`` and ``--sampler`` take by name.

    A sampler chooses the samples of each batch, by the rewards of earlier groups.

    Returns:
        Factories by name, called with the arguments of the expression; each call makes a new
        sampler.
    """
    raise NotImplementedError


@hookspec
def inspect_rl_commands() -> Mapping[str, click.Command]:
    """Add commands to ``inspect rl``.

    A command takes the options that it shares with others, such as a task's or a dataset's,
    from ``inspect_tinker_plugin.cli``.

    Returns:
        Commands by name. Plugins are loaded for the help of the group and for commands that the
        package itself does not have, so modules that are slow to import belong inside of functions.
    """
    raise NotImplementedError
