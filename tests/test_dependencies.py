"""Everything that the package imports is declared with bounds, and nothing else is declared."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS_OF = {
    "inspect_rl_audit": ("audit",),
    "tinker_local": ("local",),
    "processes": ("ray",),
    "serve": ("serve", "verifiers"),
    "evaluate": ("agents",),
    "train": ("scout",),
}
"""Folders whose imports an extra may bring."""

DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic"}
"""Distributions of modules with another name; pydantic and its core are released together."""


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras]
    return [Requirement(text) for each in (PROJECT["dependencies"], *lists) for text in each]


def installed_by(given: Iterable[Requirement]) -> set[str]:
    """Return the distributions that requirements bring, their own included."""
    waiting, found = list(given), set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found:
            found.add(name)
            needed = map(Requirement, importlib.metadata.requires(name) or ())
            waiting += [r for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


@functools.cache
def imported() -> dict[str, set[str]]:
    """Distributions by the folder or package that imports them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    main = ROOT / "src" / PROJECT["name"].replace("-", "_")
    packages = {path.name for path in main.parent.iterdir()}
    for path in main.parent.rglob("*.py"):
        if path.is_relative_to(main / "templates"):  # packages of their own
            continue
        part = path.relative_to(main if path.is_relative_to(main) else main.parent).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for module in (name.partition(".")[0] for name in names):
                if module not in sys.stdlib_module_names and module not in packages:
                    found[part].add(canonicalize_name(DISTRIBUTIONS.get(module, module)))
    return found


def test_imports_are_declared() -> None:
    for part, names in imported().items():
        declared = {canonicalize_name(each.name) for each in requirements(*EXTRAS_OF.get(part, ()))}
        assert not names - declared, part


def test_what_is_declared_is_imported() -> None:
    used = set[str]().union(*imported().values())
    assert not {canonicalize_name(each.name) for each in requirements()} - used


def test_the_installation_without_pytorch_has_all_other_requirements() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    [named] = re.findall(r"^pip install (\"inspect-ai.*)$", page, re.MULTILINE)
    found = installed_by(map(Requirement, shlex.split(named)))
    missing = {canonicalize_name(each.name) for each in requirements()} - found
    assert missing == {"tinker", "tinker-cookbook"}
    assert "torch" not in found


def test_every_file_of_tests_is_imported_without_an_extra() -> None:
    """What needs one imports it in a function, or by ``pytest.importorskip``."""
    brought = installed_by(requirements("dev"))
    extra = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not brought & set(map(canonicalize_name, distributions))
    }
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not {name.partition(".")[0] for name in names} & extra, path


def test_requirements_have_a_lower_bound() -> None:
    assert not [str(each) for each in requirements() if ">=" not in str(each.specifier)]


def test_where_the_package_lives_is_said_in_one_place() -> None:
    [address] = PROJECT["urls"].values()
    folders = ("src", "docs", "tests", "scripts", "example_tasks", "example_plugins", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    files += list(ROOT.glob("*.md"))
    texts = {path: path.read_bytes() for path in files}
    assert len(texts) > 300
    assert not [str(path) for path, text in texts.items() if address.encode() in text]


def test_there_is_one_environment() -> None:
    """What `make setup` installs by default is what the demo, the tests and CI use."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [extras] = [line for line in makefile.splitlines() if line.startswith("EXTRAS ?=")]
    assert extras.partition("=")[2].strip().split(",") == ["dev", "agents", "local"]
    for path in (ROOT / ".ci" / "run", ROOT / ".github" / "workflows" / "check.yml"):
        text = path.read_text(encoding="utf-8")
        assert "EXTRAS" not in text
        assert not re.search(r"pip install .*\[", text)
    # Each extra is tried alone, and without any, every night; `verifiers`, which cannot be
    # installed beside the lock's openai 3, in an environment of its own.
    nightly = (ROOT / ".github" / "workflows" / "compat.yml").read_text(encoding="utf-8")
    others = set(PROJECT["optional-dependencies"]) - {"dev", "verifiers"}
    assert "run: make clients" in nightly
    [alone] = re.findall(r"extras: \[(.*)\]", nightly)
    assert alone == ", ".join(['"dev"', *(f'"dev,{each}"' for each in sorted(others))])
