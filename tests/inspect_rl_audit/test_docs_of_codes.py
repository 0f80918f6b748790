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


def test_the_page_has_severity_cause_example_and_cure_of_every_code() -> None:
    told = {code: (row[1], row[2], row[4]) for code, row in ROWS.items()}
    assert told == {c.name: (str(c.severity), c.meaning, c.advice) for c in CODES.values()}
    assert all(len(row[3]) > 10 for row in ROWS.values())


def test_every_code_can_be_found() -> None:
    folder = ROOT / "src" / "inspect_rl_audit"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert [name for name in CODES if f'"{name}"' not in text] == []
