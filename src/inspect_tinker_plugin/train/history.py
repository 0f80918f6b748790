"""What the files of a run say: the cookbook's metrics and checkpoints, and the ``.eval`` logs.

They can be read while they are being written, and after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from statistics import fmean
from typing import Any

from inspect_ai.log import EvalSampleSummary, read_eval_log_sample_summaries

from inspect_tinker_plugin.contracts.wording import counted, part_of
from inspect_tinker_plugin.inspect_internals.log_files import read_header
from inspect_tinker_plugin.logs.rollout import figures
from inspect_tinker_plugin.processes import read_rows

logger = getLogger(__name__)

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
IMITATION = "imitation"
"""Folder of the imitation before a training, in the run's folder."""

REWARD = "env/all/reward/total"
"""Mean reward of a step's rollouts."""

_ALL = "env/all/"

LOSS = "train_mean_nll"
"""Loss of a step of imitation, in nats per token."""

TEST = "test/"
"""Prefix of the test set's metrics."""

EVALUATION = "eval/"
"""Prefix of the metrics of ``evaluator_builders``."""

ROLLOUT_LOGS = "rollouts/train"
"""Folder of the ``.eval`` logs of training batches, in the run's folder."""

TEST_LOGS = "rollouts/test"
"""Folder of the ``.eval`` logs of evaluations on the test set."""

EVALUATION_LOGS = "evaluations"
"""Folder of the ``.eval`` logs of ``evaluator_builders``."""

WITH_SIGNAL = "env/all/by_group/frac_mixed"
"""Share of the groups whose rewards differ: only these have non-zero advantages."""

CUT = "max_tokens"
_STOP = "env/all/stop/"

TIMES = ("sampling", "environment", "sandbox", "scoring")
"""The parts of a rollout's time, in seconds."""

Row = Mapping[str, Any]


def number(row: Row, name: str) -> float | None:
    """Return a metric of a row; ``None`` when it is absent or not a number."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def of_task(task: str, name: str) -> str:
    """Return the name of a metric over the rollouts of one task of a mixture."""
    return f"env/{task}/{name.removeprefix(_ALL)}"


def tasks_of(row: Row) -> list[str]:
    """Return the tasks that a row has metrics of; none if there is only one task."""
    end = f"/{REWARD.removeprefix(_ALL)}"
    names = [n for n in row if n.startswith("env/") and n.endswith(end) and n != REWARD]
    return [name.removeprefix("env/").removesuffix(end) for name in names]


def read_steps(log_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, in order.

    A step has several rows when it was repeated after an interruption, or was evaluated
    beside the training: later values replace earlier ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(log_dir / METRICS):
        if isinstance(row.get("step"), int):
            steps.setdefault(row["step"], {}).update(row)
    return dict(sorted(steps.items()))


def last_checkpoint(log_dir: Path) -> int | None:
    """Return the number of steps behind a run's last checkpoint, ``None`` without one."""
    row = last_saved(log_dir, "batch", "state_path")
    return None if row is None else int(row["batch"])


def last_weights(log_dir: Path) -> str | None:
    """Return the last weights that can be sampled from, ``None`` without any."""
    row = last_saved(log_dir, "sampler_path")
    return None if row is None else str(row["sampler_path"])


def last_saved(log_dir: Path, *names: str) -> dict[str, Any] | None:
    """Return what is recorded of the last checkpoint that has these."""
    rows = read_rows(log_dir / CHECKPOINTS)
    found = [row for row in rows if all(row.get(name) not in (None, "") for name in names)]
    return found[-1] if found else None


def step_problems(row: Mapping[str, Any]) -> list[str]:
    """Say what kept one step from learning; nothing for a step with a signal.

    Args:
        row: The cookbook's figures of the step.
    """
    problems = []
    if number(row, WITH_SIGNAL) == 0:
        problems.append("no group had different rewards, so nothing was learned")
    # Each rollout has one stop reason; the cookbook averages each over those that have it. Where
    # rewards differ, the task tells cut replies apart, and asks for no others.
    all_cut = {name for name in row if name.startswith(_STOP)} == {_STOP + CUT}
    if all_cut and not number(row, WITH_SIGNAL):
        tokens = number(row, "env/all/ac_tokens_per_turn")
        at = "the token limit" if tokens is None else counted(round(tokens), "token")
        problems.append(f"100% of replies were cut at {at} (max_tokens)")
    return problems


