"""``inspect rl new``: writes packages to start from, or one of a task for verifiers' hub."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from inspect_tinker_plugin.cli.reporting import reported
from inspect_tinker_plugin.processes import local_path

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Packages that work as they are; only names are replaced."""

PLACEHOLDER = "newname"
TASK, TASK_PACKAGE = "newname_tasks/stock", "newname-tasks"
"""The task of a package for verifiers, and the distribution that has it."""


@click.command("new")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--verifiers",
    "task",
    metavar="TASK",
    help="Write one package instead, which verifiers and prime-rl load by its name: TASK, of an "
    "installed package, as a taskset.",
)
@reported
def new_command(folder: Path, task: str | None) -> None:
    """Write a task package and a plugin package into DIR, to start from.

    The first has an agent with a tool; the second a reward, a tool executor and a sandbox
    provider. Each has tests that pass, and both are named after DIR.
    """
    folder = local_path(folder)
    name = package_name(folder)
    if folder.exists() and any(folder.iterdir()):
        raise click.ClickException(f"{folder} is not empty; name a new folder")
    if task is None:
        kind, names = "start", {}
        lines = f"pip install -e {name}-tasks -e {name}-plugin pytest\n  pytest\n"
        lines += f"  inspect rl check {name.replace('-', '_')}_tasks/stock"
    else:
        kind, names = "verifiers", {TASK: task, TASK_PACKAGE: task_package(task)}
        lines = f"pip install -e .\n  vf-eval {name} --help"
    try:
        written = write_packages(TEMPLATES / kind, folder, name, names)
    except OSError as error:
        raise click.ClickException(f"cannot write to {folder}: {error.strerror}") from error
    for path in written:
        click.echo(path)
    click.echo(f"\nTry it:\n\n  cd {folder}\n  {lines}")


def task_package(task: str) -> str:
    """Return the distribution that a registered task comes from.

    Raises:
        TaskNotFoundError: There is no such task.
        click.ClickException: The task is not of an installed package.
    """
    from inspect_tinker_plugin.tasks.loading import find_registered

    package = task.split("/")[0]
    found = packages_distributions().get(package) or [
        each.dist.name  # after `pip install -e` no module is recorded
        for each in entry_points(group="inspect_ai")
        if each.module.split(".")[0] == package and each.dist
    ]
    if not found:
        raise click.ClickException(
            f"{task} is not in an installed package, so no package can depend on it; name a task "
            "as package/task (`inspect rl new DIR` writes a package for tasks)"
        )
    find_registered(task)
    return found[0]


def package_name(folder: Path) -> str:
    """Return the name of the packages in a folder, as an index of packages writes names."""
    name = re.sub(r"[-_. ]+", "-", folder.absolute().name).lower().strip("-")
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise click.ClickException(
            f"{folder.name!r} cannot name a package; use letters, digits and dashes"
        )
    return name


def write_packages(template: Path, folder: Path, name: str, names: Mapping[str, str]) -> list[Path]:
    """Write a template with names in place of its own, all of it or nothing; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=folder) as part:
        written = _write_files(template, Path(part), name, names)
        for each in Path(part).iterdir():
            each.rename(folder / each.name)
        return [folder / path.relative_to(part) for path in written]


def _write_files(template: Path, folder: Path, name: str, names: Mapping[str, str]) -> list[Path]:
    written = []
    for source in sorted(template.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        path = folder / _rename_package(source.relative_to(template).as_posix(), name)
        text = source.read_text(encoding="utf-8")
        for known, new in names.items():
            text = text.replace(known, new)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_rename_package(text, name), encoding="utf-8")
        written.append(path)
    return written


def _rename_package(text: str, name: str) -> str:
    module = name.replace("-", "_")
    text = text.replace(f"{PLACEHOLDER}-", f"{name}-").replace(PLACEHOLDER, module)
    return text.replace(PLACEHOLDER.title(), module.title().replace("_", ""))
