"""The audit finds planted defects under their codes, and nothing grave in sound tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from inspect_ai import Task
from tests.inspect_docker_pool.conftest import missing_engine
from tests.inspect_rl_audit.corpus import (
    CORPUS,
    ELSEWHERE,
    ONE_PER_PROBE,
    Planted,
    answers,
    sandboxes,
)

from inspect_rl_audit import CODES, AuditOptions, AuditReport, Severity, run_audit


async def audited(task: Task, folder: Path, **options: object) -> AuditReport:
    given: dict[str, object] = {"samples": 4, **options}
    return await run_audit(task, AuditOptions(out=folder, **given))  # type: ignore[arg-type]


def usual_first(cases: Iterable[Planted], usual: set[str]) -> list[ParameterSet]:
    """Mark all cases but the usual ones as long."""
    params = []
    for case in cases:
        marks = [] if case.make.__name__ in usual else [pytest.mark.long]
        params.append(pytest.param(case, id=case.id, marks=marks))
    return params


@pytest.mark.parametrize("case", usual_first([c for c in CORPUS if not c.docker], ONE_PER_PROBE))
async def test_a_planted_defect_is_found(case: Planted, tmp_path: Path) -> None:
    if "near" in case.codes[0]:
        pytest.importorskip("datasketch", reason="the extra `audit`")
    report = await audited(case.make(), tmp_path, **case.options)
    found = {each.code for each in report.findings}
    assert set(case.codes) <= found
    assert "probe-failed" not in found


USUAL = (answers.clean_match, answers.clean_choices_with_luck, answers.clean_agent)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(m, id=m.__name__, marks=[] if m in USUAL else [pytest.mark.long])
        for m in answers.CLEAN
    ],
)
async def test_nothing_grave_is_found_where_nothing_is_wrong(
    make: Callable[[], Task], tmp_path: Path
) -> None:
    report = await audited(make(), tmp_path)
    own = [each for each in report.findings if each.code in CODES]  # not those of other plugins
    grave = [each for each in own if each.severity.at_least(Severity.MEDIUM)]
    allowed = {"hedged-answer"} if make is answers.clean_includes else set()
    assert {each.code for each in grave} <= allowed, grave
    assert not [each for each in own if each.severity is Severity.HIGH]


@pytest.fixture
def engine() -> None:
    if (reason := missing_engine()) is not None:
        pytest.skip(reason)


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "case", usual_first([c for c in CORPUS if c.docker], {"the_image_remembers"})
)
async def test_a_defect_that_needs_a_container_is_found(case: Planted, tmp_path: Path) -> None:
    report = await audited(case.make(), tmp_path, samples=2, probes=["sandbox"])
    assert set(case.codes) <= {each.code for each in report.findings}


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.usefixtures("engine")
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


def test_every_code_has_a_planted_case() -> None:
    planted = {code for case in CORPUS for code in case.codes}
    assert planted | set(ELSEWHERE) == set(CODES)
    assert not planted & set(ELSEWHERE)
    assert {case.make.__name__ for case in CORPUS} >= ONE_PER_PROBE
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text()
