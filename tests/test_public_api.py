"""The exports of the package: sorted, complete, loadable, and cheap until they are used."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.packages import run

import inspect_tinker_plugin

FACADES = [
    "inspect_docker_pool",
    "inspect_rl_audit",
    "inspect_tinker_plugin",
    "inspect_tinker_plugin.cli",
    "inspect_tinker_plugin.logs",
    "inspect_tinker_plugin.options",
    "inspect_tinker_plugin.plugins",
    "inspect_tinker_plugin.processes",
    "inspect_tinker_plugin.rewards",
    "inspect_tinker_plugin.rl",
    "inspect_tinker_plugin.serve",
    "inspect_tinker_plugin.tasks",
    "inspect_tinker_plugin.testing",
    "inspect_tinker_plugin.tools",
    "inspect_tinker_plugin.train",
    "tinker_local",
]

HEAVY = ["chz", "datasets", "docker", "inspect_ai", "tinker", "tinker_cookbook", "torch"]


def in_order(name: str) -> tuple[bool, bool, str]:
    """Constants, classes, functions: the order that the linter keeps."""
    return not name.isupper(), not name[0].isupper(), name


@pytest.mark.parametrize("name", FACADES)
def test_all_is_sorted_and_every_name_in_it_exists(name: str) -> None:
    facade = importlib.import_module(name)
    assert list(facade.__all__) == sorted(set(facade.__all__), key=in_order)
    for exported in facade.__all__:
        assert getattr(facade, exported) is not None


def test_all_is_what_the_package_shows() -> None:
    visible = [name for name in dir(inspect_tinker_plugin) if not name.startswith("_")]
    assert visible == inspect_tinker_plugin.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="as_rl_datasets"):
        getattr(inspect_tinker_plugin, "as_rl_datasets")  # noqa: B009  # mypy knows better


def test_the_version_is_the_installed_one() -> None:
    assert inspect_tinker_plugin.__version__ == version("inspect-tinker-plugin")


def test_a_source_folder_that_is_not_installed_has_no_release(tmp_path: Path) -> None:
    source = Path(inspect_tinker_plugin.__file__).parent
    (tmp_path / "inspect_tinker_plugin").symlink_to(source)
    code = "import inspect_tinker_plugin as p; print(p.__version__)"
    there = f"import sys; sys.path.append({str(tmp_path)!r}); {code}"
    assert run(sys.executable, "-I", "-S", "-c", there).strip() == "0+unknown"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, inspect_tinker_plugin, inspect_tinker_plugin.cli.main\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"
