"""What the files of a run say: the cookbook's metrics and checkpoints, and the ``.eval`` logs.

They can be read while they are being written, and after a crash. Of the rollouts in a step's logs,
figures are added to the step's metrics, with names that begin with ``rollouts/``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from logging import getLogger
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from inspect_ai.log import EvalSampleSummary, read_eval_log, read_eval_log_sample_summaries

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.wording import counted
from inspect_tinker_plugin.logs.rollout import figures
from inspect_tinker_plugin.processes import read_rows, write_whole
from inspect_tinker_plugin.rl.task_handle import TRAINING_ID

logger = getLogger(__name__)

RUN = "run.json"
"""File with the identity of a folder's run."""

CONFIG = "config.json"
REPORT = "report.html"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
IMITATION = "imitation"
"""Folder of the imitation before a training, in the run's folder."""

ROLLOUT_LOGS = "rollouts/train"
"""Folder of the ``.eval`` logs of training batches, in the run's folder."""

TEST_LOGS = "rollouts/test"
"""Folder of the ``.eval`` logs of evaluations on the test set."""

SCANS = "scans.jsonl"
"""File with the figures of each batch that was scanned (``--scan``), by step."""

EVALUATION_LOGS = "evaluations"
"""Folder of the ``.eval`` logs of ``evaluator_builders``."""

REWARD = "env/all/reward/total"
"""Mean reward of a step's rollouts."""

TASK_REWARD = r"env/(?!all/)(.+)/reward/total"
"""Pattern of the mean reward of one task of a mixture."""

TEST = "test/"
"""Prefix of the test set's metrics."""

EVALUATION = "eval/"
"""Prefix of the metrics of ``evaluator_builders``."""

_EVALUATED = (TEST, EVALUATION)

LOSS = "train_mean_nll"
"""Loss of a step of imitation, in nats per token."""

WITH_SIGNAL = "env/all/by_group/frac_mixed"
"""Share of the groups whose rewards differ: only these have non-zero advantages."""

SECONDS = "time/total"
"""Seconds of a step."""

GRADED = "rollouts/graded"
"""Rollouts that were trained on, or counted in a test."""

FAILED = "rollouts/failed"
"""Rollouts that failed, also those that were tried again."""

COUNTED = ("rollouts/stop/", "rollouts/error/")
"""Prefixes of figures that are 0 for a step whose logs have none of that name."""

_STOP = "env/all/stop/"

Row = Mapping[str, Any]


def number(row: Row, name: str) -> float | None:
    """Return a metric of a row; ``None`` when it is absent or not a finite number.

    Inspect's metrics of no samples, and of scores that are not numbers, are NaN.
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def rewards_by_task(row: Row) -> dict[str, float]:
    """Return the mean reward of each task of a mixture; nothing if there is only one task."""
    return {
        match[1]: value
        for name in row
        if (match := re.fullmatch(TASK_REWARD, name)) and (value := number(row, name)) is not None
    }


def step_label(index: int, row: Row) -> str:
    """Return the label of a step, from 1 on, or of a test of weights that are not trained on."""
    only_tested = _is_tested(row) and number(row, REWARD) is None
    return f"after {index}" if only_tested else str(index + 1)


def _is_tested(row: Row) -> bool:
    return any(name.startswith(_EVALUATED) for name in row)


def read_steps(log_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step, in order.

    A step has several rows when it was repeated after an interruption, or was evaluated
    beside the training: what is done again has the figures of the last time alone.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(log_dir / METRICS):
        if isinstance(step := row.get("step"), int):
            trained, tested = REWARD in row, _is_tested(row)
            kept = {
                name: value
                for name, value in steps.get(step, {}).items()
                if not (tested if name.startswith(_EVALUATED) else trained)
            }
            steps[step] = {**kept, **row}
    return dict(sorted(steps.items()))


def read_scans(log_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the figures of scans by step; of several tasks' logs the means of each step.

    A step that was done again has the figures of its last log alone.
    """
    last: dict[tuple[int, str], Row] = {}
    for row in sorted(read_rows(log_dir / SCANS), key=lambda row: str(row.get("log"))):
        if isinstance(step := row.get("step"), int):
            batch = str(row.get("log")).partition("_")[2].rpartition("_")[0]
            last[step, batch] = row
    rows: dict[int, dict[str, list[float]]] = {}
    for (step, _), scanned in last.items():
        for name in scanned:
            if name.startswith("scan/") and (value := number(scanned, name)) is not None:
                rows.setdefault(step, {}).setdefault(name, []).append(value)
    return {step: {name: fmean(v) for name, v in row.items()} for step, row in rows.items()}


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


