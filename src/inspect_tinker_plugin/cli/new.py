"""``inspect rl new``: writes a package with a task and one with hooks, each with its tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

import click

from inspect_tinker_plugin.cli.reporting import reported

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Two packages that work as they are; only their name is replaced."""

PLACEHOLDER = "newname"


@click.command("new")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@reported
def new_command(folder: Path) -> None:
    """Write a task package and a plugin package into DIR, to start from.

    The first has an agent with a tool; the second a reward, a tool executor and a sandbox
    provider. Each has tests that pass, and both are named after DIR.
    """
    name = package_name(folder)
    if folder.exists() and any(folder.iterdir()):
        raise click.ClickException(f"{folder} is not empty; name a new folder")
    for path in write_packages(folder, name):
        click.echo(path)
    click.echo(
        f"\nTry them:\n\n  cd {folder}\n  pip install -e {name}-tasks -e {name}-plugin pytest\n"
        f"  pytest\n  inspect rl check {name.replace('-', '_')}_tasks/stock"
    )


def package_name(folder: Path) -> str:
    """Return the name of the packages in a folder, as an index of packages writes names."""
    name = re.sub(r"[-_. ]+", "-", folder.absolute().name).lower()
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise click.ClickException(
            f"{folder.name!r} cannot name a package; use letters, digits and dashes"
        )
    return name


def write_packages(folder: Path, name: str) -> list[Path]:
    """Write the templates with a name in place of theirs, and return the files."""
    written = []
    for template in sorted(TEMPLATES.rglob("*")):
        if template.is_dir() or "__pycache__" in template.parts:
            continue
        path = folder / _renamed(template.relative_to(TEMPLATES).as_posix(), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(template.read_text(encoding="utf-8"), name), encoding="utf-8")
        written.append(path)
    return written


def _renamed(text: str, name: str) -> str:
    module = name.replace("-", "_")
    text = text.replace(f"{PLACEHOLDER}-", f"{name}-").replace(PLACEHOLDER, module)
    return text.replace(PLACEHOLDER.title(), module.title().replace("_", ""))
