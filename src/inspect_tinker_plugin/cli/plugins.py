"""``inspect rl plugins``: lists what is installed, from which package, and what it provides."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from inspect_tinker_plugin.cli.reporting import EXIT_PARTIAL, quiet_stdout, reported
from inspect_tinker_plugin.plugins.manager import NAMING_HOOKS, Plugin, Plugins, default_plugins


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@reported
def plugins(as_json: bool) -> None:
    """List installed plugins with the hooks that they implement and the names that they give.

    A plugin that cannot be loaded is listed with its error and the line that is to blame.
    Exit codes: 0 all plugins work, 3 some are broken or claim the same name.
    """
    with quiet_stdout():
        installed = default_plugins()
    if as_json:
        click.echo(json.dumps(as_data(installed), indent=2))
    else:
        click.echo(as_text(installed))
    clashes = any(installed.catalogue(hook).clashes for hook in NAMING_HOOKS)
    if clashes or any(plugin.error is not None for plugin in installed.plugins):
        sys.exit(EXIT_PARTIAL)


def as_data(installed: Plugins) -> dict[str, object]:
    """Describe plugins as plain data: ``plugins``, and ``clashes`` by hook."""
    return {
        "plugins": [asdict(plugin) for plugin in installed.plugins],
        "clashes": {
            hook: dict(clashes)
            for hook in NAMING_HOOKS
            if (clashes := installed.catalogue(hook).clashes)
        },
    }


def as_text(installed: Plugins) -> str:
    """Describe plugins for a reader, one paragraph each."""
    paragraphs = [_paragraph(plugin) for plugin in installed.plugins]
    clashes = [
        f"clash in {_short(hook)}: {explanation}"
        for hook in NAMING_HOOKS
        for explanation in installed.catalogue(hook).clashes.values()
    ]
    return "\n\n".join([*paragraphs, *clashes])


def _paragraph(plugin: Plugin) -> str:
    head = f"{plugin.name} ({plugin.label})"
    if plugin.error is not None:
        return f"{head}  BROKEN\n  {plugin.error}"
    lines = []
    for hook, names in plugin.hooks.items():
        if names or hook not in NAMING_HOOKS:
            lines.append(f"  {_short(hook):<20} {', '.join(names)}".rstrip())
    return "\n".join([head, *lines])


def _short(hook: str) -> str:
    return hook.removeprefix("inspect_rl_").replace("_", " ")
