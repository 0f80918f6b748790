"""Tasks that are evaluated beside a training: figures, failures and the samples trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval_async
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log
from tests.evaluate.test_provider import Client
from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME

from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.evaluate.overlap import TrainingRecord
from inspect_tinker_plugin.tasks.reference import resolve_task
from inspect_tinker_plugin.tasks.samples import sample_hash
from inspect_tinker_plugin.testing import scripted_model, tokenizer_path
from inspect_tinker_plugin.train.data import EvalTasksBuilder, EvaluatorBuilder

TASKS = """
from inspect_ai import Epochs, Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, includes, match, mean, scorer
from inspect_ai.solver import generate, solver

@solver
def fails_on(word):
    async def solve(state, generate):
        if word and word in state.input_text:
            raise ValueError("no such fruit")
        return state
    return solve

@task
def fruit(bad=""):
    words = ("plum", "pear")
    samples = [Sample(input=f"Say {word}.", target=word, id=word) for word in words]
    return Task(dataset=samples, solver=[fails_on(bad), generate()], scorer=includes())

@task
def both(bad=""):
    sample = Sample(input="Say plum.", target="plum", id=1)
    return Task(dataset=[sample], scorer=[includes(), match()])

@scorer(metrics=[mean()])
def judged():
    judge = get_model(role="judge")
    async def score(state, target):
        return Score(value=float((await judge.generate("?")).completion))
    return score

@task
def graded():
    return Task(dataset=[Sample(input="Say plum.")], scorer=judged())

@task
def often():
    samples = [Sample(input="Say plum.", target=word) for word in ("plum", "pear")]
    return Task(dataset=samples, scorer=includes(), epochs=Epochs(2, ["mean", "pass_at_2"]))
"""


async def evaluate(folder: Path, **changes: Any) -> tuple[dict[str, float], Client]:
    client: Any = Client()
    return await builder(folder, **changes)()(client), client


def builder(folder: Path, **changes: Any) -> EvalTasksBuilder:
    (folder / "tasks.py").write_text(TASKS)
    names = changes.pop("names", ("fruit", "both"))
    return EvalTasksBuilder(
        tasks=[f"{folder}/tasks.py@{name}" for name in names],
        model_name=str(tokenizer_path()),
        renderer_name="qwen3_instruct",
        max_tokens=9,
        temperature=0.5,
        context_window=1000,
        log_dir=str(folder / "logs"),
        **changes,
    )


async def test_figures_have_the_names_of_tasks_and_scorers(tmp_path: Path) -> None:
    figures, client = await evaluate(tmp_path)
    assert figures["fruit/accuracy"] == 0.5
    assert (figures["both/includes/accuracy"], figures["both/match/accuracy"]) == (1, 1)
    assert "fruit/failed" not in figures
    sent = client.asked[0]["params"]
    assert (sent.max_tokens, sent.temperature) == (9, 0.5), "as in the training"


async def test_figures_of_several_reducers_of_epochs_are_apart(tmp_path: Path) -> None:
    figures, _ = await evaluate(tmp_path, names=["often"])
    assert figures.keys() == {
        f"often/{reducer}/{metric}"
        for reducer in ("mean", "pass_at_2")
        for metric in ("accuracy", "stderr")
    }


async def test_the_models_of_roles_are_those_of_the_training(tmp_path: Path) -> None:
    judge = scripted_model(["0.75"], name="judge")
    figures, _ = await evaluate(tmp_path, names=["graded"], model_roles={"judge": judge})
    assert figures == {"graded/mean": 0.75}


@pytest.mark.parametrize("left", [1, 2], ids=["one did not begin", "all began"])
async def test_a_cancelled_evaluation_has_no_figures(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eval may end as if nothing had happened, with a log that says so."""

    async def interrupted(*args: Any, **options: Any) -> list[EvalLog]:
        first, second = await eval_async(*args, **options)
        if left == 1:
            return [first]
        return [first, second.model_copy(update={"status": "cancelled"})]

    monkeypatch.setattr("inspect_tinker_plugin.train.data.eval_async", interrupted)
    with pytest.raises(asyncio.CancelledError):
        await evaluate(tmp_path)


async def test_a_task_that_inspect_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(InspectRLError, match=r"the evaluation of .*tasks.py@peel cannot run: \S"):
        await evaluate(tmp_path, names=["peel"])


async def test_failed_samples_are_no_zeros(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures, _ = await evaluate(tmp_path, task_args={"bad": "pear"})
    assert (figures["fruit/accuracy"], figures["fruit/failed"]) == (1, 1)
    assert "no such fruit" in caplog.text


async def test_their_logs_say_which_samples_were_trained_on(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    [sample, _] = resolve_task(f"{tmp_path}/tasks.py@fruit").task.dataset
    TrainingRecord(tmp_path, 0).add(0, {sample_hash(sample): "plum"})
    await evaluate(tmp_path, run=str(tmp_path), limit=1)
    assert {log.eval.task: log.metadata["trained_on"]["ids"] for log in logs_in(tmp_path)} == {
        "fruit": ["plum"],
        "both": [1],
    }


def logs_in(folder: Path) -> list[Any]:
    return [read_eval_log(each) for each in list_eval_logs(str(folder / "logs"))]


async def test_each_step_has_one_log_that_names_it_also_if_the_run_was_killed(
    tmp_path: Path,
) -> None:
    client: Any = Client()
    TrainingRecord(tmp_path, 0)
    made = EvaluatorBuilder(builder=builder(tmp_path, run=str(tmp_path), eval_every=2))
    whole = made()
    for _ in range(3):
        await whole(client)
    (tmp_path / CHECKPOINTS_BASE_NAME).write_text('{"name": "1", "batch": 1, "state_path": "p"}\n')
    await made()(client)
    assert steps_of(tmp_path) == {0: str(tokenizer_path()), 2: f"{tmp_path}@2"}, "killed at step 1"
    (tmp_path / CHECKPOINTS_BASE_NAME).write_text('{"name": "3", "batch": 3, "state_path": "p"}\n')
    await made.at_every_step()()(client)
    assert steps_of(tmp_path).keys() == {0, 2, 3}, "the last weights"


async def test_weights_before_the_first_step_and_of_an_unknown_one_are_not_the_base_models(
    tmp_path: Path,
) -> None:
    client: Any = Client()
    TrainingRecord(tmp_path, 0)
    (tmp_path / "config.json").write_text('{"load_checkpoint_path": "tinker://start"}')
    await builder(tmp_path, run=str(tmp_path), eval_every=2)()(client)
    assert steps_of(tmp_path) == {0: "tinker://start"}
    unknown = builder(tmp_path, run=str(tmp_path))()
    await unknown(client)
    await unknown(client)
    names = [log.eval.model for log in logs_in(tmp_path) if log.eval.task == "fruit"]
    assert len(set(names)) == 3, "Inspect caches replies by them"
    assert all(name.startswith(f"tinker/{tmp_path}@") for name in names if "start" not in name)


def steps_of(folder: Path) -> dict[int, str]:
    logs = [log.eval for log in logs_in(folder) if log.eval.task == "fruit"]
    models = {log.metadata["policy_step"]: log.model.removeprefix("tinker/") for log in logs}
    assert len(models) == len(logs)
    return models
