"""What import-linter (`tool.importlinter` in pyproject.toml) does not say about the source.

Read from the source, not from `sys.modules`: an import inside a function counts as late.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "inspect_tinker_plugin"
NAME = "inspect_tinker_plugin"
INTERNALS = "inspect_internals"

TINKER = ("tinker", "tinker_cookbook")
TINKER_FOLDERS = ("evaluate", "rl", "serve", "tokens", "train")

pytestmark = pytest.mark.xdist_group("sources")  # which are parsed once

# A test that needs a private name of Inspect says why, in a comment on the line.
REASON = "# private: "


@dataclass(frozen=True)
class Import:
    """One imported name, absolute, and how it is imported."""

    file: str
    line: int
    name: str
    late: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"

    def is_of(self, *packages: str) -> bool:
        return any(self.name == each or self.name.startswith(f"{each}.") for each in packages)


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _walk(tree, path, late=False, typing_only=False)


def _walk(node: ast.AST, path: Path, *, late: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        for name in _names(child, path):
            where = path.relative_to(ROOT).as_posix()
            line = getattr(child, "lineno", 0)
            yield Import(where, line, name, late=inside, typing_only=typing_only)
        yield from _walk(child, path, late=inside, typing_only=typing_only or guarded)


def _names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = path.relative_to(ROOT / "src").with_suffix("").parts[: -node.level]
            base = ".".join([*package, *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "templates")
)


@functools.cache
def all_imports() -> list[Import]:
    return [found for path in SOURCES for found in imports_of(path)]


def part_of(found: Import) -> str:
    """Folder of the package, or the module's own name at its top."""
    return Path(found.file).relative_to(PACKAGE.relative_to(ROOT)).parts[0]


def complain(wrong: list[Import]) -> None:
    assert not wrong, "\n".join(map(str, wrong))


def test_the_walk_sees_late_and_guarded_imports(tmp_path: Path) -> None:
    found = {each.name: each for each in imports_of(PACKAGE / "cli" / "rollout.py")}
    assert found["inspect_tinker_plugin.rl.rollouts.roll_group"].late
    assert found["tinker_cookbook.completers.TokenCompleter"].typing_only
    assert not found["dataclasses.replace"].late


def test_episodes_know_nothing_of_tinker() -> None:
    complain(
        [found for found in all_imports() if part_of(found) == "episode" and found.is_of(*TINKER)]
    )


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Late and typing-only imports count as well: a cycle means that something is misplaced."""
    modules = {module_of(path) for path in SOURCES}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for found in all_imports():
        target = found.name if found.name in modules else found.name.rpartition(".")[0]
        if target in modules:
            graph[module_of(ROOT / found.file)].add(target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])), pytrace=False)


def test_tinker_is_imported_in_its_folders_or_late() -> None:
    complain(
        [
            found
            for found in all_imports()
            if found.is_of(*TINKER)
            and part_of(found) not in TINKER_FOLDERS
            and not (found.late or found.typing_only)
        ]
    )


def is_private_in_inspect(found: Import) -> bool:
    return found.is_of("inspect_ai") and any(
        part.startswith("_") and not part.startswith("__") for part in found.name.split(".")
    )


def test_private_names_of_inspect_are_in_one_package() -> None:
    complain(
        [
            found
            for found in all_imports()
            if is_private_in_inspect(found) and part_of(found) != INTERNALS
        ]
    )


def test_tests_say_why_they_use_a_private_name_of_inspect() -> None:
    wrong = []
    for folder in ("tests", "example_tasks", "example_plugins", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            wrong += [
                found
                for found in imports_of(path)
                if is_private_in_inspect(found) and REASON not in lines[found.line - 1]
            ]
    complain(wrong)


def test_modules_say_what_they_are_for() -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        # every interpreter runs every line of that one: it has a comment instead
        if path.name != "_autorun.py"
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_facades_say_what_they_promise() -> None:
    """A package that imports names for others lists them in ``__all__``."""
    without = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        imports = any(found.file == path.relative_to(ROOT).as_posix() for found in all_imports())
        if path.name == "__init__.py" and imports and "__all__" not in text:
            names = [each for each in imports_of(path) if not each.is_of("__future__")]
            without += [str(path.relative_to(ROOT))] if names else []
    assert not without


def test_tests_lie_in_folders_named_after_what_they_test() -> None:
    others = {"contract", "example_tasks", "faults", "parity"}
    parts = {path.stem for path in (*PACKAGE.iterdir(), *PACKAGE.parent.iterdir())}
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("test_*.py"))}
    assert not folders - parts - others


def test_no_module_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in SOURCES if path.stem in nothing or path.parent.name in nothing]
