"""A training with a curriculum, killed again and again, chooses and logs as one that was not."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path

import pytest
from tests.samplers.training import STEPS, logged, rows, train

KILLS = 20

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.samplers.training"])


def run(folder: Path, kill_at: int | None = None) -> int | None:
    process = CONTEXT.Process(target=train, args=(folder, kill_at))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_at_twenty_points_it_has_the_same_groups_weights_and_logs(
    tmp_path: Path,
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert run(whole) == 0
    expected = rows(whole / "groups.jsonl")
    assert [row["step"] for row in expected] == list(range(STEPS))
    assert len({str(row["weights"]) for row in expected}) > STEPS // 2, "weights change"

    points = random.Random(20)
    kills = 0
    while kills < KILLS:
        if (broken / "checkpoints.jsonl").is_file():
            done = max((row["batch"] for row in rows(broken / "checkpoints.jsonl")), default=0)
            if done >= STEPS - 2:  # back to an earlier checkpoint, so that there is more to kill
                keep = rows(broken / "checkpoints.jsonl")[:2]
                lines = "".join(json.dumps(row) + "\n" for row in keep)
                (broken / "checkpoints.jsonl").write_text(lines)
        kills += run(broken, points.randint(3, 60)) == -9
    assert run(broken) == 0
    seen = rows(broken / "groups.jsonl")
    by_step = {row["step"]: row for row in expected}
    assert {row["step"] for row in seen} == set(by_step)
    assert len(seen) > STEPS, "steps were repeated"
    for row in seen:
        assert row == by_step[row["step"]]
    assert [step for step, *_ in logged(whole)] == list(range(STEPS))
    assert logged(broken) == logged(whole)
