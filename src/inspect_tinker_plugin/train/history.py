"""The history of a run, read from its folder: the cookbook's metrics and the ``.eval`` logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalSampleSummary, read_eval_log_sample_summaries

from inspect_tinker_plugin.inspect_internals.log_files import read_header
from inspect_tinker_plugin.logs.rollout import figures
from inspect_tinker_plugin.train.metrics import IMITATION, REWARD, TEST, number, read_steps

logger = getLogger(__name__)

TIMES = ("sampling", "environment", "sandbox", "scoring")
"""The parts of a rollout's time, in seconds."""


@dataclass(frozen=True)
class RolloutFigures:
    """The figures of one rollout, from the list of samples in its log."""

    reward: float | None
    graded: bool
    stop: str | None
    cause: str | None
    turns: float | None
    tokens: float | None
    scores: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchLog:
    """An ``.eval`` log."""

    path: Path
    """Relative to the run's folder."""

    task: str
    batch: int
    rollouts: Sequence[RolloutFigures]

    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were trained on (or counted, in a test)."""
        return [one.reward for one in self.rollouts if one.graded and one.reward is not None]


@dataclass(frozen=True)
class Step:
    """One training step."""

    index: int
    """From 0, as in the cookbook's files."""

    figures: Mapping[str, Any]
    """The cookbook's metrics; empty when the step was not finished."""

    logs: Sequence[BatchLog]
    """Its rollouts, a log per task; the last ones if the step was repeated later."""

    @property
    def number(self) -> int:
        """Number of the step counted from 1, as in the terminal."""
        return self.index + 1

    @property
    def reward(self) -> float | None:
        """Mean reward, as trained on."""
        value = number(self.figures, REWARD)
        if value is None and (rewards := self.rewards()):
            return sum(rewards) / len(rewards)
        return value

    @property
    def rollouts(self) -> list[RolloutFigures]:
        """The rollouts of all its logs."""
        return [one for log in self.logs for one in log.rollouts]

    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were trained on."""
        return [reward for log in self.logs for reward in log.rewards()]

    @property
    def test_reward(self) -> float | None:
        """Mean reward on the test set before this step."""
        return number(self.figures, f"{TEST}/{REWARD}")


@dataclass(frozen=True)
class History:
    """A run so far."""

    log_dir: Path
    run: Mapping[str, Any]
    """What the run is a run of."""
    config: Mapping[str, Any]
    """The cookbook's configuration."""
    steps: Sequence[Step]
    tests: Sequence[BatchLog]
    imitation: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Metrics of each step of the imitation before the training, if there was one."""

    @property
    def tasks(self) -> list[str]:
        """The tasks, as they were named."""
        named = self.run.get("task", "a task")
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def read_history(log_dir: Path, *, logs: str, test_logs: str) -> History:
    """Read the folder of a run; for a missing or damaged file, only its part is left out.

    Args:
        log_dir: Folder of the run.
        logs: Name of the folder in it with the logs of batches.
        test_logs: Name of the folder with those of evaluations.
    """
    figures = read_steps(log_dir)
    batches: dict[int, dict[str, BatchLog]] = {}
    for log in _logs(log_dir, logs):
        batches.setdefault(log.batch, {})[log.task] = log  # the latest of each wins
    return History(
        log_dir=log_dir,
        run=_json(log_dir / "run.json"),
        config=_json(log_dir / "config.json"),
        steps=[
            Step(index, figures.get(index, {}), list(batches.get(index, {}).values()))
            for index in sorted({*figures, *batches})
        ],
        tests=_logs(log_dir, test_logs),
        imitation=read_steps(log_dir / IMITATION),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _logs(log_dir: Path, folder: str) -> list[BatchLog]:
    """Read the logs of a folder in the order in which they were made."""
    found = []
    for path in sorted((log_dir / folder).glob("*.eval")):
        try:
            header = read_header(str(path))
            samples = read_eval_log_sample_summaries(str(path))
        except Exception as error:
            logger.warning("the log %s cannot be read: %s", path, error)
            continue
        batch = (header.eval.metadata or {}).get("batch")
        if isinstance(batch, int):
            rollouts = [_figures(sample) for sample in samples]
            found.append(BatchLog(path.relative_to(log_dir), header.eval.task, batch, rollouts))
    return found


def _figures(sample: EvalSampleSummary) -> RolloutFigures:
    seen = figures(sample)
    metrics = _mapping(seen.get("metrics"))
    return RolloutFigures(
        reward=number(seen, "reward"),
        graded=seen.get("status") == "graded",
        stop=_text(seen.get("stop_reason")),
        cause=_text(seen.get("error_cause")) or ("stopped" if sample.error else None),
        turns=number(seen, "turns"),
        tokens=number(_mapping(seen.get("tokens")), "sampled"),
        scores={
            name.removeprefix("score/"): value
            for name in metrics
            if name.startswith("score/") and (value := number(metrics, name)) is not None
        },
        times=_times(sample.total_time, metrics),
    )


def _times(total: float | None, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Split a rollout's time; the environment's share is what sandbox and scoring leave."""
    environment = number(metrics, "time/environment_s") or 0.0
    scoring = min(environment, number(metrics, "time/scoring_s") or 0.0)
    waited = number(metrics, "sandbox/acquire_s") or 0.0
    sandbox = min(environment - scoring, waited + (number(metrics, "sandbox/exec_s") or 0.0))
    return {
        "sampling": max(0.0, (total or 0.0) - environment),
        "environment": environment - scoring - sandbox,
        "sandbox": sandbox,
        "scoring": scoring,
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
