"""Computes the rewards of logged rollouts again, into new logs.

A reward is computed of the logged scores. Only where these are not enough (a judge had failed, or
had given no number) are the scorers concerned run again, without a sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, read_eval_log, write_eval_log

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.contracts.policy import POLICY_PROVIDER
from inspect_tinker_plugin.logs.header import add_rewards, count_errors, eval_results
from inspect_tinker_plugin.logs.regrading import (
    Failed,
    Regrading,
    Scorers,
    expected_scores,
    own_scores,
    regrade,
)
from inspect_tinker_plugin.rewards import (
    ResolvedGroupReward,
    ResolvedReward,
    resolve_group_reward,
    resolve_reward,
)
from inspect_tinker_plugin.rewards.scores import require_scores

RESCORED = "rescored"
"""Entry of a new log's metadata that says what it was made of."""


@dataclass(frozen=True, kw_only=True)
class Rescoring:
    """What to compute again."""

    output: Path
    """Folder of the new logs."""

    reward: str | None = None
    """Reward expression; each log's own when ``None``."""

    group_reward: str | None = None
    """Group reward expression; each log's own when ``None``."""

    no_group_reward: bool = False
    """Use no group reward, whatever the logs had."""

    failed: bool = False
    """Compute only rewards that could not be computed before."""

    roles: Mapping[str, Any] = field(default_factory=dict)
    """Judges by role, for scorers that are run again."""

    overwrite: bool = False
    """Replace what the folder holds under the same names."""


@dataclass(frozen=True)
class Rescored:
    """What was done."""

    logs: list[Path]
    """The new logs, including those of an earlier call."""
    earlier: int
    """How many of them an earlier call had made."""
    computed: int
    """Rewards that were computed."""
    scored: int
    """Rollouts whose scorers were run again."""
    failures: list[Failed]


async def rescore(
    logs: Sequence[str],
    how: Rescoring,
    *,
    on_progress: Callable[[int, int, int], None] = lambda done, total, failed: None,
) -> Rescored:
    """Compute rewards again and write new logs; the old ones are never changed.

    Each new log appears complete, under the name of the old one. A call that was interrupted
    continues with the logs that are missing, and with those in which rewards had failed.

    Args:
        logs: Paths of logs of rollouts on this machine.
        how: What to compute.
        on_progress: Called with the rollouts that are done, all that there are so far, and those
            that failed.

    Raises:
        ConfigError: An expression, a log or the folder cannot be used; nothing was written.
    """
    sources = _sources(logs, how)
    headers = [await asyncio.to_thread(_header, source) for source in sources]
    plans = [_plan(header, how) for header in headers]
    try:
        how.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {how.output}: {error.strerror}") from error
    total = sum(map(_size, headers))
    made: list[Path] = []
    earlier = computed = scored = passed = 0
    failures: list[Failed] = []

    def advance(count: int) -> None:
        nonlocal passed
        passed += count
        on_progress(passed, max(total, passed), len(failures))

    for source, header, (reward, group_reward) in zip(sources, headers, plans, strict=True):
        target = how.output / source.name
        about = _about(source, reward, group_reward, how)
        made.append(target)
        if await asyncio.to_thread(_is_done, target, about, how.overwrite):
            earlier += 1
            advance(_size(header))
            continue
        log = await asyncio.to_thread(read_eval_log, str(source))
        work = Regrading(
            log=log,
            reward=reward,
            group_reward=group_reward,
            failed_only=how.failed,
            scorers=cache(partial(Scorers.of, log, how.roles)),
            done=advance,
        )
        await regrade(work)
        _renew_header(work, about)
        await asyncio.to_thread(_write, log, target)
        computed, scored = computed + work.computed, scored + work.scored
        failures += work.failures
    return Rescored(made, earlier, computed, scored, failures)


def _size(header: EvalLog) -> int:
    return (header.results.logged_samples or 0) if header.results else 0


