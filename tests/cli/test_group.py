"""The group of commands: its help is cheap, complete, and the reference follows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from inspect_tinker_plugin.cli.main import COMMANDS, rl

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_line_in_the_groups_help_is_the_commands_own(name: str) -> None:
    command = rl.get_command(click.Context(rl), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(200).rstrip(".")


def test_the_reference_is_in_step() -> None:
    script = ROOT / "scripts" / "write_cli_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="No such command 'exprt'"):
        rl(["exprt"], standalone_mode=False)
