"""The documentation is true: links lead somewhere, and examples run as they are.

The examples name models that would be downloaded. They run with the shipped tokenizer instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Command

from inspect_tinker_plugin.testing import tokenizer_path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
EXECUTED = ["README.md"]
"""Documents whose examples are run from top to bottom; the others are at least compiled."""

MODEL = re.compile(r'get_tokenizer\("[^"]+"\)')
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    document: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT).as_posix()}:{self.line}"


def examples(document: Path) -> Iterator[Example]:
    text = document.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        yield Example(document, line, found[1], found[2].strip(), found[3])


EXAMPLES = [example for document in DOCUMENTS for example in examples(document)]
COMMANDS = [
    pytest.param(shlex.split(command), id=f"{example} {command[:40]}")
    for example in EXAMPLES
    if example.language == "bash" and example.document.name in EXECUTED
    for command in example.text.splitlines()
    if command.startswith("inspect rl ")
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_answers_of_where_is_are_modules_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where is")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_/]+\.py)`", table))
    package = ROOT / "src" / "inspect_tinker_plugin"
    assert len(named) >= 12
    assert not [path for path in named if not (package / path).is_file()]


def anchors(file: Path) -> set[str]:
    """Anchors that a Markdown file's headings get on the code hosts."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.language == "python"], ids=str
)
def test_python_examples_compile(example: Example) -> None:
    compile(example.text, str(example), "exec", dont_inherit=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with the example tasks in it, where examples may write."""
    (tmp_path / "example_tasks").symlink_to(ROOT / "example_tasks")
    return tmp_path


@pytest.mark.forks
@pytest.mark.parametrize("name", EXECUTED)
def test_python_examples_run_from_top_to_bottom(name: str, workspace: Path) -> None:
    code = "\n".join(each.text for each in examples(ROOT / name) if each.language == "python")
    code = MODEL.sub(f"get_tokenizer({str(tokenizer_path())!r})", code)
    run("-c", code, folder=workspace)


def titled(name: str) -> dict[str, str]:
    """The blocks of a page that have a title."""
    return {each.title: each.text for each in examples(ROOT / "docs" / name) if each.title}


@pytest.mark.forks
def test_the_loop_of_ones_own_runs_and_prints_what_the_page_says(workspace: Path) -> None:
    shown = titled("training.md")
    code = MODEL.sub(f"get_tokenizer({str(tokenizer_path())!r})", shown['title="own_loop.py"'])
    assert run("-c", code, folder=workspace) == shown['title="what own_loop.py prints"']


def test_the_scripts_on_the_page_are_scripts(tmp_path: Path) -> None:
    from inspect_tinker_plugin.testing.replies import read_script

    lengths = {}
    for title, text in titled("rollouts.md").items():
        file = tmp_path / title.split('"')[1]
        file.write_text(text)
        lengths[file.stem] = [len(episode) for episode in read_script(file)]
    assert lengths == {"one_episode": [2], "two_episodes": [2, 1]}


def test_the_tests_on_the_page_about_hooks_pass() -> None:
    names: dict[str, Any] = {}
    exec(titled("hooks.md")['title="test_my_plugin.py"'], names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


@pytest.mark.forks
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: list[str], workspace: Path) -> None:
    assert command[:2] == ["inspect", "rl"]
    run(*command[2:], folder=workspace)


def run(*words: str, folder: Path) -> str:
    done = Command(*words, cwd=folder).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    documents = [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
    missing = [
        path.name
        for path in documents
        if path.name != "README.md"
        and f"({path.relative_to(ROOT / 'docs').as_posix()})" not in index
    ]
    assert not missing
