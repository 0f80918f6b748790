"""Write docs/cli.md from the commands themselves; ``--check`` only says whether it is in step."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from inspect_tinker_plugin.cli.main import COMMANDS, rl

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """\
# Command line

`inspect rl …` is part of Inspect's own `inspect` once the package is installed;
`inspect-rl …` is the same where Python's start-up files are switched off. Every option can
also be set by a variable, in the environment or in a `.env` file: `--limit` of
`inspect rl export` is `INSPECT_RL_EXPORT_LIMIT`.

What goes wrong is one line on stderr. Exit codes: 0 done, 1 nothing useful came out, 2 the
command line is wrong, 3 done but for some samples, 130 stopped by Ctrl-C.

This page is made from the commands by `scripts/write_cli_reference.py`.
"""


def reference() -> str:
    """Return the page: the group and each command as ``--help`` shows them."""
    parent = click.Context(rl, info_name="inspect rl", max_content_width=90, terminal_width=90)
    sections = [HEAD, _section("inspect rl", rl.get_help(parent))]
    for name in sorted(COMMANDS):
        command = rl.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent=parent, info_name=name)
        sections.append(_section(f"inspect rl {name}", command.get_help(context)))
    return "\n".join(sections)


def _section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        in_step = PAGE.exists() and PAGE.read_text(encoding="utf-8") == reference()
        print("docs/cli.md is", "in step." if in_step else f"out of step: run {sys.argv[0]}")
        return int(not in_step)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
