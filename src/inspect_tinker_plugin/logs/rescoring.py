"""Computes the rewards of logged rollouts again, into new logs."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, read_eval_log, write_eval_log

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.errors import Cause, ConfigError
from inspect_tinker_plugin.contracts.policy import POLICY_PROVIDER
from inspect_tinker_plugin.episode.task import resolve_roles
from inspect_tinker_plugin.logs.header import add_rewards, count_errors, eval_results
from inspect_tinker_plugin.logs.regrading import Failed, LogRewards, expected_scores
from inspect_tinker_plugin.logs.rollout import note, own_scores
from inspect_tinker_plugin.processes import alone_in, local_path, replacing
from inspect_tinker_plugin.rewards import (
    MonitorPenalty,
    ResolvedGroupReward,
    ResolvedReward,
    resolve_group_reward,
    resolve_reward,
)
from inspect_tinker_plugin.rewards.group import spend_in
from inspect_tinker_plugin.rewards.scores import require_scores
from inspect_tinker_plugin.tasks.loading import with_roles

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


@dataclass
class Rescored:
    """What was done."""

    logs: list[Path] = field(default_factory=list)
    """The new logs, including those of an earlier call."""
    earlier: int = 0
    """How many of them an earlier call had made."""
    computed: int = 0
    """Rewards that were computed."""
    scored: int = 0
    """Rollouts whose scorers were run again."""
    failures: list[Failed] = field(default_factory=list)


async def rescore(
    logs: Sequence[str],
    how: Rescoring,
    *,
    on_progress: Callable[[int, int, int], None] = lambda done, total, failed: None,
) -> Rescored:
    """Compute rewards again and write new logs; the old ones are never changed.

    Each new log appears complete, under the name of the old one. A call that was interrupted
    continues with the logs that are missing, and with those in which rewards had failed; scores
    that scorers have given there are kept.

    Args:
        logs: Paths of logs of rollouts on this machine.
        how: What to compute.
        on_progress: Called with the rollouts that are done, all that there are so far, and those
            that failed.
    """
    sources = _check_sources(logs, how)
    judges = resolve_roles({}, how.roles)
    headers = [await asyncio.to_thread(_read_header, source) for source in sources]
    rewards = [_resolve_rewards(header, how) for header in headers]
    sizes = [(header.results.logged_samples or 0) if header.results else 0 for header in headers]
    total, passed = sum(sizes), 0
    done = Rescored()

    def advance(count: int) -> None:
        nonlocal passed
        passed += count
        on_progress(passed, max(total, passed), len(done.failures))

    taken = "is being written by another `inspect rl rescore`; choose another --output"
    with alone_in(how.output, ".rescore.lock", taken=taken, keep=False):
        for left in how.output.glob(".*.writing"):  # by a call that was killed, ours or Inspect's
            left.unlink()
        for source, size, (reward, group_reward) in zip(sources, sizes, rewards, strict=True):
            target = how.output / source.name
            about = {
                "from": source.name,
                "sha256": _digest(source),
                "reward": reward.name,
                "group_reward": None if group_reward is None else group_reward.name,
                "failed_only": how.failed,
                "judges": _by_role(how.roles, str) or None,
            }
            done.logs.append(target)
            failed = await asyncio.to_thread(_count_failed, target, about, how.overwrite)
            if failed == 0:
                done.earlier += 1
                advance(size)
                continue
            log = await asyncio.to_thread(_read, source)
            if failed:
                _take_scores(log, await asyncio.to_thread(_read, target))
            if penalties := (log.eval.metadata or {}).get("monitor_penalty"):
                reward = resolve_reward(MonitorPenalty(reward.aggregator, weights=penalties))
            work = LogRewards(log, reward, group_reward, how.failed, judges)
            logged = _by_role(log.eval.model_roles or {}, lambda config: config.model)
            with with_roles({**logged, **judges}), spend_in(how.output):
                await work.compute(advance)
            _renew_header(work, about)
            await asyncio.to_thread(_write, log, target)
            done.computed += work.computed
            done.scored += work.scored
            done.failures += work.failures
    return done


def _renew_header(work: LogRewards, about: Mapping[str, Any]) -> None:
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
        "reward_expression": about["reward"],
        "group_reward_expression": about["group_reward"],
        "errors": count_errors(samples),
        RESCORED: {**about, "failed": len(work.failures)},
    }


def _by_role(roles: Mapping[str, Any], name: Callable[[Any], str]) -> dict[str, Any]:
    """Return the name of each role's model, or those of its models."""
    return {
        role: [name(each) for each in bound] if isinstance(bound, list) else name(bound)
        for role, bound in roles.items()
    }


