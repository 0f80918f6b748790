"""The command group ``inspect rl``, also installed as ``inspect-rl``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import cast

import click

from inspect_tinker_plugin.contracts.wording import suggestion

COMMANDS: dict[str, tuple[str, str]] = {
    "bench": (
        "inspect_tinker_plugin.cli.bench:bench",
        "Measure what episodes of TASK cost, beside `inspect eval` of the same samples.",
    ),
    "check": (
        "inspect_tinker_plugin.cli.check:check",
        "Run samples of TASK under `inspect eval` and as RL episodes, and compare them.",
    ),
    "export": (
        "inspect_tinker_plugin.cli.export:export_command",
        "Write the prompts and answers of TASK, or the conversations of LOGS, as a dataset.",
    ),
    "plugins": (
        "inspect_tinker_plugin.cli.plugins:plugins",
        "List installed plugins with the hooks that they implement and the names that they give.",
    ),
    "rescore": (
        "inspect_tinker_plugin.cli.rescore:rescore_command",
        "Compute the rewards of logged rollouts again, into new logs.",
    ),
    "rollout": (
        "inspect_tinker_plugin.cli.rollout:rollout",
        "Roll out groups of episodes of TASK, and show conversations with their rewards.",
    ),
    "train": (
        "inspect_tinker_plugin.cli.train:train_command",
        "Train a model on TASK by reinforcement learning, or on several tasks at once.",
    ),
}
"""Name of each command of this package, with its module and its line in the group's help.

The line is repeated here so that ``inspect rl --help`` imports no command.
"""


class LateGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of all commands, with those of plugins."""
        return sorted({*COMMANDS, *plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return plugin_commands().get(cmd_name)
        from inspect_tinker_plugin.contracts.errors import VersionError

        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except VersionError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            from inspect_tinker_plugin.cli.reporting import EXIT_INTERRUPTED

            click.echo("Interrupted.", err=True)
            sys.exit(EXIT_INTERRUPTED)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; if it does not exist, suggest the closest one."""
        name = args[0] if args else "-"
        if name not in COMMANDS and not name.startswith("-"):
            known = self.list_commands(ctx)
            if name not in known:
                hint = suggestion(name, known, most=len(COMMANDS) + 2)
                ctx.fail(f"No such command {name!r}.{hint}{_broken_plugins()}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from :data:`COMMANDS`, and of those that plugins add."""
        lines = {name: line for name, (_, line) in COMMANDS.items()}
        lines |= {name: each.get_short_help_str(90) for name, each in plugin_commands().items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(lines.items()))


def plugin_commands() -> Mapping[str, click.Command]:
    """Return the commands that plugins add; a name of this package's own stays its own."""
    from inspect_tinker_plugin.plugins.manager import COMMANDS_HOOK, default_plugins

    catalogue = default_plugins().catalogue(COMMANDS_HOOK)
    commands = dict(catalogue.entries)
    for name in sorted(commands.keys() & COMMANDS.keys()):
        origin = catalogue.origins.get(name)
        click.echo(f"{origin} gives the command {name!r}, which is built in", err=True)
        del commands[name]
    return cast("Mapping[str, click.Command]", commands)


def _broken_plugins() -> str:
    from inspect_tinker_plugin.plugins.manager import COMMANDS_HOOK, default_plugins

    catalogue = default_plugins().catalogue(COMMANDS_HOOK)
    return "".join(f"; {clash}" for clash in catalogue.clashes.values()) + catalogue.broken


@click.group(cls=LateGroup)
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


def main(program: str = "inspect-rl") -> None:
    """Run ``inspect-rl``; options are also read from ``INSPECT_RL_…`` variables."""
    rl(prog_name=program, auto_envvar_prefix="INSPECT_RL")