def check_same_run(log_dir: Path, identity: Row) -> None:
    """Refuse a folder with files of somebody else, or of another run that has begun.

    Args:
        log_dir: The folder.
        identity: The options that a run cannot change when it is continued.

    Raises:
        ConfigError: The folder is to stay as it is.
    """
    path = log_dir / RUN
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        for name in (CHECKPOINTS, CONFIG, METRICS, REPORT):
            if (log_dir / name).exists():
                raise ConfigError(
                    f"{log_dir} has a {name} that is of no run of `inspect rl train`, and a run "
                    "would write over it; choose another --log-dir"
                ) from None
        return
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}); choose another --log-dir") from error
    for name, wanted in identity.items() if _has_begun(log_dir) else ():
        if found.get(name) != wanted:
            raise ConfigError(
                f"{log_dir} holds a run with {name} {found.get(name)!r}, not {wanted!r}; give the "
                "same options (a local run also its folder) to continue it, or choose another "
                "--log-dir"
            )


def _has_begun(log_dir: Path) -> bool:
    """Whether a run has left a step or a checkpoint; one that has not does not lock its folder."""
    files = [folder / CHECKPOINTS for folder in (log_dir, log_dir / IMITATION)]
    return bool(read_steps(log_dir)) or any(f.is_file() and f.stat().st_size for f in files)


def record_run(log_dir: Path, identity: Row) -> None:
    """Record the identity of a folder's run; the logs of another, which never began, stay apart."""
    path, text = log_dir / RUN, json.dumps(identity, indent=2) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text and not _has_begun(log_dir):
        (log_dir / TRAINING_ID).unlink(missing_ok=True)
    write_whole(path, text)
    for folder in (log_dir, log_dir / IMITATION):
        for name in (CHECKPOINTS, METRICS):
            _complete_last_line(folder / name)


def _complete_last_line(path: Path) -> None:
    """Cut off a last line that a killed process left unfinished: others are added behind it."""
    if not path.is_file():
        return
    *_, last = path.read_bytes().rpartition(b"\n")
    try:
        json.loads(last)
    except ValueError:
        os.truncate(path, path.stat().st_size - len(last))
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def step_problems(row: Row) -> list[str]:
    """Say what kept one step from learning; nothing for a step with a signal.

    Args:
        row: The cookbook's figures of the step.
    """
    problems: list[str] = []
    if number(row, "kl_policy_base") is not None:  # a reference or a teacher has its own signal
        return problems
    if number(row, WITH_SIGNAL) == 0:
        problems.append("no group had different rewards, so nothing was learned")
    # Each rollout has one stop reason; the cookbook averages each over those that have it. Where
    # rewards differ, the task tells cut replies apart, and asks for no others.
    all_cut = {name for name in row if name.startswith(_STOP)} == {f"{_STOP}max_tokens"}
    if all_cut and not number(row, WITH_SIGNAL):
        tokens = number(row, "env/all/ac_tokens_per_turn")
        at = "the token limit" if tokens is None else counted(round(tokens), "token")
        problems.append(f"100% of replies were cut at {at} (max_tokens)")
    return problems


@dataclass(frozen=True)
class Step:
    """One training step, or one evaluation on the test set."""

    index: int
    """From 0, as in the cookbook's files."""

    figures: Row
    """Its metrics, as far as they are there, and the figures of its rollouts."""

    logs: Sequence[Path]
    """Its logs, one per task, relative to the run's folder; the last if the step was repeated."""

    task: str = ""
    """Task of an evaluation."""


@dataclass(frozen=True)
class History:
    """A run so far."""

    run: Row
    """What the run is a run of."""
    config: Row
    """The cookbook's configuration."""
    steps: Sequence[Step]
    evaluations: Sequence[Step]
    """Those on the test set, and then those of other tasks, without figures."""
    imitation: Sequence[Step]
    """Steps of the imitation before the training, if there was one."""

    @property
    def tasks(self) -> list[str]:
        """The tasks, as they were named."""
        named = self.run.get("task", "a task")
        return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def read_history(log_dir: Path) -> History:
    """Read the folder of a run; for a missing or damaged file, only its part is left out."""
    metrics = read_steps(log_dir)
    batches: dict[int, dict[str, RolloutLog]] = {}
    for log in read_logs(log_dir, ROLLOUT_LOGS):
        if log.batch is not None:
            batches.setdefault(log.batch, {})[log.task] = log  # the latest of each wins
    rolled_out = {
        index: _rollout_figures([each for log in logs.values() for each in log.samples])
        for index, logs in batches.items()
    }
    scans = read_scans(log_dir)
    names = {name for row in rolled_out.values() for name in row if name.startswith(COUNTED)}
    steps = []
    for index in sorted({*metrics, *batches}):
        zeros = dict.fromkeys(names if index in rolled_out else (), 0.0)
        row = {**zeros, **rolled_out.get(index, {}), **metrics.get(index, {})}
        row |= scans.get(index, {})
        steps.append(Step(index, row, [log.path for log in batches.get(index, {}).values()]))
    return History(
        run=_json(log_dir / RUN),
        config=read_config(log_dir),
        steps=steps,
        evaluations=[
            Step(
                index,
                _rollout_figures(log.samples) if folder == TEST_LOGS else {},
                [log.path],
                log.task,
            )
            for folder in (TEST_LOGS, EVALUATION_LOGS)
            for index, log in enumerate(read_logs(log_dir, folder))
        ],
        imitation=[Step(i, row, []) for i, row in read_steps(log_dir / IMITATION).items()],
    )


