"""The example tasks have no grave finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import DOCKER_TEST_IMAGE

from inspect_rl_audit import AuditOptions, Severity, run_audit
from inspect_tinker_plugin.tasks.reference import resolve_task

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    path
    for path in sorted((ROOT / "example_tasks").glob("*.py"))
    if "@task" in path.read_text(encoding="utf-8")
    and path.stem != "diary"  # starts a program of its own for every probe
]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem == "word_problems" else [pytest.mark.long])
        for p in EXAMPLES
    ],
)
async def test_nothing_grave_is_found_in_an_example(path: Path, tmp_path: Path) -> None:
    task = resolve_task(str(path)).task
    report = await run_audit(task, AuditOptions(out=tmp_path, samples=3))
    grave = [(f.code, f.message) for f in report.findings if f.severity is Severity.HIGH]
    assert not grave
    assert "probe-failed" not in {f.code for f in report.findings}


@pytest.mark.slow
@pytest.mark.docker
async def test_with_an_engine_an_example_has_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheat on this machine could read the targets; with an engine, the task is not run here."""
    path = str(ROOT / "example_tasks" / "log_search.py")
    options: dict[str, Any] = {"samples": 2, "wide": 2, "probes": ["sandbox"]}
    here = await run_audit(resolve_task(path).task, AuditOptions(out=tmp_path / "a", **options))
    [found] = [f for f in here.findings if f.severity.at_least(Severity.MEDIUM)]
    assert found.code == "local-sandbox"
    assert "log_search.jsonl" in found.message
    assert "deploy" in str(found.evidence)
    monkeypatch.setenv("EXAMPLE_TASKS_IMAGE", DOCKER_TEST_IMAGE)
    boxed = await run_audit(resolve_task(path).task, AuditOptions(out=tmp_path / "b", **options))
    assert not boxed.findings
