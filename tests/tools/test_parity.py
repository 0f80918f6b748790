"""An executor that lets Inspect run its tools changes nothing: the parity corpus still agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tools.runs import scope

from inspect_tinker_plugin.testing.cases import ParityCase, load_corpus
from inspect_tinker_plugin.testing.compare import compare_traces
from inspect_tinker_plugin.testing.sides import run_episode, run_eval
from inspect_tinker_plugin.tools import InspectExecutor, use_tool_executor

CORPUS = load_corpus(Path(__file__).resolve().parents[1] / "parity" / "corpus")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[pytest.mark.docker] if case.docker else [])
        for case in CORPUS
    ],
)
async def test_the_default_executor_keeps_parity(case: ParityCase) -> None:
    expected = await run_eval(case.task, case.script, options=case.options, ordered=case.ordered)
    with use_tool_executor(InspectExecutor(), scope()):
        found = await run_episode(
            case.task, case.script, options=case.options, ordered=case.ordered
        )
    assert not compare_traces(expected, found)
