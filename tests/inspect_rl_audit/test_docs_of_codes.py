"""docs/audit.md lists every code and every probe, in the words of the code itself."""

from __future__ import annotations

import re
from pathlib import Path

from inspect_rl_audit import CODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
ROWS = {
    row[0].strip(" `"): [cell.strip() for cell in row]
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(row := re.split(r"(?<!\\)\|", line.strip("|"))) == 5
}


def test_a_code_has_cause_example_and_cure_on_the_page() -> None:
    for code in CODES.values():
        _, severity, cause, example, cure = ROWS[code.name]
        assert (severity, cause, cure) == (str(code.severity), code.meaning, code.advice)
        assert len(example) > 10


def test_the_page_has_no_code_that_does_not_exist() -> None:
    assert set(ROWS) == set(CODES)


def test_every_code_can_be_found() -> None:
    folder = ROOT / "src" / "inspect_rl_audit"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert [name for name in CODES if f'"{name}"' not in text] == []
