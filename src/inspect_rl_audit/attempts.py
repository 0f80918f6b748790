"""Attempts of a real model, read from ``.eval`` logs: rollouts of this package, or plain evals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalSample, list_eval_logs, read_eval_log
from inspect_ai.scorer import Score, value_to_float

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.logs.rollout import RolloutStatus, figures


@dataclass(frozen=True, kw_only=True)
class ModelAttempt:
    """One episode of a real model."""

    sample: int | str
    group: str
    """Log and sample: attempts with the same group are compared with each other."""
    reward: float | None
    stop: str
    turns: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    trained_tokens: int | None
    """Tokens of the training sequences, if they were counted."""
    seconds: float
    sandbox_seconds: float
    failed: bool
    log: str
    epoch: int
    cut: bool = False
    """Whether it was stopped before its end, since sampling failed or its group was given up."""
    metrics: Mapping[str, Any] = field(default_factory=dict)


def read_attempts(paths: Sequence[Path], task: str) -> list[ModelAttempt]:
    """Read all attempts at a task.

    Args:
        paths: Log files, and folders of them.
        task: Name of the task; logs of others are left out.

    Raises:
        ConfigError: A path does not exist, or no log has an attempt at the task.
    """
    found: list[ModelAttempt] = []
    others: set[str] = set()
    for path in _files(paths):
        log = read_eval_log(str(path))
        if _bare(log.eval.task) != _bare(task):
            others.add(log.eval.task)
            continue
        found += [_attempt(sample, path) for sample in log.samples or []]
    if not found:
        seen = f"; there are logs of {', '.join(sorted(others))}" if others else ""
        raise ConfigError(f"no log in {', '.join(map(str, paths))} is of task {task!r}{seen}")
    return found


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for info in list_eval_logs(str(path)):
                yield Path(info.name.removeprefix("file://"))
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"there is no log {path}")


def _bare(task: str) -> str:
    return task.rpartition("/")[2]


def _attempt(sample: EvalSample, path: Path) -> ModelAttempt:
    seen = figures(sample)
    reward = seen.get("reward")
    if reward is None and sample.error is None and "reward" not in seen:
        reward = _mean(sample.scores or {})
    usage = list(sample.model_usage.values())[:1]
    tokens = seen.get("tokens") or {}
    metrics = seen.get("metrics") or {}
    replies = [message for message in sample.messages if message.role == "assistant"]
    return ModelAttempt(
        sample=sample.id,
        group=f"{path.name}/{sample.id}",
        reward=None if reward is None else float(reward),
        stop=str(seen.get("stop_reason") or _stop(sample)),
        turns=int(seen.get("turns") or len(replies)),
        input_tokens=sum(u.input_tokens for u in usage),
        output_tokens=sum(u.output_tokens for u in usage),
        cached_tokens=sum(u.input_tokens_cache_read or 0 for u in usage),
        trained_tokens=tokens.get("trained"),
        seconds=float(sample.total_time or 0.0),
        sandbox_seconds=sum(
            float(v)
            for k, v in metrics.items()
            if k.startswith("sandbox/") and k.endswith("_s") and isinstance(v, int | float)
        ),
        failed=sample.error is not None or seen.get("error_cause") is not None,
        log=str(path.absolute()),
        epoch=sample.epoch,
        cut=seen.get("status") == RolloutStatus.CUT,
        metrics=metrics,
    )


def _stop(sample: EvalSample) -> str:
    if sample.limit is not None:
        return f"{sample.limit.type} limit"
    return sample.output.stop_reason if sample.output.choices else "error"


def _mean(scores: Mapping[str, Score]) -> float | None:
    """Return the mean of all scores, as the default reward does."""
    convert = value_to_float()
    values: list[float] = []
    for score in scores.values():
        parts: list[Any] = [score.value]
        if isinstance(score.value, Mapping):
            parts = list(score.value.values())
        elif isinstance(score.value, Sequence) and not isinstance(score.value, str):
            parts = list(score.value)
        values.append(sum(float(convert(part)) for part in parts) / max(len(parts), 1))
    finite = [value for value in values if value == value]
    return sum(finite) / len(finite) if finite else None
