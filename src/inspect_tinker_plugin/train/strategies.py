"""How the rollouts of a run are run: with a time limit, and not again those that a stopped run has.

A rollout that hangs does not stall the run. Groups that a stopped run has finished are used again
if weights and options are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from logging import getLogger
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook.completers import TokenCompleter
from tinker_cookbook.rl.rollout_strategy import (
    FailFast,
    MinViableGroup,
    RetryOnFailure,
    RolloutResult,
    RolloutStrategy,
)
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, Trajectory

from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.logs import RolloutStatus, assemble_pending, figures
from inspect_tinker_plugin.rl.group import InspectGroupBuilder
from inspect_tinker_plugin.rl.task_handle import training_id
from inspect_tinker_plugin.tasks import resolve_task, task_digest
from inspect_tinker_plugin.train.history import ROLLOUT_LOGS, read_logs

logger = getLogger(__name__)

SAMPLED = "sampled.json"
"""File with a digest of what a run's episodes depend on beside its weights, and since when."""

_PACKAGES = ("inspect_ai", "inspect-tinker-plugin", "tinker-cookbook")


@dataclass(frozen=True)
class UseFinished(RolloutStrategy):
    """Takes groups of one step from logs, and has another strategy run the rest."""

    strategy: RolloutStrategy
    folder: str
    """Folder of the logs; groups of other datasets, such as the test set, are not taken."""
    step: int
    logs: Mapping[str, str]
    """The log of each finished group, by its task and index."""

    @property
    def catches_group_errors(self) -> bool:
        """Whether the other strategy does."""
        return self.strategy.catches_group_errors

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> RolloutResult:
        """Take a group from its log, or run its rollouts."""
        group = env_group_builder
        if (
            isinstance(group, InspectGroupBuilder)
            and group.slot.batch == self.step
            and str(group.handle.options.log_dir) == self.folder
            and (log := self.logs.get(f"{group.handle.name}/{group.slot.index}")) is not None
        ):
            try:
                taken = await group.take_finished(Path(log))
            except Exception as error:  # a damaged log costs the rollouts that are in it
                logger.warning("the log %s cannot be read: %s", log, error)
                taken = None
            if taken is not None:
                return RolloutResult(trajectories=taken, envs=[], errors=[])
        return await self.strategy.execute(env_group_builder, policy)


async def use_finished(config: Any, step: int) -> Any:
    """Return a configuration whose first step uses what a stopped run has finished of it.

    In the asynchronous loop nothing is used: its groups may be of earlier weights.
    """
    run = Path(config.log_path)
    since = _same_since(run / SAMPLED, _digest(config))
    if config.async_config is not None or not (run / ROLLOUT_LOGS).is_dir():
        return config
    logs = await asyncio.to_thread(find_finished, run, step, since)
    if not logs:
        return config
    strategy = config.effective_rollout_strategy()
    using = UseFinished(strategy, str(run / ROLLOUT_LOGS), step, logs)
    return chz.replace(config, rollout_error_tolerance=using)


def find_finished(run: Path, step: int, since: datetime) -> dict[str, str]:
    """Return the logs of a step's finished groups that were sampled with the last checkpoint."""
    assemble_pending(run / ROLLOUT_LOGS)
    before, logs = (
        [
            log
            for log in read_logs(run, ROLLOUT_LOGS, f"*-batch-{number:06d}_*.eval")
            if log.training == training_id(run)
        ]
        for number in (step - 1, step)
    )
    if step and not before:
        return {}
    # A step that was done more than once led to the checkpoint the last time.
    since = max([since, *(log.begun for log in before)])
    return {
        f"{log.task}/{seen['group']}": str(run / log.path)
        for log in logs
        if log.begun >= since
        for seen in map(figures, log.samples)
        # Where all failed before they sampled, an engine may have been down, and be back.
        if seen.get("status") == RolloutStatus.GRADED and (seen.get("tokens") or {}).get("sampled")
    }


def _same_since(path: Path, digest: str) -> datetime:
    """Return since when the digest is what it is, and record it if it is new."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if known.get("digest") != digest:
        known = {"digest": digest, "since": datetime.now(UTC).isoformat()}
        path.write_text(json.dumps(known), encoding="utf-8")
    return datetime.fromisoformat(known["since"])


def _digest(config: Any) -> str:
    """Digest what episodes depend on: tasks, options, the sampling, and the packages."""
    data = config.dataset_builder
    roles = data.dataset_options().model_roles
    tasks = [
        task_digest(resolve_task(each.task, each.task_args, roles=roles).task)
        for each in data.mixed_tasks()
    ]
    found = (
        tasks,
        data.task_args,
        data.renderer_name,
        replace(data.dataset_options(), log_dir=None),
        config.max_tokens,
        config.temperature,
        config.load_checkpoint_path,
        config.effective_rollout_strategy(),
        [version(name) for name in _PACKAGES],
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


SECONDS = 3600.0
"""Time limit in the asynchronous loop, where groups that hang keep their places for ever."""


class HangingRolloutError(InspectRLError, TimeoutError):
    """A rollout of a group hangs, however often it is run again."""


@dataclass(frozen=True)
class RetryHanging(RolloutStrategy):
    """Runs rollouts again that take too long; any other failure ends the group, as in `FailFast`.

    The new rollout is in a new env of the builder. When a group has used up its retries, its next
    time-out ends it.
    """

    per_rollout_timeout: float
    """Seconds after which a rollout is cancelled."""

    max_retries: int = 3
    """Rollouts of a group that are run again."""

    async def execute(
        self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter
    ) -> RolloutResult:
        """Run the rollouts of a group."""
        running: dict[asyncio.Task[Trajectory], Env] = {}

        async def roll_out(env: Env) -> Trajectory:
            async with asyncio.timeout(self.per_rollout_timeout):
                return await do_single_rollout(policy, env)

        def launch(envs: Sequence[Env]) -> None:
            running.update({asyncio.create_task(roll_out(env)): env for env in envs})

        ended: list[Env] = []
        result = RolloutResult(trajectories=[], envs=ended, errors=[])
        launch(await env_group_builder.make_envs())
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    env = running.pop(task)
                    try:
                        result.trajectories.append(task.result())
                        ended.append(env)
                    except TimeoutError:
                        problem = f"a rollout did not end within {self.per_rollout_timeout:g} s"
                        if len(result.errors) == self.max_retries:
                            raise HangingRolloutError(
                                f"{problem}, and its group has used up its retries "
                                f"({self.max_retries}); --rollout-timeout sets the time"
                            ) from None
                        result.errors.append(RolloutError("TimeoutError", problem))
                        launch((await env_group_builder.make_envs())[:1])
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return result


def with_deadline(config: Any, seconds: float | None) -> Any:
    """Return a configuration of the cookbook whose rollouts have a time limit.

    A strategy that has one already keeps it.

    Args:
        config: The ``tinker_cookbook.rl.train.Config``.
        seconds: The limit; 0 for none, ``None`` for the default of the loop.
    """
    if seconds is None:
        seconds = SECONDS if config.async_config is not None else 0.0
    strategy = config.effective_rollout_strategy()
    if not seconds:
        return config
    if isinstance(strategy, FailFast):
        strategy = RetryHanging(seconds)
    elif isinstance(strategy, RetryOnFailure | MinViableGroup) and not strategy.per_rollout_timeout:
        strategy = replace(strategy, per_rollout_timeout=seconds)
    return chz.replace(config, rollout_error_tolerance=strategy)
