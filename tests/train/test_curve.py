from __future__ import annotations

import json
from pathlib import Path

import pytest

from inspect_tinker_plugin.train.history import METRICS, REWARD
from inspect_tinker_plugin.train.progress import HEIGHT, WIDTH, reward_curve


def run_with(folder: Path, rewards: list[float]) -> Path:
    rows = [json.dumps({"step": i, REWARD: reward}) for i, reward in enumerate(rewards)]
    (folder / METRICS).write_text("\n".join(rows) + "\n")
    return folder


def test_a_rising_reward_rises(tmp_path: Path) -> None:
    curve = reward_curve(run_with(tmp_path, [0.0, 0.25, 0.5, 1.0]))
    *rows, axis, caption = curve.splitlines()
    assert len(rows) == HEIGHT
    heights = [sum(row[i : i + 1] not in ("", " ") for row in rows) for i in range(9, len(rows[0]))]
    assert heights == sorted(heights)
    assert heights[-1] == HEIGHT
    assert "4 steps" in axis
    assert "first quarter 0.000, last quarter 1.000" in caption


@pytest.mark.parametrize("count", [2, 59, 60, 61, 1000])
def test_any_number_of_steps_fits(tmp_path: Path, count: int) -> None:
    rows = reward_curve(run_with(tmp_path, [float(i) for i in range(count)])).splitlines()
    assert all(len(row) <= WIDTH + 9 for row in rows[:HEIGHT])


@pytest.mark.parametrize("rewards", [[0.5, 0.5], [-1.0, -0.5, 0.0]])
def test_flat_and_negative_rewards_are_drawn(tmp_path: Path, rewards: list[float]) -> None:
    assert reward_curve(run_with(tmp_path, rewards))


def test_a_single_step_is_no_curve(tmp_path: Path) -> None:
    assert reward_curve(run_with(tmp_path, [0.5])) == ""
