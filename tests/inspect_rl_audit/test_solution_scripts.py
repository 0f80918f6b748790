"""A script that solves samples is the right answer: run with the task's tool, or from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Solver, generate
from tests.inspect_rl_audit.corpus.sandboxes import agent, by_exit_code

from inspect_rl_audit import AuditOptions, AuditReport, Severity, run_audit
from inspect_tinker_plugin.contracts.errors import ConfigError

CHECK = "from double import double; assert double(21) == 42"
SOLUTION = (
    "#!/bin/bash\nset -e\nx=(a b)\necho 'def double(x): return 2 * x' > ${x[0]/a/double}.py\n"
)


def double(solver: Solver) -> Task:
    return Task(
        dataset=[Sample(id=n, input="Make double.py define double(x).") for n in (1, 2)],
        solver=solver,
        scorer=by_exit_code("python3", "-B", "-c", CHECK),
        sandbox="local",
    )


async def audited(task: Task, folder: Path, script: str) -> AuditReport:
    file = folder / "solve.sh"
    file.write_text(script)
    options = AuditOptions(out=folder / "out", probes=["gold"], gold=str(file))
    return await run_audit(task, options)


@pytest.mark.parametrize("solver", [agent(), generate()], ids=["by the tool", "from outside"])
async def test_a_solution_earns_the_full_reward(solver: Solver, tmp_path: Path) -> None:
    report = await audited(double(solver), tmp_path, SOLUTION)
    assert report.findings == []
    assert report.summary["mean_reward"] == {"unknowing": 0.0, "gold": 1.0}


@pytest.mark.parametrize("solver", [agent(), generate()], ids=["by the tool", "from outside"])
async def test_a_solution_that_does_not_solve_is_reported(solver: Solver, tmp_path: Path) -> None:
    report = await audited(double(solver), tmp_path, "echo no such thing >&2; exit 3\n")
    [found] = report.findings
    assert found.code == "gold-fails"
    assert "solve.sh" in found.message
    assert "no such thing" in str(found.evidence)


async def test_a_named_answer_that_earns_nothing_is_not_taken_for_the_target(
    tmp_path: Path,
) -> None:
    task = double(agent())
    for sample in task.dataset:
        sample.metadata = {"solution": SOLUTION}
    options = AuditOptions(out=tmp_path, probes=["gold"], gold="solution")
    [found] = (await run_audit(task, options)).findings
    assert found.code == "gold-fails"
    assert found.severity is Severity.HIGH
    assert found.message.startswith("The field 'solution' (--gold) as the answer earns nothing on ")
    assert "name the answer" not in found.message


async def test_an_audit_is_not_continued_with_another_solution(tmp_path: Path) -> None:
    file = tmp_path / "solve.sh"
    options = AuditOptions(out=tmp_path / "out", probes=["gold"], gold=str(file), budget=["1"])
    file.write_text("exit 3\n")
    await run_audit(double(agent()), options)
    file.write_text(SOLUTION)
    with pytest.raises(ConfigError, match=r"holds another audit \(it differs in gold\)"):
        await run_audit(double(agent()), options)


@pytest.mark.parametrize("gold", ["nowhere.sh", "no_such_field"])
async def test_a_source_that_names_nothing_is_refused(gold: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=gold):
        await run_audit(double(agent()), AuditOptions(out=tmp_path, gold=gold))
    assert not (tmp_path / "logs").exists()


async def test_a_script_needs_a_sandbox(tmp_path: Path) -> None:
    task = Task(dataset=[Sample(id=1, input="x", target="y")])
    with pytest.raises(ConfigError, match="sandbox"):
        await audited(task, tmp_path, SOLUTION)
