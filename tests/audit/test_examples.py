"""The example tasks have no grave finding; the earlier version of a fixed one has."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspect_tinker_plugin.audit import AuditOptions, Severity, run_audit
from inspect_tinker_plugin.tasks.reference import resolve_task

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    path
    for path in sorted((ROOT / "example_tasks").glob("*.py"))
    if "@task" in path.read_text(encoding="utf-8")
    and path.stem != "diary"  # starts a program of its own for every probe
]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
async def test_nothing_grave_is_found_in_an_example(path: Path, tmp_path: Path) -> None:
    task = resolve_task(str(path)).task
    report = await run_audit(task, AuditOptions(out=tmp_path, samples=3))
    grave = [(f.code, f.message) for f in report.findings if f.severity is Severity.HIGH]
    assert not grave
    assert "probe-failed" not in {f.code for f in report.findings}


@pytest.mark.slow
async def test_what_was_wrong_with_the_coding_example_is_found(tmp_path: Path) -> None:
    task = resolve_task(f"{Path(__file__).parent / 'corpus' / 'write_function_before.py'}").task
    options = AuditOptions(out=tmp_path, samples=2, probes=["replies"])
    report = await run_audit(task, options)
    grave = {f.code for f in report.findings if f.severity is Severity.HIGH}
    assert {"code-exits-early", "code-patches-checks", "code-reads-checks"} <= grave
