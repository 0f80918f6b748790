"""Writes what pages say about options, from their declarations; ``--check`` only compares.

``docs/cli.md`` is made from the commands, the table of ``docs/options.md`` from
``inspect_tinker_plugin.options``, and ``docs/results.md`` from the classes that it lists.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from unittest import mock

import click

from inspect_tinker_plugin.cli import main
from inspect_tinker_plugin.cli.main import rl
from inspect_tinker_plugin.options import COMMANDS as WITH_OPTIONS
from inspect_tinker_plugin.options import declared_options

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cli.md"
OPTIONS = ROOT / "docs" / "options.md"

RESULTS = ROOT / "docs" / "results.md"

RESULT_CLASSES = (
    ("contracts.episodes", "EpisodeResult", "What a reward aggregator receives."),
    ("contracts.episodes", "TurnRequest", "What a script receives if it is a function."),
    ("contracts.rewards", "Reward", "What a reward aggregator returns."),
    ("contracts.rewards", "GroupMember", "What a group aggregator receives for each episode."),
    ("contracts.hooks", "ToolInvocation", "What a tool executor receives."),
    ("contracts.hooks", "ToolScope", "`ToolInvocation.scope`."),
    ("contracts.hooks", "SampleStage", "What `inspect_rl_samples` returns."),
    ("contracts.hooks", "SamplePool", "What a sampler's `begin` receives."),
    ("contracts.hooks", "GroupOutcome", "What a sampler's `learn` receives."),
    ("contracts.hooks", "EpisodeStarted", "What `on_episode_start` receives."),
    ("contracts.hooks", "TurnTaken", "What `on_turn` receives."),
    ("contracts.hooks", "EpisodeEnded", "What `on_episode_end` receives."),
    ("rl.rollouts", "RolloutReport", "What `inspect rl rollout --json` prints."),
    ("serve.results", "RolloutResult", "What `RolloutService` returns for each episode."),
    ("serve.results", "Branch", "A training sequence of a `RolloutResult`."),
    ("serve.results", "Span", "A reply in a `Branch`."),
    ("serve.results", "SampledTurn", "A model call of a `RolloutResult`."),
    ("serve.results", "Failure", "`RolloutResult.failure`."),
    ("testing.kit", "ParityReport", "What `check_parity` returns for each sample."),
    ("export.pipeline", "ExportReport", "What `export_task` returns."),
    ("train.run", "TrainResult", "What `train` returns."),
)
"""Classes of ``docs/results.md``: module, name, and where a user meets it."""

RESULTS_HEAD = """\
# Results

The fields of the objects that functions and hooks receive and return. Absent, failed and zero are
three different values: `None` is never a zero. This page is generated from the classes by
`scripts/write_cli_reference.py`.
"""

BEGIN = "<!-- options: written by scripts/write_cli_reference.py -->"
END = "<!-- end of options -->"

HEAD = """\
# Command line

`inspect rl …` is part of Inspect's own `inspect` once the package is installed;
`inspect-rl …` is the same where Python's start-up files are switched off. Every option can
also be set by a variable, in the environment or in a `.env` file: `--limit` of
`inspect rl export` is `INSPECT_RL_EXPORT_LIMIT`. An empty value is refused; a variable that is
empty counts as not set.

Errors are one line on stderr. Exit codes: 0 done, 1 no useful result, 2 the
command line is wrong, 3 done except for some samples, 130 stopped by Ctrl-C
(143 by SIGTERM, 129 by SIGHUP, which do the same).

This page is generated from the commands by `scripts/write_cli_reference.py`.
"""


def reference() -> str:
    """Return the page: the group and each command as ``--help`` shows them.

    Of the commands that plugins add, only those of this distribution.
    """
    ours = {"audit": main.plugin_commands()["audit"]}
    with mock.patch.object(main, "plugin_commands", return_value=ours):
        return _reference()


def _reference() -> str:
    parent = click.Context(rl, info_name="inspect rl", max_content_width=90, terminal_width=90)
    sections = [HEAD, _section("inspect rl", rl.get_help(parent))]
    for name in rl.list_commands(parent):
        command = rl.get_command(parent, name)
        assert command is not None
        context = click.Context(command, parent=parent, info_name=name)
        sections.append(_section(f"inspect rl {name}", command.get_help(context)))
    return "\n".join(sections)


def _section(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


def options_table() -> str:
    """Return the table of options: a row per option, with its default and its commands."""
    rows = ["| option | meaning | default | commands |", "| --- | --- | --- | --- |"]
    for option in declared_options():
        default = f"`{option.default!r}`".replace("'", '"') if option.default else ""
        commands = "all" if option.commands == WITH_OPTIONS else ", ".join(option.commands)
        rows.append(f"| `{option.name}` | {option.help} | {default} | {commands} |")
    return "\n".join(rows)


def options() -> str:
    """Return the page of options with the current table."""
    text = OPTIONS.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n{options_table()}\n{after}"


def results() -> str:
    """Return the page of results: a table of fields for each class."""
    return "\n".join([RESULTS_HEAD, *(_class_section(*each) for each in RESULT_CLASSES)])


def _class_section(module: str, name: str, met: str) -> str:
    path = ROOT / "src" / "inspect_tinker_plugin" / Path(*module.split("."))
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    [found] = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    rows = [f"## {name}", "", met, "", "| field | type | |", "| --- | --- | --- |"]
    for field, after in zip(found.body, [*found.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split()).replace("``", "`").replace("|", "\\|")
        kind = ast.unparse(field.annotation).replace("|", "\\|")
        rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | {text} |")
    return "\n".join(rows) + "\n"


def write_pages() -> int:
    """Write the pages, or compare them."""
    pages = {PAGE: reference(), OPTIONS: options(), RESULTS: results()}
    stale = [page for page, text in pages.items() if _read(page) != text]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is out of step: run {sys.argv[0]}")
        return int(bool(stale))
    for page in stale:
        page.write_text(pages[page], encoding="utf-8")
    return 0


def _read(page: Path) -> str | None:
    return page.read_text(encoding="utf-8") if page.exists() else None


if __name__ == "__main__":
    sys.exit(write_pages())
