"""Finds installed plugins, checks them, and knows which package provides which name.

A plugin that cannot be loaded is kept as a record with its error; it never stops anything
else. The error for an unknown name mentions it, since it may be what is missing.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from pathlib import Path
from typing import Any

import click
import pluggy

from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.plugins import hookspecs
from inspect_tinker_plugin.plugins.expressions import ExpressionError, Language
from inspect_tinker_plugin.plugins.hookspecs import PROJECT

logger = getLogger(__name__)

PACKAGE = "inspect-tinker-plugin"
_OURS = str(Path(__file__).parents[1])
_NOT_THEIRS = {"importlib", "pluggy"}
"""Folders whose code only calls a plugin's."""

NAMING_HOOKS = (
    "inspect_rl_reward_aggregators",
    "inspect_rl_group_aggregators",
    "inspect_rl_tool_executors",
    "inspect_rl_sandbox_providers",
    "inspect_rl_audit_probes",
    "inspect_rl_samplers",
    "inspect_rl_commands",
)
"""Hooks that provide objects by name, called once when a plugin is loaded."""

COMMANDS_HOOK = "inspect_rl_commands"

_KNOWN = "; the hooks are "
"""What separates an error from the names of all hooks."""

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("inspect_rl_"))
"""Every hook, in the order of ``hookspecs.py``."""


