"""A dry run reports what a training would do and cost, and what is missing to start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspect_tinker_plugin.errors import ConfigError
from inspect_tinker_plugin.local.model import TOKENIZER_FOLDER
from inspect_tinker_plugin.train.dry_run import dry_run
from inspect_tinker_plugin.train.request import NO_SERVER, TrainRequest

TASK = f"{Path(__file__).parents[2] / 'example_tasks' / 'word_problems.py'}"


def request(folder: Path, **changes: object) -> TrainRequest:
    given: dict[str, object] = {
        "task": TASK,
        "log_dir": folder / "run",
        "model": str(TOKENIZER_FOLDER),
        "renderer": "qwen3_instruct",
        "learning_rate": 1e-4,
        "batch_size": 5,
        "group_size": 4,
        "max_tokens": 100,
    }
    return TrainRequest(**{**given, **changes})  # type: ignore[arg-type]


def test_a_dry_run_plans_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    planned = dry_run(request(tmp_path), {"sample": 1_000_000.0})
    assert planned.problem == NO_SERVER
    text = "\n".join(planned.lines)
    assert "4 steps of 5 groups of 4 episodes" in text
    # 80 episodes of one reply, of 100 tokens at most, each at a price of 1
    assert "80 episodes" in text
    assert "8,000.00" in text
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="test split"):
        dry_run(request(tmp_path, test_split="100"))


def test_a_dry_run_of_several_tasks_counts_the_steps_of_all(tmp_path: Path) -> None:
    toy = f"{Path(TASK).parent / 'toy.py'}@letters"
    planned = dry_run(request(tmp_path, task=[TASK, toy], mix=[1, 3]))
    text = "\n".join(planned.lines)
    # 64 groups of the larger task are within the first 85, of which three of four are its own
    assert "17 steps of 5 groups of 4 episodes" in text