def run_problems(
    rows: Sequence[Row], rollouts: Sequence[RolloutFigures], max_tokens: object = None
) -> list[str]:
    """Say what kept a run, or part of it, from learning.

    Args:
        rows: The cookbook's figures of each step.
        rollouts: The rollouts that were trained on.
        max_tokens: The sampler's limit, for the message.
    """
    problems = []
    shares = [share for row in rows if (share := number(row, WITH_SIGNAL)) is not None]
    silent = sum(share == 0 for share in shares)
    if shares and silent == len(shares):
        problems.append("No group had different rewards in any step: nothing was learned.")
    elif silent:
        problems.append(
            f"No group had different rewards in {part_of(silent, len(shares), 'step')}: nothing "
            "was learned in them."
        )
    cut = [one.reward for one in rollouts if one.stop == CUT]
    if cut and len(cut) * 2 >= len(rollouts) and len(set(cut)) == 1:
        at = counted(max_tokens, "token") if isinstance(max_tokens, int) else "the token limit"
        share = len(cut) / len(rollouts)
        problems.append(f"{share:.0%} of replies were cut at {at}: raise max_tokens.")
    return problems


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
        return fmean(rewards) if value is None and (rewards := self.rewards()) else value

    @property
    def rollouts(self) -> list[RolloutFigures]:
        """The rollouts of all its logs."""
        return [one for log in self.logs for one in log.rollouts]

    @property
    def graded(self) -> list[RolloutFigures]:
        """The rollouts that were trained on."""
        return [one for one in self.rollouts if one.graded]

    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were trained on."""
        return [reward for log in self.logs for reward in log.rewards()]

    @property
    def test_reward(self) -> float | None:
        """Mean reward on the test set before this step."""
        return number(self.figures, TEST + REWARD)


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
    evaluations: Sequence[BatchLog]
    """Evals of ``evaluator_builders``, without their samples."""
    imitation: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Metrics of each step of the imitation before the training, if there was one."""

    @property
    def tasks(self) -> list[str]:
        """The tasks, as they were named."""
        named = self.run.get("task", "a task")
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def read_history(log_dir: Path) -> History:
    """Read the folder of a run; for a missing or damaged file, only its part is left out."""
    figures = read_steps(log_dir)
    batches: dict[int, dict[str, BatchLog]] = {}
    for log in _read_logs(log_dir, ROLLOUT_LOGS):
        batches.setdefault(log.batch, {})[log.task] = log  # the latest of each wins
    return History(
        log_dir=log_dir,
        run=_json(log_dir / "run.json"),
        config=_json(log_dir / "config.json"),
        steps=[
            Step(index, figures.get(index, {}), list(batches.get(index, {}).values()))
            for index in sorted({*figures, *batches})
        ],
        tests=_read_logs(log_dir, TEST_LOGS),
        evaluations=_read_logs(log_dir, EVALUATION_LOGS, rollouts=False),
        imitation=read_steps(log_dir / IMITATION),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_logs(log_dir: Path, folder: str, *, rollouts: bool = True) -> list[BatchLog]:
    """Read the logs of a folder in the order in which they were made.

    Args:
        log_dir: Folder of the run.
        folder: Name of the folder in it.
        rollouts: Whether they are logs of batches; else they are evals, without their samples.
    """
    found = []
    for path in sorted((log_dir / folder).glob("*.eval")):
        try:
            header = read_header(str(path))
            samples = read_eval_log_sample_summaries(str(path)) if rollouts else []
        except Exception as error:
            logger.warning("the log %s cannot be read: %s", path, error)
            continue
        batch = (header.eval.metadata or {}).get("batch") if rollouts else 0
        if isinstance(batch, int):
            figures = [_read_figures(sample) for sample in samples]
            found.append(BatchLog(path.relative_to(log_dir), header.eval.task, batch, figures))
    return found


def _read_figures(sample: EvalSampleSummary) -> RolloutFigures:
    seen = figures(sample)
    metrics: Mapping[str, Any] = seen.get("metrics") or {}
    return RolloutFigures(
        reward=number(seen, "reward"),
        graded=seen.get("status") == "graded",
        stop=seen.get("stop_reason"),
        cause=seen.get("error_cause") or ("stopped" if sample.error else None),
        turns=number(seen, "turns"),
        tokens=number(seen.get("tokens") or {}, "sampled"),
        scores={
            name.removeprefix("score/"): value
            for name in metrics
            if name.startswith("score/") and (value := number(metrics, name)) is not None
        },
        times=_split_time(sample.total_time, metrics),
    )


def _split_time(total: float | None, metrics: Mapping[str, Any]) -> dict[str, float]:
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
