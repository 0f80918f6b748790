"""The audit finds planted defects under their codes, and nothing grave in sound tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from inspect_ai import Task
from tests.conftest import DOCKER_TEST_IMAGE
from tests.inspect_rl_audit.corpus import (
    CORPUS,
    ELSEWHERE,
    Planted,
    answers,
    sandboxes,
)

from inspect_rl_audit import CODES, AuditOptions, AuditReport, Severity, run_audit
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.tasks.reference import resolve_task


async def audited(task: Task, folder: Path, **options: object) -> AuditReport:
    given: dict[str, object] = {"samples": 4, **options}
    return await run_audit(task, AuditOptions(out=folder, **given))  # type: ignore[arg-type]


def usual_first(cases: Iterable[Planted], usual: set[str]) -> list[ParameterSet]:
    """Mark all cases but the usual ones as long."""
    params = []
    for case in cases:
        marks = [] if case.name in usual else [pytest.mark.long]
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params


ONE_PER_PROBE = {
    *("a_careless_dataset", "nearly_always_yes", "a_target_is_taken_for_a_pattern"),
    *("tests_after_the_reply", "tests_beside_the_work", "to the last sign", "only what is new"),
    "trained_on_what_is_known",
}
"""The tasks of a usual run of tests, in the order of the probes; the others are long."""


@pytest.mark.parametrize("case", usual_first([c for c in CORPUS if not c.docker], ONE_PER_PROBE))
async def test_planted_defects_are_found(case: Planted, tmp_path: Path) -> None:
    if "test-near-overlap" in case.codes:
        pytest.importorskip("datasketch", reason="the extra `audit`")
    report = await audited(case.make(), tmp_path, **case.options)
    found = {each.code for each in report.findings}
    assert set(case.codes) <= found
    assert "probe-failed" not in found


USUAL = ("match", "clean_choices_with_luck", "clean_agent")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in USUAL else [pytest.mark.long]) for n in answers.CLEAN]
)
async def test_nothing_grave_is_found_where_nothing_is_wrong(name: str, tmp_path: Path) -> None:
    report = await audited(answers.CLEAN[name](), tmp_path)
    own = [each for each in report.findings if each.code in CODES]  # not those of other plugins
    grave = [each for each in own if each.severity.at_least(Severity.MEDIUM)]
    allowed = {"hedged-answer"} if name == "includes" else set()
    assert {each.code for each in grave} <= allowed, grave
    assert not [each for each in own if each.severity is Severity.HIGH]
    assert ("judge-missing" in {each.code for each in own}) == ("script" in name)


@pytest.mark.docker
@pytest.mark.parametrize(
    "case", usual_first([c for c in CORPUS if c.docker], {"everything_is_left_as_it_was"})
)
async def test_a_defect_that_needs_a_container_is_found(case: Planted, tmp_path: Path) -> None:
    report = await audited(case.make(), tmp_path, samples=2, probes=["sandbox"])
    assert set(case.codes) <= {each.code for each in report.findings}


@pytest.mark.docker
async def test_persistence_pays_nothing_where_the_policy_never_was(tmp_path: Path) -> None:
    """What an audit recommends for such attacks ends them: its cheats are run with it on."""
    solution = tmp_path / "solve.sh"
    solution.write_text("echo 'def double(x): return 2 * x' > /tmp/double.py\n")
    report = await audited(
        sandboxes.everything_is_left_as_it_was(),
        tmp_path / "out",
        samples=1,
        probes=["sandbox", "gold"],
        gold=str(solution),
        dataset=DatasetOptions(score_sandbox="fresh", score_files=["/tmp/double.py"]),
    )
    assert report.summary["mean_reward"] == {"unknowing": 0.0, "gold": 1.0}
    assert not {each.code for each in report.findings} & set(sandboxes.PERSISTENT)
    played = {name for name in report.summary["policies"] if name.startswith("cheat:")}
    assert {"cheat:overwrite-tests", "cheat:shadow", "cheat:leave-process"} <= played
    assert all("--score-sandbox fresh" in CODES[code].advice for code in sandboxes.PERSISTENT)


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.parametrize(
    ("make", "probes"),
    [(sandboxes.clean_search, ()), (sandboxes.clean_tests_of_root, ("sandbox",))],
    ids=["search", "tests of root"],
)
async def test_a_sound_container_has_nothing_grave(
    make: Callable[[], Task], probes: tuple[str, ...], tmp_path: Path
) -> None:
    report = await audited(make(), tmp_path, samples=2, probes=probes)
    assert not [f for f in report.findings if f.severity.at_least(Severity.MEDIUM)]


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
    report = await audited(task, tmp_path, samples=3)
    grave = [(f.code, f.message) for f in report.findings if f.severity is Severity.HIGH]
    assert not grave
    assert "probe-failed" not in {f.code for f in report.findings}


@pytest.mark.nightly
@pytest.mark.docker
async def test_with_an_engine_an_example_has_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheat on this machine could read the targets; with an engine, the task is not run here."""
    path = str(ROOT / "example_tasks" / "log_search.py")
    options: dict[str, Any] = {"samples": 2, "wide": 2, "probes": ["sandbox"]}
    here = await audited(resolve_task(path).task, tmp_path / "a", **options)
    [found] = [f for f in here.findings if f.severity.at_least(Severity.MEDIUM)]
    assert found.code == "local-sandbox"
    assert "log_search.jsonl" in found.message
    assert "deploy" in str(found.evidence)
    monkeypatch.setenv("EXAMPLE_TASKS_IMAGE", DOCKER_TEST_IMAGE)
    boxed = await audited(resolve_task(path).task, tmp_path / "b", **options)
    assert not boxed.findings


def test_every_code_has_a_planted_case() -> None:
    planted = {code for case in CORPUS for code in case.codes}
    assert planted | set(ELSEWHERE) == set(CODES)
    assert not planted & set(ELSEWHERE)
    assert {case.name for case in CORPUS} >= ONE_PER_PROBE
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text()