def _check_sources(logs: Sequence[str], how: Rescoring) -> list[Path]:
    sources = [local_path(log) for log in logs]
    names: dict[str, Path] = {}
    for source in sources:
        if source.resolve().parent == how.output.resolve():
            raise ConfigError(
                f"--output {how.output} is the folder of {source.name}; old logs are never "
                "changed, so choose another folder"
            )
        if source.name in names:
            raise ConfigError(f"{source} and {names[source.name]} have the same name")
        names[source.name] = source
    return sources


def _read(source: Path, *, header_only: bool = False) -> EvalLog:
    try:
        return read_eval_log(str(source), header_only=header_only)
    except Exception as error:  # a damaged file raises whatever its format does
        raise ConfigError(f"{source} cannot be read: {internals.in_one_line(error)}") from error


def _digest(source: Path) -> str:
    try:
        return hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error


def _read_header(source: Path) -> EvalLog:
    header = _read(source, header_only=True)
    ours = header.eval.model.startswith(f"{POLICY_PROVIDER}/")
    if not ours or "reward_expression" not in (header.eval.metadata or {}):
        raise ConfigError(
            f"{source} is no log of rollouts: it has scores and no rewards. `inspect score` scores "
            "it again"
        )
    return header


def _resolve_rewards(
    header: EvalLog, how: Rescoring
) -> tuple[ResolvedReward, ResolvedGroupReward | None]:
    logged = header.eval.metadata or {}
    name = Path(header.location).name
    expression = how.reward or logged["reward_expression"]
    reward: ResolvedReward = _resolve(resolve_reward, expression, how.reward, name, "reward")
    if expected := list(expected_scores(header)):
        names = list(dict.fromkeys([*expected, *_logged_scores(header)]))
        whose = f"score of {name} has; there is"
        require_scores(expression, reward.aggregator, names, whose=whose)
    of_group = how.group_reward or logged.get("group_reward_expression")
    if how.no_group_reward or of_group is None:
        return reward, None
    return reward, _resolve(resolve_group_reward, of_group, how.group_reward, name, "group-reward")


def _resolve(
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


def _logged_scores(header: EvalLog) -> list[str]:
    """Return the names of the scores that a header has beside the reward and counts."""
    scores = header.results.scores if header.results else []
    reward = header.eval.headline_metric
    return [
        score.scorer
        for score in scores
        if score.scored_samples is not None and (reward is None or score.scorer != reward.scorer)
    ]


def _count_failed(target: Path, about: Mapping[str, Any], overwrite: bool) -> int | None:
    """Return how many rewards had failed in a log of an earlier call; ``None`` without one."""
    if overwrite or not target.exists():
        return None
    try:
        header = read_eval_log(str(target), header_only=True)
        found = (header.eval.metadata or {}).get(RESCORED)
    except Exception:  # whatever it is, it is not ours
        found = None
    earlier = found if isinstance(found, dict) else {}
    if differing := [name for name in about if earlier.get(name) != about[name]]:
        of = f" (it differs in {', '.join(differing)})" if earlier else ""
        raise ConfigError(
            f"{target} is there already and is not what this command makes{of}; choose another "
            "--output, or replace it with --overwrite"
        )
    return int(earlier.get("failed") or 0)


def _take_scores(log: EvalLog, earlier: EvalLog) -> None:
    """Give rollouts the scores of an earlier call, so that only the missing ones are made again."""
    scored = {(record.id, record.epoch): record for record in earlier.samples or []}
    for record in log.samples or []:
        if found := scored.get((record.id, record.epoch)):
            record.scores = own_scores(earlier, found) or None
            record.events, record.attachments = found.events, found.attachments
            if record.error is not None and found.error is None:  # its scorers have ended since
                note(record, "error_cause", str(Cause.UNSCORED))


def _write(log: EvalLog, target: Path) -> None:
    try:
        with replacing(target, target.with_name(f".{uuid.uuid4().hex}.writing")) as part:
            write_eval_log(log, str(part), format="eval")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
