"""The command group ``inspect rl``, also installed as ``inspect-rl``; lists plugins."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import click

from inspect_tinker_plugin.cli.compare import bench, check
from inspect_tinker_plugin.cli.export import export_command, rescore_command
from inspect_tinker_plugin.cli.new import new_command
from inspect_tinker_plugin.cli.reporting import EXIT_PARTIAL, quiet_stdout, reported
from inspect_tinker_plugin.cli.rollout import rollout
from inspect_tinker_plugin.cli.serve import serve_command, serve_model_command
from inspect_tinker_plugin.cli.train import overlap_command, train_command, watch_command
from inspect_tinker_plugin.contracts.wording import suggestion

if TYPE_CHECKING:
    from inspect_tinker_plugin.plugins.manager import Plugin, Plugins


class CommandGroup(click.Group):
    """A group with the commands of this package and those of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of all commands."""
        return sorted({*self.commands, *plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command of this package or of a plugin."""
        return self.commands.get(cmd_name) or plugin_commands().get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; if it does not exist, suggest the closest one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            hint = suggestion(name, known, most=len(known))
            ctx.fail(f"No such command {name!r}{_broken_plugins()}.{hint}")
        for before, text in pairwise(args):
            if not text or re.fullmatch("--[a-z-]+=", text):  # often a variable that is not set
                ctx.fail(f"The value of {text or before} is empty; leave it out for the default.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, each with the whole first sentence of its help."""
        from inspect_tinker_plugin.plugins.manager import default_plugins

        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(90)) for name, each in commands.items() if each]
            )
        if broken := [plugin.name for plugin in default_plugins().plugins if plugin.error]:
            formatter.write_paragraph()
            formatter.write_text(f"Broken: {', '.join(broken)}; see `inspect rl plugins`.")


def plugin_commands() -> Mapping[str, click.Command]:
    """Return the commands that plugins add; a name of this package's own stays its own."""
    from inspect_tinker_plugin.plugins.manager import COMMANDS_HOOK, default_plugins

    catalogue = default_plugins().catalogue(COMMANDS_HOOK)
    commands = dict(catalogue.entries)
    for name in sorted(commands.keys() & rl.commands.keys()):
        origin = catalogue.origins.get(name)
        click.echo(f"{origin} gives the command {name!r}, which is built in", err=True)
        del commands[name]
    return cast("Mapping[str, click.Command]", commands)


def _broken_plugins() -> str:
    from inspect_tinker_plugin.plugins.manager import COMMANDS_HOOK, default_plugins

    catalogue = default_plugins().catalogue(COMMANDS_HOOK)
    return "".join(f"; {clash}" for clash in catalogue.clashes.values()) + catalogue.broken


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")
@reported
def plugins_command(as_json: bool) -> None:
    """List installed plugins with the hooks that they implement and the names that they give.

    A plugin that cannot be loaded is listed with its error and the line that is to blame.
    Exit codes: 0 all plugins work, 3 some are broken or claim the same name.
    """
    from inspect_tinker_plugin.plugins.manager import default_plugins

    with quiet_stdout():
        installed = default_plugins()
    clashes = find_clashes(installed)
    if as_json:
        about = [asdict(plugin) for plugin in installed.plugins]
        click.echo(json.dumps({"plugins": about, "clashes": clashes}, indent=2))
    else:
        click.echo(describe_plugins(installed))
    if clashes or any(plugin.error is not None for plugin in installed.plugins):
        sys.exit(EXIT_PARTIAL)


def find_clashes(installed: Plugins) -> dict[str, dict[str, str]]:
    """Return, by hook, the names that several plugins give, each with an explanation."""
    from inspect_tinker_plugin.plugins.manager import NAMING_HOOKS

    found = {hook: dict(installed.catalogue(hook).clashes) for hook in NAMING_HOOKS}
    return {hook: clashes for hook, clashes in found.items() if clashes}


def describe_plugins(installed: Plugins) -> str:
    """Describe plugins for a reader, one paragraph each."""
    clashes = [
        f"clash in {_short(hook)}: {explanation}"
        for hook, found in find_clashes(installed).items()
        for explanation in found.values()
    ]
    return "\n\n".join([*map(_describe_plugin, installed.plugins), *clashes])


def _describe_plugin(plugin: Plugin) -> str:
    from inspect_tinker_plugin.plugins.manager import NAMING_HOOKS

    head = f"{plugin.name} ({plugin.label})"
    if plugin.error is not None:
        return f"{head}  BROKEN\n  {plugin.error}"
    lines = [
        f"  {_short(hook):<20} {', '.join(names)}".rstrip()
        for hook, names in plugin.hooks.items()
        if names or hook not in NAMING_HOOKS
    ]
    return "\n".join([head, *lines])


def _short(hook: str) -> str:
    return hook.removeprefix("inspect_rl_").replace("_", " ")


@click.group(cls=CommandGroup)
@click.version_option(
    package_name="inspect-tinker-plugin", message="inspect-tinker-plugin %(version)s"
)
@click.pass_context
def rl(ctx: click.Context) -> None:
    """Turn any Inspect task into a Tinker RL environment."""
    if ctx.parent is None:
        # Inspect's own main() has done this before it calls this group.
        _read_dotenv()


def _read_dotenv() -> None:
    from inspect_tinker_plugin.contracts.errors import VersionError

    try:
        from inspect_tinker_plugin.inspect_internals import init_dotenv
    except VersionError as error:
        raise click.ClickException(str(error)) from error
    init_dotenv()


for _command in (
    bench,
    check,
    export_command,
    new_command,
    overlap_command,
    plugins_command,
    rescore_command,
    rollout,
    serve_command,
    serve_model_command,
    train_command,
    watch_command,
):
    rl.add_command(_command)


def main(program: str = "inspect-rl") -> None:
    """Run ``inspect-rl``; options are also read from ``INSPECT_RL_…`` variables."""
    rl(prog_name=program, auto_envvar_prefix="INSPECT_RL")
