"""Example tasks, run under Inspect with a scripted model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inspect_ai
import pytest
from inspect_ai.log import EvalSample

from inspect_tinker_plugin.testing import Script, scripted_model

FOLDER = Path(__file__).parents[2] / "example_tasks"
RunSamples = Callable[..., list[EvalSample]]


@pytest.fixture
def run_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_start_up_files: None
) -> RunSamples:
    """Run samples of an example task with a scripted model; return their logs."""
    monkeypatch.chdir(tmp_path)

    def run(
        spec: str, script: Script, *, grader: Script | None = None, **options: Any
    ) -> list[EvalSample]:
        (log,) = inspect_ai.eval(
            f"{FOLDER / spec}",
            model=scripted_model(script),
            model_roles={"grader": scripted_model(grader, name="grader")} if grader else None,
            log_dir=str(tmp_path / "logs"),
            display="none",
            **options,
        )
        assert log.status == "success", log.error
        assert log.samples
        return log.samples

    return run


def values(samples: list[EvalSample]) -> dict[Any, Any]:
    """Return the one score of each sample, by id."""
    scored = {}
    for sample in samples:
        assert sample.error is None, sample.error
        assert sample.scores is not None
        [scored[sample.id]] = [score.value for score in sample.scores.values()]
    return scored
