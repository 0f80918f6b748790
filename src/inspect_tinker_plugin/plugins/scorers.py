"""Scorers that plugins add to a task."""

from __future__ import annotations

from collections.abc import Sequence

from inspect_ai import Task
from inspect_ai.scorer import Scorer
from inspect_ai.util import registry_info

from inspect_tinker_plugin.errors import PluginError
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins


def plugin_scorers(task: Task, *, plugins: Plugins | None = None) -> list[Scorer]:
    """Collect the scorers that plugins add to a task, to be run after its own.

    Raises:
        PluginError: a hook raised, or returned something that cannot be called.
    """
    added: list[Scorer] = []
    for plugin, scorers in (plugins or default_plugins()).call("inspect_rl_scorers", task=task):
        if not isinstance(scorers, Sequence) or not all(_is_scorer(scorer) for scorer in scorers):
            raise PluginError(
                f"hook inspect_rl_scorers of plugin {plugin.name!r} ({plugin.label}) gave "
                f"{scorers!r:.80}, not a sequence of scorers (made by functions with @scorer)"
            )
        added.extend(scorers)
    return added


def _is_scorer(made: object) -> bool:
    try:
        return registry_info(made).type == "scorer"
    except ValueError:  # not made by a function with @scorer
        return False