@dataclass(frozen=True)
class Plugin:
    """One installed plugin: a working one with what it provides, or a broken one with its error."""

    name: str
    """Name of the entry point."""

    package: str
    """Name of the distribution that it comes from."""

    version: str
    """Version of the distribution."""

    hooks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Implemented hooks, with the names that each provides (none for hooks without names)."""

    error: str | None = None
    """Why it could not be loaded; ``None`` for one that works."""

    @property
    def label(self) -> str:
        """The package with its version, as messages name it."""
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Catalogue:
    """Everything that the plugins provide under one hook."""

    entries: Mapping[str, Callable[..., Any]]
    """The usable objects, by name."""

    clashes: Mapping[str, str]
    """Names that several packages claim, with an explanation."""

    origins: Mapping[str, str]
    """The plugin of each name, in words; those of this package are left out."""

    broken: str
    """A sentence about plugins that could not be loaded; empty when there are none."""

    def language(self, noun: str, error: type[ExpressionError], **terms: Any) -> Language:
        """Return the language of expressions that use these names.

        Args:
            noun: What a name stands for, in messages.
            error: The error for a faulty expression.
            terms: ``score`` and ``term``, for languages that have them.
        """
        return Language(
            self.entries,
            noun=noun,
            error=error,
            clashes=self.clashes,
            broken=self.broken,
            origins=self.origins,
            **terms,
        )


class Plugins:
    """The plugins of all installed packages; this package's own come first.

    Raises:
        PluginError: this package's own are not installed.
    """

    def __init__(self) -> None:
        self._plugins: list[Plugin] = []
        self._managers: dict[int, pluggy.PluginManager] = {}
        """By the place of a working plugin: pluggy's manager of it alone."""

        self._given: dict[str, dict[str, list[tuple[Plugin, Callable[..., Any]]]]] = {
            hook: {} for hook in NAMING_HOOKS
        }
        for entry_point in sorted(entry_points(group=PROJECT), key=_order):
            self._add(entry_point)
        if not any(plugin.package == PACKAGE for plugin in self._plugins):
            raise PluginError(
                f"the built-in parts are found by the metadata of an installed {PACKAGE}, and "
                "there is none: run `pip install -e .` in the folder of its source"
            )

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """All plugins, this package's own first, then by package; broken ones included."""
        return tuple(self._plugins)

    def catalogue(self, hook: str) -> Catalogue:
        """Return everything that can be used under one of the ``NAMING_HOOKS``."""
        given = self._given[hook]
        return Catalogue(
            entries={name: givers[0][1] for name, givers in given.items() if len(givers) == 1},
            clashes={
                name: f"{name!r} is claimed by {' and by '.join(p.label for p, _ in givers)}; "
                "uninstall one of them"
                for name, givers in given.items()
                if len(givers) > 1
            },
            origins={
                name: f"plugin {givers[0][0].name!r} of {givers[0][0].label}"
                for name, givers in given.items()
                if givers[0][0].package != PACKAGE
            },
            broken="".join(
                f"; plugin {p.name!r} of {p.label}, which may provide it, is broken: {p.error}"
                for p in self._plugins
                if p.error is not None
            ),
        )

    def call(self, hook: str, **arguments: Any) -> list[tuple[Plugin, Any]]:
        """Call a hook of every working plugin that has it.

        Returns:
            The results other than ``None``, each with its plugin, in the order of `plugins`.

        Raises:
            PluginError: an implementation raised; the message names its package.
        """
        answers: list[tuple[Plugin, Any]] = []
        for place, plugin in enumerate(self._plugins):
            if hook not in plugin.hooks:
                continue
            try:
                given = getattr(self._managers[place].hook, hook)(**arguments)
            except (Exception, SystemExit) as ex:
                raise PluginError(
                    f"hook {hook} of plugin {plugin.name!r} ({plugin.label}) raised "
                    f"{type(ex).__name__}: {ex}"
                ) from ex
            answers += [(plugin, answer) for answer in given]
        return answers

    def _add(self, entry_point: EntryPoint) -> None:
        """Load one plugin; its errors are kept with it."""
        plugin = _plugin(entry_point)
        loaded: object = None
        try:
            loaded = _load(entry_point)
            manager = _register_alone(loaded)
            hooks = _checked_hooks(loaded, manager)
            given = {hook: _given_names(manager, hook) for hook in hooks if hook in NAMING_HOOKS}
            self._refuse_names_of_built_ins(given)
        except (Exception, SystemExit) as ex:
            error = str(ex) if isinstance(ex, PluginError) else f"{type(ex).__name__}: {ex}"
            error += _place(ex, loaded)
            logger.debug("plugin %s of %s is broken", plugin.name, plugin.label, exc_info=True)
            self._plugins.append(Plugin(plugin.name, plugin.package, plugin.version, error=error))
            return
        names = {hook: tuple(sorted(given.get(hook, ()))) for hook in hooks}
        plugin = Plugin(plugin.name, plugin.package, plugin.version, names)
        self._managers[len(self._plugins)] = manager
        self._plugins.append(plugin)
        for hook, entries in given.items():
            for name, entry in entries.items():
                self._given[hook].setdefault(name, []).append((plugin, entry))

    def _refuse_names_of_built_ins(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        for hook, entries in given.items():
            for name in entries:
                for other, _ in self._given[hook].get(name, []):
                    if other.package == PACKAGE:
                        raise PluginError(
                            f"{hook} gives {name!r}, which {other.label} has built in; "
                            "choose another name"
                        )


@functools.cache
def default_plugins() -> Plugins:
    """Return the plugins of this process, loaded on first use."""
    return Plugins()


def _plugin(entry_point: EntryPoint) -> Plugin:
    dist = entry_point.dist
    assert dist is not None  # so it is for what `entry_points()` finds
    return Plugin(entry_point.name, dist.name, dist.version)


def _order(entry_point: EntryPoint) -> tuple[bool, str, str]:
    plugin = _plugin(entry_point)
    return plugin.package != PACKAGE, plugin.package, plugin.name


def _load(entry_point: EntryPoint) -> object:
    loaded: object = entry_point.load()
    return loaded() if isinstance(loaded, type) else loaded


def _place(error: BaseException, loaded: object) -> str:
    """Return the line of a plugin's own code that is to blame: `` (file.py:3)``, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<")) and not _NOT_THEIRS & set(
            Path(frame.filename).parts
        ):
            return f" ({frame.filename}:{frame.lineno})"
    problem = str(error).partition(_KNOWN)[0]
    for name, value in vars(loaded).items() if hasattr(loaded, "__dict__") else ():
        if name in re.findall(r"inspect_rl_\w+", problem) and hasattr(value, "__code__"):
            return f" ({value.__code__.co_filename}:{value.__code__.co_firstlineno})"
    file = getattr(loaded, "__file__", None)
    return f" ({file})" if file else ""


def _register_alone(loaded: object) -> pluggy.PluginManager:
    """Register a plugin with a manager of its own: pluggy leaves one that fails half registered.

    Raises:
        PluginError: it implements a hook that does not exist, or one with other arguments.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(loaded)
        manager.check_pending()
    except pluggy.PluginValidationError as ex:
        raise PluginError(f"{' '.join(str(ex).split())}{_KNOWN}{', '.join(HOOKS)}") from ex
    return manager


def _checked_hooks(loaded: object, manager: pluggy.PluginManager) -> tuple[str, ...]:
    """Return the names of the hooks that a plugin implements.

    Raises:
        PluginError: it implements none, or a function is named like a hook but not marked so.
    """
    hooks = {caller.name for caller in manager.get_hookcallers(loaded) or ()}
    for name in dir(loaded):
        if name.startswith("inspect_rl_") and name not in hooks:
            raise PluginError(f"{name} is not marked with @hookimpl")
    if not hooks:
        raise PluginError(f"it implements no hook{_KNOWN}{', '.join(HOOKS)}")
    return tuple(hook for hook in HOOKS if hook in hooks)


def _given_names(manager: pluggy.PluginManager, hook: str) -> Mapping[str, Callable[..., Any]]:
    """Ask a plugin for the objects that it provides by name.

    Raises:
        PluginError: the answer is not a mapping of names to callables.
    """
    answers = getattr(manager.hook, hook)()
    given = answers[0] if answers else None
    if not isinstance(given, Mapping):
        raise PluginError(f"{hook} gave {given!r:.80}, not a mapping of names to factories")
    for name, entry in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise PluginError(f"{hook} gave the name {name!r}; use letters, digits and _")
        if hook == COMMANDS_HOOK and not isinstance(entry, click.Command):
            raise PluginError(f"{hook} gave {entry!r:.80} as {name!r}, which is no click.Command")
        if not callable(entry):
            raise PluginError(f"{hook} gave {entry!r:.80} as {name!r}, which cannot be called")
    return given
