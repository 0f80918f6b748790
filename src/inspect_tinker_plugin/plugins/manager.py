"""Finds installed plugins, checks them, and knows which package provides which name.

A plugin that cannot be loaded is kept as a record with its error; it never stops anything
else. The error for an unknown name mentions it, since it may be what is missing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from typing import Any

import click
import pluggy

from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.contracts.wording import place_in_code
from inspect_tinker_plugin.plugins import hookspecs
from inspect_tinker_plugin.plugins.expressions import Built, Catalogue, build
from inspect_tinker_plugin.plugins.hookspecs import PROJECT

logger = getLogger(__name__)

PACKAGE = "inspect-tinker-plugin"

COMMANDS_HOOK = "inspect_rl_commands"

NAMING_HOOKS: Mapping[str, str] = {
    "inspect_rl_reward_aggregators": "reward",
    "inspect_rl_group_aggregators": "group reward",
    "inspect_rl_tool_executors": "tool executor",
    "inspect_rl_sandbox_providers": "sandbox provider",
    "inspect_rl_audit_probes": "probe",
    "inspect_rl_samplers": "sampler",
    COMMANDS_HOOK: "command",
}
"""Hooks that provide objects by name, called once when a plugin is loaded, and what of."""

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


class Plugins:
    """The plugins of all installed packages; this package's own come first.

    Raises:
        PluginError: this package's own are not installed.
    """

    def __init__(self) -> None:
        self._plugins: list[Plugin] = []
        self._working: list[tuple[Plugin, pluggy.PluginManager]] = []
        """Each with pluggy's manager of it alone."""

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
            noun=NAMING_HOOKS[hook],
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
        for plugin, manager in self._working:
            try:
                given = getattr(manager.hook, hook)(**arguments)
            except (Exception, SystemExit) as ex:
                raise PluginError(
                    f"hook {hook} of plugin {plugin.name!r} ({plugin.label}) raised "
                    f"{type(ex).__name__}: {ex}"
                ) from ex
            answers += [(plugin, answer) for answer in given]
        return answers

    def _add(self, entry_point: EntryPoint) -> None:
        """Load one plugin; its errors are kept with it."""
        dist = entry_point.dist
        assert dist is not None  # so it is for what `entry_points()` finds
        record = functools.partial(Plugin, entry_point.name, dist.name, dist.version)
        # One manager per plugin: pluggy leaves a plugin that fails half registered.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        try:
            loaded = entry_point.load()
            loaded = loaded() if isinstance(loaded, type) else loaded
            hooks = _check_hooks(loaded, manager)
            manager.register(loaded)
            given = {
                hook: self._check_names(hook, getattr(loaded, hook))
                for hook in hooks
                if hook in NAMING_HOOKS
            }
        except (Exception, SystemExit) as ex:
            error = str(ex)
            if not isinstance(ex, PluginError):
                place = place_in_code(ex, skipping=("/importlib/", "/pluggy/", "<frozen"))
                error = f"{type(ex).__name__}: {ex}{place}"
            logger.debug("plugin %s of %s is broken", entry_point.name, dist.name, exc_info=True)
            self._plugins.append(record(error=error))
            return
        plugin = record({hook: tuple(sorted(given.get(hook, ()))) for hook in hooks})
        self._plugins.append(plugin)
        self._working.append((plugin, manager))
        for hook, entries in given.items():
            for name, entry in entries.items():
                self._given[hook].setdefault(name, []).append((plugin, entry))

    def _check_names(
        self, hook: str, function: Callable[[], Any]
    ) -> Mapping[str, Callable[..., Any]]:
        """Ask a plugin for the objects that it provides by name."""
        given = function()
        if not isinstance(given, Mapping):
            raise _fault(
                f"{hook} gave {given!r:.80}, not a mapping of names to factories", function
            )
        for name, entry in given.items():
            if not isinstance(name, str) or not name.isidentifier():
                problem = f"gave the name {name!r}; use letters, digits and _"
            elif hook == COMMANDS_HOOK and not isinstance(entry, click.Command):
                problem = f"gave {entry!r:.80} as {name!r}, which is no click.Command"
            elif not callable(entry):
                problem = f"gave {entry!r:.80} as {name!r}, which cannot be called"
            elif any(other.package == PACKAGE for other, _ in self._given[hook].get(name, ())):
                problem = f"gives {name!r}, which {PACKAGE} has built in; choose another name"
            else:
                continue
            raise _fault(f"{hook} {problem}", function)
        return given


@functools.cache
def default_plugins() -> Plugins:
    """Return the plugins of this process, loaded on first use."""
    return Plugins()


def build_from(hook: str, expression: str, **terms: Any) -> Built:
    """Build what an expression describes with the names that installed plugins give."""
    return build(expression, default_plugins().catalogue(hook), **terms)


def _order(entry_point: EntryPoint) -> tuple[bool, str, str]:
    package = "" if entry_point.dist is None else entry_point.dist.name
    return package != PACKAGE, package, entry_point.name


def _check_hooks(loaded: object, manager: pluggy.PluginManager) -> tuple[str, ...]:
    """Return the names of the hooks that a plugin implements."""
    meant = (
        name
        for name in dir(loaded)
        if name.startswith("inspect_rl_") or manager.parse_hookimpl_opts(loaded, name) is not None
    )
    named = {name: getattr(loaded, name) for name in meant}
    hooks = {name: function for name, function in named.items() if inspect.isroutine(function)}
    if not hooks:
        raise _fault(f"it implements no hook; the hooks are {', '.join(HOOKS)}", loaded)
    for name, function in hooks.items():
        if name not in HOOKS:
            known = ", ".join(HOOKS)
            raise _fault(f"there is no hook {name}; the hooks are {known}", function)
        if manager.parse_hookimpl_opts(loaded, name) is None:
            raise _fault(f"{name} is not marked with @hookimpl", function)
        offered = inspect.signature(getattr(hookspecs, name)).parameters
        for argument in inspect.signature(function).parameters:
            if argument not in offered:
                raise _fault(f"{name} has no argument {argument!r}", function)
    return tuple(hook for hook in HOOKS if hook in hooks)


def _fault(problem: str, at: object) -> PluginError:
    """Make the error of a plugin, with the place of the function or module that is to blame."""
    code, place = getattr(at, "__code__", None), getattr(at, "__file__", None)
    if code is not None:
        place = f"{code.co_filename}:{code.co_firstlineno}"
    return PluginError(f"{problem} ({place})" if place else problem)