def read_config(log_dir: Path) -> dict[str, Any]:
    """Return the cookbook's configuration of a run; nothing if there is none yet."""
    return _json(log_dir / CONFIG)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class RolloutLog:
    """A log of rollouts, without their messages."""

    path: Path
    """Relative to the run's folder."""
    task: str
    batch: int | None
    training: str | None
    """Id of the training that left it."""
    begun: datetime
    """When the first of its rollouts began."""
    samples: Sequence[EvalSampleSummary]


def read_logs(log_dir: Path, folder: str, names: str = "*.eval") -> list[RolloutLog]:
    """Read the logs of a folder in the order in which they were made."""
    found = []
    for path in sorted((log_dir / folder).glob(names)):
        try:
            header = read_eval_log(str(path), header_only=True).eval
            samples = read_eval_log_sample_summaries(str(path))
        except FileNotFoundError:  # its step is done again
            continue
        except Exception as error:
            logger.warning("the log %s cannot be read: %s", path, error)
            continue
        about = header.metadata or {}
        found.append(
            RolloutLog(
                path.relative_to(log_dir),
                header.task,
                about.get("batch"),
                about.get("training"),
                datetime.fromisoformat(header.created),
                samples,
            )
        )
    return found


def _rollout_figures(samples: Sequence[EvalSampleSummary]) -> dict[str, float]:
    """Return the figures of rollouts: those of all, then means over the graded ones."""
    seen = [(sample, figures(sample)) for sample in samples]
    graded = [(sample, each) for sample, each in seen if each.get("status") == "graded"]
    causes = [each.get("error_cause") or ("stopped" if s.error else None) for s, each in seen]
    stops = Counter(str(each["stop_reason"]) for _, each in graded if each.get("stop_reason"))
    row: dict[str, float] = {
        GRADED: len(graded),
        FAILED: sum(cause is not None for cause in causes),
        **{f"rollouts/error/{name}": n for name, n in Counter(filter(None, causes)).items()},
        **{f"rollouts/stop/{name}": 100 * n / stops.total() for name, n in stops.items()},
    }
    values: dict[str, list[float]] = {}
    for sample, each in graded:
        metrics: Row = each.get("metrics") or {}
        of_rollout: Row = {
            "reward": each.get("reward"),
            "turns": each.get("turns"),
            "tokens": (each.get("tokens") or {}).get("sampled"),
            **{name: value for name, value in metrics.items() if name.startswith("score/")},
            **_split_time(sample.total_time, metrics),
        }
        for name in of_rollout:
            if (value := number(of_rollout, name)) is not None:
                values.setdefault(name, []).append(value)
    for name, found in values.items():
        row[f"rollouts/{name}"] = fmean(found)
        if name in ("reward", "tokens"):
            row |= {f"rollouts/{name}/{share}": at for share, at in _percentiles(found).items()}
    return row


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values * 2 if len(values) == 1 else values, n=20, method="inclusive")
    return {"p10": cuts[1], "p25": cuts[4], "p75": cuts[14], "p90": cuts[17]}


def _split_time(total: float | None, metrics: Row) -> dict[str, float]:
    """Split a rollout's time; the environment's share is what sandbox and scoring leave."""
    environment = number(metrics, "time/environment_s") or 0.0
    scoring = min(environment, number(metrics, "time/scoring_s") or 0.0)
    waited = number(metrics, "sandbox/acquire_s") or 0.0
    sandbox = min(environment - scoring, waited + (number(metrics, "sandbox/exec_s") or 0.0))
    return {
        "time/sampling": max(0.0, (total or 0.0) - environment),
        "time/environment": environment - scoring - sandbox,
        "time/sandbox": sandbox,
        "time/scoring": scoring,
    }
