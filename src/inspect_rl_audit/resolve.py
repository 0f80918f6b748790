"""Turns probe expressions into probes: the named ones, or all that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inspect_rl_audit.contract import Probe
from inspect_tinker_plugin.contracts.errors import PluginError
from inspect_tinker_plugin.plugins.expressions import ExpressionError, build
from inspect_tinker_plugin.plugins.manager import Plugins, default_plugins

HOOK = "inspect_rl_audit_probes"


class ProbeExpressionError(ExpressionError):
    """A probe expression has a fault; the message and the attributes say where."""

    subject = "probe expression"


def resolve_probes(
    names: Sequence[str] = (), *, plugins: Plugins | None = None
) -> Mapping[str, Probe]:
    """Make probes.

    Args:
        names: Expressions, such as ``baselines`` or ``spelling(language='en')``; every probe
            that is installed, made without arguments, when there are none.
        plugins: Where names are looked up; the installed plugins when not given.

    Raises:
        ConfigError: An unknown name, a malformed expression, or an object that is no probe.
    """
    catalogue = (plugins or default_plugins()).catalogue(HOOK)
    language = catalogue.language("probe", ProbeExpressionError)
    probes: dict[str, Probe] = {}
    for name in names or list(catalogue.entries):
        built = build(name, language)
        if not callable(built) or isinstance(built, type):
            raise PluginError(f"probe {name!r} is {built!r:.80}, which cannot be called")
        probes[name] = built
    return probes
