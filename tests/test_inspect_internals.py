from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inspect_tinker_plugin import inspect_internals
from inspect_tinker_plugin.inspect_internals import (
    OPTIONAL_NAMES,
    PRIVATE_ATTRIBUTES,
    PRIVATE_NAMES,
    SUPPORTED_INSPECT,
)

SOURCES = sorted(Path(inspect_internals.__file__).parent.glob("*.py"))


def imported_private_names(source: Path) -> set[str]:
    tree = ast.parse(source.read_text())
    names, modules = set(), {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("inspect_ai"):
            continue
        for alias in node.names:
            if "._" in str(node.module):
                names.add(f"{node.module}:{alias.name}")
            elif alias.name.startswith("_"):
                modules[alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=alias_name), attr=attr) if alias_name in modules:
                names.add(f"{modules[alias_name]}:{attr}")
    return names


def test_every_private_import_is_listed_and_every_listed_name_is_imported() -> None:
    assert set().union(*map(imported_private_names, SOURCES)) == set(PRIVATE_NAMES)


@pytest.mark.parametrize("name", [*PRIVATE_NAMES, *OPTIONAL_NAMES])
def test_every_private_name_says_why(name: str) -> None:
    assert len({**PRIVATE_NAMES, **OPTIONAL_NAMES}[name].split()) >= 3


def test_a_release_without_an_optional_name_takes_the_long_way() -> None:
    code = (
        "import inspect_ai.util._limit as m; del m.turn_count\n"
        "from inspect_tinker_plugin import inspect_internals as internals\n"
        "print(internals.knows_model_calls(), internals.optional_names())\n"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["False", "None"]


@pytest.mark.parametrize(("owner", "attribute"), PRIVATE_ATTRIBUTES)
def test_every_private_attribute_exists(owner: type, attribute: str) -> None:
    set_by_init = owner.__init__.__code__.co_names  # type: ignore[misc]  # looked at, not called
    assert hasattr(owner, attribute) or attribute in set_by_init


@pytest.mark.parametrize("name", ["run:create_eval_sample", "generate:task_generate"])
def test_an_unsupported_inspect_is_one_clear_error(name: str) -> None:
    module, _, attribute = name.partition(":")
    code = (
        f"import inspect_ai._eval.task.{module} as m; del m.{attribute}\n"
        "from inspect_tinker_plugin.contracts.errors import VersionError\n"
        "try:\n"
        "    import inspect_tinker_plugin.inspect_internals\n"
        "except VersionError as error:\n"
        "    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    [line] = out.stdout.strip().splitlines()
    assert attribute in line
    assert f"supported: {SUPPORTED_INSPECT}" in line


PAGE = Path(__file__).parents[1] / "docs" / "upstream.md"


def test_each_private_name_has_a_proposal_that_would_let_it_go() -> None:
    attributes = {f"{owner.__name__}.{name}" for owner, name in PRIVATE_ATTRIBUTES}
    named = {*PRIVATE_NAMES, *OPTIONAL_NAMES, *attributes}
    wanted = {name.removeprefix("inspect_ai.") for name in named}
    listed = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE))
    assert listed - {"_cli.main:inspect"} == wanted
