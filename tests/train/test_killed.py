"""A training that is killed again and again leaves what one leaves that is not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import read_eval_log
from tests.commands import forking
from tests.train import drill
from tests.train.runs import rows

from inspect_tinker_plugin.logs import assemble_pending, figures
from inspect_tinker_plugin.logs.rollout import SAMPLED_KEY
from tinker_local import LocalServer, LocalSettings

Runner = Callable[..., int | None]


def run(
    model: Path, server: LocalServer, folder: Path, kill_at: int | None, **options: Any
) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    given = (folder, model, server.environ, kill_at)
    process = forking().Process(target=drill.run, args=given, kwargs=options)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def runner(tiny_model: Path, tmp_path: Path) -> Any:
    # A trainer that was killed leaves its model in the server; so there is a slot for each.
    settings = LocalSettings(sample_batch=4, train_batch=4, adapters=64, max_lora_rank=8)
    with LocalServer(tiny_model, state_dir=tmp_path / "server", settings=settings) as server:
        yield partial(run, tiny_model, server)


def choices(folder: Path) -> list[dict[str, Any]]:
    """What the sampler learned from and chose per step; its weights follow from that."""
    (state,) = folder.glob("rollouts/train/sampler/*/state.jsonl")
    return rows(state)


def logs(folder: Path) -> list[Any]:
    found = []
    for path in folder.glob("rollouts/*/*.eval"):
        log = read_eval_log(str(path))
        episodes = [
            (sample.id, sample.epoch, figures(sample)["reward"], figures(sample)["status"])
            for sample in log.samples or []
        ]
        found.append((path.parent.name, log.metadata["policy_step"], log.status, sorted(episodes)))
    assert not list(folder.glob("rollouts/*/.rollouts/*/batch-*")), "nothing waits for its log"
    return sorted(found)


def assert_same(folder: Path, whole: Path) -> None:
    assert choices(folder) == choices(whole)
    assert logs(folder) == logs(whole)


def finished(folder: Path) -> dict[Any, Any]:
    """Return what was sampled in the groups that have ended, of steps after a checkpoint."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "rollouts" / "train", copy)
    assemble_pending(copy)
    found: dict[Any, Any] = {}
    for path in copy.glob("*.eval"):
        log = read_eval_log(str(path))
        step = log.metadata["policy_step"]
        for sample in log.samples or [] if step % drill.SAVE_EVERY == 0 else []:
            if (sampled := sample.store.get(SAMPLED_KEY)) is not None:
                place = step, figures(sample)["group"], sample.epoch
                assert found.setdefault(place, sampled) == sampled
    return found


pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize(
    ("kills", "workers"),
    [
        (2, None),
        pytest.param(20, None, marks=pytest.mark.long),
        pytest.param(5, 2, marks=pytest.mark.long),
    ],
)
def test_killed_it_leaves_the_same_choices_and_logs_and_samples_no_finished_group_again(
    kills: int, workers: int | None, tmp_path: Path, runner: Runner
) -> None:
    runner = partial(runner, workers=workers)
    whole = tmp_path / "whole"
    assert runner(whole, None) == 0
    kinds = [(kind, step) for kind, step, *_ in logs(whole)]
    assert kinds == [("test", 0), ("test", 2), ("test", 4), *(("train", n) for n in range(4))]
    operations = int((tmp_path / "operations").read_text())
    generator = random.Random(20)
    points: list[int] = []
    number = 0
    had: dict[Any, Any] = {}
    while len(points) < kills:
        folder = tmp_path / f"broken-{number}"
        point = generator.randint(1, operations)
        code = runner(folder, point)
        assert code in (0, -9), (folder / "console.log").read_text()[-2000:]
        has = finished(folder)
        assert {place: has.get(place) for place in had} == had
        had = has
        if code == -9:
            points.append(point)
        else:
            assert_same(folder, whole)
            number, had = number + 1, {}
    folder = tmp_path / f"broken-{number}"
    assert runner(folder, None) == 0
    assert_same(folder, whole)
    has = finished(folder)
    assert {place: has.get(place) for place in had} == had
    print(f"killed before file operations {points} of {operations}, in {number + 1} trainings")


@pytest.mark.long
def test_killed_in_the_last_evaluation_it_is_completed(tmp_path: Path, runner: Runner) -> None:
    whole = tmp_path / "whole"
    assert runner(whole, None) == 0
    assert steps_with_test(whole) == [0, 2, 4]
    folder = tmp_path / "broken"
    for kills in (2, 6, 10):
        assert runner(folder, kills, in_last_evaluation=True) == -9
        assert [row["batch"] for row in rows(folder / "checkpoints.jsonl")][-1] == 4
        assert steps_with_test(folder) == [0, 2]
    assert runner(folder, None) == 0
    assert steps_with_test(folder) == [0, 2, 4]
    assert_same(folder, whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "where", [{"workers": 2}, pytest.param({"ray": ""}, marks=pytest.mark.ray)], ids=str
)
def test_the_sampler_learns_the_same_from_rollouts_of_other_processes(
    where: dict[str, Any], tmp_path: Path, runner: Runner
) -> None:
    assert runner(tmp_path / "here", None) == 0
    assert runner(tmp_path / "there", None, **where) == 0
    assert_same(tmp_path / "there", tmp_path / "here")


def steps_with_test(folder: Path) -> list[int]:
    found = rows(folder / "metrics.jsonl")
    return [row["step"] for row in found if "test/env/all/reward/total" in row]
