"""Docstrings, comments, messages and pages use plain words: the list is in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inspect_tinker_plugin.contracts.wording import counted, part_of

ROOT = Path(__file__).parents[1]
PROSE = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "example_plugins").rglob("*.py")),
    *sorted((ROOT / "example_tasks").rglob("*.py")),
    *sorted((ROOT / "benchmarks").iterdir()),
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "src").rglob("native/*.[ch]")),
    ROOT / "Makefile",
    ROOT / "README.md",
]

COUNTED = (
    r"(?:once|twice|groups|episodes|lines|logs|tokens|seconds|steps|calls|rollouts|times|rows|bytes"
    r"|files|modules|datums|sandboxes|containers|samples|characters|ms)"
)
PER = (
    r"(?:batch|process|step|episode|group|turn|sample|call|dataset|run|reply|token|part|module"
    r"|second|minute|hour|row|file|folder|worker|node|pass)"
)
WRONG = {
    "per": rf"\b{COUNTED} an? {PER}\b",
    "once": r"\b(?:said|told) once\b",
    "many": r"\bfor so long\b|\bat the most\b|\bfirst so many\b",
    "compare": r"\bholds? \S+ against\b",
    "riddles": r"\bnone of this package's business\b",
}


@pytest.mark.parametrize("name", WRONG)
def test_no_page_or_module_uses_a_phrase_that_readers_stumble_on(name: str) -> None:
    pattern = re.compile(WRONG[name].replace(" ", r"\s+(?:#\s+)?"))
    found = [
        f"{path.relative_to(ROOT)}: {match.group(0)!r}"
        for path in PROSE
        if path.is_file() and path.suffix in {".py", ".md", ".c", ".h", ""}
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


NOUN = (
    r"(?:turn|sample|episode|group|token|step|row|log|worker|message|file|call|task|reward|finding"
    r"|rollout|attempt|epoch|error|member)s"
)
BARE = re.compile(rf"\{{[^{{}}]*\}} (?:of \{{[^{{}}]*\}} )?{NOUN}\b")


def test_counts_are_written_with_their_nouns_in_one_place() -> None:
    """Not as ``{n} turns``, which says "1 turns"."""
    package = ROOT / "src" / "inspect_tinker_plugin"
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in BARE.finditer(line)
        if 'f"' in line[: match.start()]
    ]
    assert not found, "use counted() or part_of():\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 turn"), (1.0, "1 turn"), (0, "0 turns"), (1.5, "1.5 turns")]
)
def test_a_count_agrees_with_its_noun(count: float, text: str) -> None:
    assert counted(count, "turn") == text


def test_a_part_agrees_with_the_noun_of_the_whole() -> None:
    assert part_of(1, 1, "sample") == "1 of 1 sample"
    assert part_of(1, 1200, "sample") == "1 of 1,200 samples"