def _renew_header(work: Regrading, about: Mapping[str, Any]) -> None:
    log, samples = work.log, work.log.samples or []
    for record in samples:
        record.scores = own_scores(log, record) or None
    reward = add_rewards(samples)
    planned = log.results.total_samples if log.results else len(samples)
    log.results = eval_results(samples, planned=planned, reward=reward)
    log.reductions = None
    log.eval.headline_metric = log.results.headline
    log.eval.metadata = {
        **(log.eval.metadata or {}),
        "reward_expression": work.reward.name,
        "group_reward_expression": None if work.group_reward is None else work.group_reward.name,
        "errors": count_errors(samples),
        RESCORED: {**about, "failed": len(work.failures)},
    }


# files


def _sources(logs: Sequence[str], how: Rescoring) -> list[Path]:
    sources = [Path(log.removeprefix("file://")) for log in logs]
    names: dict[str, Path] = {}
    for log, source in zip(logs, sources, strict=True):
        if "://" in log and not log.startswith("file://"):
            raise ConfigError(f"{log} is remote; copy it to this machine")
        if source.resolve().parent == how.output.resolve():
            raise ConfigError(
                f"--output {how.output} is the folder of {source.name}; old logs are never "
                "changed, so choose another folder"
            )
        if source.name in names:
            raise ConfigError(f"{source} and {names[source.name]} have the same name")
        names[source.name] = source
    return sources


def _header(source: Path) -> EvalLog:
    try:
        header = read_eval_log(str(source), header_only=True)
    except Exception as error:  # a damaged file raises whatever its format does
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source} cannot be read: {reason}") from error
    ours = header.eval.model.startswith(f"{POLICY_PROVIDER}/")
    if not ours or "reward_expression" not in (header.eval.metadata or {}):
        raise ConfigError(
            f"{source} is no log of rollouts: it has scores and no rewards. `inspect score` scores "
            "it again"
        )
    return header


def _plan(header: EvalLog, how: Rescoring) -> tuple[ResolvedReward, ResolvedGroupReward | None]:
    logged = header.eval.metadata or {}
    name = Path(header.location).name
    expression = how.reward or logged["reward_expression"]
    reward: ResolvedReward = _resolved(resolve_reward, expression, how.reward, name, "reward")
    expected = list(expected_scores(header))
    if expected:
        names = list(dict.fromkeys([*expected, *_logged_scores(header)]))
        require_scores(
            "reward", expression, reward.aggregator, names, whose=f"score of {name} has; there is"
        )
    of_group = how.group_reward or logged.get("group_reward_expression")
    if how.no_group_reward or of_group is None:
        return reward, None
    return reward, _resolved(resolve_group_reward, of_group, how.group_reward, name, "group-reward")


def _logged_scores(header: EvalLog) -> list[str]:
    """Return the names of the scores that a header has beside the reward and counts."""
    scores = header.results.scores if header.results else []
    reward = header.eval.headline_metric
    return [
        score.scorer
        for score in scores
        if score.scored_samples is not None and (reward is None or score.scorer != reward.scorer)
    ]


def _resolved(
    resolve: Callable[[str], Any], expression: str, given: str | None, log: str, option: str
) -> Any:
    try:
        return resolve(expression)
    except ConfigError as error:
        if given is not None:
            raise
        raise ConfigError(
            f"{log} was rewarded by {expression!r}, which is no expression; give --{option}"
        ) from error


def _about(
    source: Path, reward: ResolvedReward, group_reward: ResolvedGroupReward | None, how: Rescoring
) -> dict[str, Any]:
    """Say what a new log is made of; another call with the same does not make it again."""
    return {
        "from": source.name,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "reward": reward.name,
        "group_reward": None if group_reward is None else group_reward.name,
        "failed_only": how.failed,
    }


def _is_done(target: Path, about: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether an earlier call has made a log.

    Raises:
        ConfigError: The file is something else.
    """
    if overwrite or not target.exists():
        return False
    try:
        header = read_eval_log(str(target), header_only=True)
        found = (header.eval.metadata or {}).get(RESCORED)
    except Exception:  # whatever it is, it is not ours
        found = None
    if not isinstance(found, dict) or any(found.get(name) != about[name] for name in about):
        raise ConfigError(
            f"{target} is there already and is not what this command makes; choose another "
            "--output, or replace it with --overwrite"
        )
    return not found.get("failed")


def _write(log: EvalLog, target: Path) -> None:
    temporary = target.with_name(f".{uuid.uuid4().hex}.writing")
    try:
        write_eval_log(log, str(temporary), format="eval")
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
