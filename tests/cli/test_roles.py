"""A task may ask for the model of ``--model-role`` while it is made, as under `inspect eval`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from inspect_tinker_plugin.cli.main import rl

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def judged():
    judge = get_model(role="judge")
    assert (str(judge), judge.role) == ("mockllm/model", "judge"), f"the judge is {judge}"
    return Task(dataset=[Sample(id=1, input="?", target="a")], solver=generate(), scorer=includes())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "rollout FILE",
        "check FILE --side messages",
        "bench FILE --episodes 2",
        "export FILE --output OUT",
        pytest.param("export FILE --output OUT --workers 2", marks=pytest.mark.nightly),
        "audit FILE --out OUT --fail-on never",
        "train FILE --local --dry-run",
    ],
)
def test_a_role_is_its_model_while_the_task_is_made(command: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    places = {"FILE": str(tmp_path / "task.py"), "OUT": str(tmp_path / "out")}
    args = [places.get(each, each) for each in command.split()]
    result = CliRunner().invoke(rl, [*args, "--model-role", "judge=mockllm/model"])
    assert result.exit_code == 0, result.output
