"""Lines of progress from the cookbook's files, while it writes them, and the reward's curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inspect_tinker_plugin.train.history import METRICS, REWARD, read_steps
from inspect_tinker_plugin.train.progress import WIDTH, reward_curve, show_progress


def append(path: Path, *rows: dict[str, Any], text: str = "") -> None:
    """Write to a file of a run, as the cookbook does."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + text)


def step(number: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"step": number, "env/all/reward/total": reward, "time/total": 2.0, **more}


def read_lines(folder: Path, *rows: dict[str, Any], log: str = "") -> list[str]:
    lines = list[str]()
    with show_progress(folder, lines.append, steps=9):
        append(folder / METRICS, *rows)
        append(folder / "logs.log", text=log)
    return lines


MIXED = {"env/all/by_group/frac_mixed": 1.0}
ROWS: dict[str, tuple[dict[str, float], list[str]]] = {
    "turns and tokens": (
        {"env/all/turns_per_episode": 3.0, "env/all/ac_tokens_per_turn": 41.0},
        ["step 1/9 reward 0.250 turns 3.0 tokens 41 2.0 s"],
    ),
    "a test before its step": (
        {"test/env/all/reward/total": 0.5, "test/env/all/total_episodes": 8},
        ["test reward 0.500 (8 rollouts)", "step 1/9 reward 0.250 2.0 s"],
    ),
    "a further evaluation": (
        {"eval/gpqa/mean": 0.5},
        ["evaluation gpqa/mean 0.500", "step 1/9 reward 0.250 2.0 s"],
    ),
    "cut replies that a task pays": (
        {**MIXED, "env/all/stop/max_tokens": 1.0},
        ["step 1/9 reward 0.250 2.0 s"],
    ),
    "what a teacher taught": (
        {"env/all/by_group/frac_mixed": 0.0, "kl_policy_base": 2.5},
        ["step 1/9 reward 0.250 2.0 s"],
    ),
    "mixed tasks behind their mean": (
        {"env/a/reward/total": 0.25, "env/pkg/b/reward/total": 0.75},
        ["step 1/9 reward 0.250 (a 0.250, pkg/b 0.750) 2.0 s"],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_a_line_with_its_reward(tmp_path: Path, name: str) -> None:
    row, expected = ROWS[name]
    lines = read_lines(tmp_path, step(0, 0.25, **row))
    assert [" ".join(line.split()) for line in lines] == expected


def test_errors_are_those_of_the_step(tmp_path: Path) -> None:
    first, second = {"rollout_errors/total": 3.0}, {"rollout_errors/total": 4.0}
    penalised = {"env/all/failed": 0.25, "env/all/error/sandbox": 1.0, "env/all/total_episodes": 8}
    lines = read_lines(
        tmp_path, step(0, 1, **first), step(1, 1, **second, **penalised), step(2, 1, **second)
    )
    assert lines[0].endswith("errors 3")
    assert lines[1].endswith("errors 3")
    assert "errors" not in lines[2]


def test_warnings_are_shown_once(tmp_path: Path) -> None:
    warning = "tinker_cookbook.rl.train:9 [WARNING] all groups failed\n"
    lines = read_lines(tmp_path, log=f"root:1 [INFO] fine\n{warning}{warning}")
    assert [line.strip() for line in lines] == ["! all groups failed"]


def test_what_an_earlier_run_wrote_is_not_told_again(tmp_path: Path) -> None:
    append(tmp_path / METRICS, step(0, 0.1))
    (line,) = read_lines(tmp_path, step(1, 0.2))
    assert "0.200" in line


def test_repeated_steps_count_once_and_torn_lines_not_at_all(tmp_path: Path) -> None:
    append(tmp_path / METRICS, step(0, 0.1), step(1, 0.2), text='{"step": 2, "env/a\n')
    append(tmp_path / METRICS, step(1, 0.3), {"step": 1, "other": 1.0})
    found = read_steps(tmp_path)
    assert list(found) == [0, 1]
    assert found[1]["env/all/reward/total"] == 0.3
    assert found[1]["other"] == 1.0


def test_a_step_that_was_done_again_has_nothing_of_the_time_before(tmp_path: Path) -> None:
    tested = {"step": 1, "eval/fruit/accuracy": 0.5}
    lost = [step(1, 0.2, **{"rollout_errors/total": 2.0}), {**tested, "eval/fruit/failed": 3.0}]
    append(tmp_path / METRICS, *lost, tested)
    assert read_steps(tmp_path)[1] == {**lost[0], **tested}, "the evaluation alone was done again"
    append(tmp_path / METRICS, step(1, 0.3))
    assert read_steps(tmp_path)[1] == {**step(1, 0.3), **tested}


def test_a_step_that_teaches_nothing_says_so(tmp_path: Path) -> None:
    silent = {"env/all/by_group/frac_mixed": 0.0, "env/all/stop/max_tokens": 1.0}
    rows = [step(i, 0.0, **silent, **{"env/all/ac_tokens_per_turn": 16.0}) for i in range(10)]
    mixed = {"env/all/by_group/frac_mixed": 0.5, "env/all/stop/completed": 1.0}
    lines = [line.strip() for line in read_lines(tmp_path, *rows, step(10, 0.5, **mixed))]
    assert lines[1] == "! no group had different rewards, so nothing was learned"
    assert lines[2] == "! 100% of replies were cut at 16 tokens (max_tokens)"
    assert [line for line in lines[3:] if line.startswith("!")] == [
        "! no group had different rewards, so nothing was learned (10 steps in a row)",
        "! 100% of replies were cut at 16 tokens (max_tokens) (10 steps in a row)",
    ]


# the curve


def run_with(folder: Path, rewards: list[float]) -> Path:
    append(folder / METRICS, *({"step": i, REWARD: reward} for i, reward in enumerate(rewards)))
    return folder


def test_a_rising_reward_rises(tmp_path: Path) -> None:
    curve = reward_curve(run_with(tmp_path, [0.0, 0.25, 0.5, 1.0]))
    assert curve == "▁▃▅█\nmean reward: first quarter 0.000, last quarter 1.000"


@pytest.mark.parametrize("count", [59, 61, 1000])
def test_any_number_of_steps_fits(tmp_path: Path, count: int) -> None:
    bars, _ = reward_curve(run_with(tmp_path, [float(i) for i in range(count)])).splitlines()
    assert len(bars) <= WIDTH
    assert list(bars) == sorted(bars)


@pytest.mark.parametrize(
    ("rewards", "bars"), [([0.5], ""), ([0.0, 0.0], "▁▁"), ([-1.0, -0.5, 0.0], "▁▅█")]
)
def test_few_flat_and_negative_rewards_are_drawn(
    tmp_path: Path, rewards: list[float], bars: str
) -> None:
    assert reward_curve(run_with(tmp_path, rewards)).partition("\n")[0] == bars
