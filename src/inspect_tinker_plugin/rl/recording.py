"""Collects the data for the logs of a group's rollouts until the group is done."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinker_cookbook.checkpoint_utils import CHECKPOINTS_BASE_NAME, get_last_checkpoint
from tinker_cookbook.rl.types import Env, Metrics, Trajectory

from inspect_tinker_plugin.contracts.errors import ConfigError
from inspect_tinker_plugin.episode.runner import Episode
from inspect_tinker_plugin.logs import (
    GroupSlot,
    LogRun,
    Rollout,
    RolloutStatus,
    close_run,
    eval_spec,
    open_run,
    write_group,
)
from inspect_tinker_plugin.logs.sampled import sampled
from inspect_tinker_plugin.rewards import resolve_reward
from inspect_tinker_plugin.rl.env import InspectEnv
from inspect_tinker_plugin.rl.renderer import model_name
from inspect_tinker_plugin.rl.task_handle import TaskHandle
from inspect_tinker_plugin.tokens.episode import EpisodeTokens

LOST_REPLIES = "tokens/lost_replies"
"""Metric of replies that the scored state holds and the trainer's trajectory does not."""


def log_folder(log_dir: str | Path) -> Path:
    """Return a log folder as a path with the same meaning in every process.

    Raises:
        ConfigError: It is the address of a remote store.
    """
    if "://" in str(log_dir):
        raise ConfigError(f"log_dir {str(log_dir)!r} is remote; name a folder of this machine")
    return Path(log_dir).absolute()


def log_run(handle: TaskHandle) -> LogRun | None:
    """Return the log run of a dataset, if it has one."""
    log_dir = handle.options.log_dir
    return None if log_dir is None else LogRun(log_folder(log_dir), handle.uid)


TRAINING_ID = "training.id"
"""File in a trainer's folder with the id that the logs of its training have."""

_BEGUN = ("config.json", "logs.log")
"""What the cookbook writes before it asks for a dataset."""


def trainers_folder(log_dir: Path) -> Path | None:
    """Return the trainer's folder that a log folder is in, if it is in one."""
    for folder in (log_dir, *list(log_dir.parents)[:3]):
        begun = all((folder / name).is_file() for name in _BEGUN)
        if begun or (folder / CHECKPOINTS_BASE_NAME).is_file():
            return folder
    return None


def resumed_at(log_dir: Path) -> int:
    """Return the step at which a trainer resumes, if the log folder is inside its own folder.

    The cookbook does not tell a dataset where it resumes; it reads the same file.
    """
    folder = trainers_folder(log_dir)
    last = None if folder is None else get_last_checkpoint(str(folder))
    return 0 if last is None or last.batch is None else last.batch


def training_id(folder: Path) -> str:
    """Return the id of the training in a trainer's folder: the same one whenever it continues.

    Raises:
        OSError: It cannot be written.
    """
    path = folder / TRAINING_ID
    if not path.is_file():
        mine = folder / f"{uuid.uuid4().hex}.{TRAINING_ID}"
        mine.write_text(uuid.uuid4().hex, encoding="utf-8")
        try:
            with suppress(FileExistsError):  # another dataset of the same trainer was first
                os.link(mine, path)
        finally:
            mine.unlink()
    return path.read_text(encoding="utf-8")


def open_logs(
    handle: TaskHandle,
    *,
    batches: int,
    first_step: int | None = None,
    asked_every: int | None = None,
) -> None:
    """Prepare the log folder of a new dataset, if it has one.

    Args:
        handle: Shared by the dataset's groups.
        batches: batches of the dataset; a trainer may go through them more than once.
        first_step: the trainer's step that asks for the first batch; not 0 in a resumed run, and
            ``None`` if it is not known. Logs that the same training left of this step and later
            ones are removed.
        asked_every: of a test set, the trainer's steps between evaluations; 0 if they are not
            known, ``None`` for batches to train on.

    Raises:
        ConfigError: It cannot be written.
    """
    run, parts, options = log_run(handle), handle.parts(), handle.options
    if run is None:
        return
    folder = None if first_step is None else trainers_folder(run.log_dir)
    group_reward = parts.group_reward
    spec = eval_spec(
        parts.runner.prepared,
        run_id=run.run_id,
        group_size=options.group_size,
        model=model_name(handle.renderer),
        metadata={
            "reward_expression": resolve_reward(options.reward).name,
            "group_reward_expression": None if group_reward is None else group_reward.name,
            "on_error": str(options.on_error),
            "renderer": type(handle.renderer).__name__,
            "batch_size": options.batch_size,
            "batches": batches,
            "training": None if folder is None else _training_id(folder),
            "first_step": first_step or 0,
            "asked_every": asked_every,
            "dataset_epochs": options.epochs,
            "shuffle": options.shuffle,
            "seed": options.seed,
        },
    )
    open_run(run.log_dir, spec)
    weakref.finalize(handle, close_run, run).atexit = False


def _training_id(folder: Path) -> str:
    try:
        return training_id(folder)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written ({error})") from error


@dataclass(frozen=True)
class Graded:
    """What the trainer received for a rollout."""

    reward: float
    """Sum of the rewards from its steps and from the group."""

    stop_reason: str | None
    metrics: Metrics
    of_group: Metrics
    """Those that came with the group's part of the reward."""
    sampled: Callable[[], Mapping[str, Any] | None]


@dataclass
class _Member:
    env: InspectEnv
    episode: Episode
    tokens: EpisodeTokens
    graded: Graded | None = None


class GroupRecording:
    """Collects the rollouts of one group, retries included, for a log.

    Args:
        run: Where the logs of the dataset are made.
        slot: The group's position in the training.
    """

    def __init__(self, run: LogRun, slot: GroupSlot) -> None:
        self._run = run
        self._slot = slot
        self._members: list[_Member] = []

    def add(self, env: InspectEnv, episode: Episode, tokens: EpisodeTokens) -> None:
        """Follow a new env; one that is never started does not appear in the log."""
        self._members.append(_Member(env, episode, tokens))

    def graded(
        self,
        envs: Sequence[Env],
        trajectories: Sequence[Trajectory],
        rewards: Sequence[tuple[float, Metrics]],
    ) -> None:
        """Record what the trainer receives for the rollouts that it keeps."""
        by_env = {id(member.env): member for member in self._members}
        for env, trajectory, (value, metrics) in zip(envs, trajectories, rewards, strict=True):
            member = by_env.get(id(env))
            if member is not None:
                member.graded = _graded(trajectory, value, metrics)

    async def write(self, envs: Sequence[Env]) -> None:
        """Write the rollouts of envs that are closed, and forget them; never raises.

        Nothing is written for a group that never made an env.
        """
        members = [each for each in self._members if each.env in envs]
        self._members = [each for each in self._members if each.env not in envs]
        if members:
            rollouts = [_rollout(member) for member in members if member.episode.started]
            await write_group(self._run, self._slot, rollouts)


def _graded(trajectory: Trajectory, value: float, metrics: Metrics) -> Graded:
    transitions = trajectory.transitions
    last = transitions[-1].metrics if transitions else {}
    of_steps = sum(transition.reward for transition in transitions)
    return Graded(
        of_steps + value,
        trajectory.stop_reason,
        {**last, **metrics},
        metrics,
        partial(sampled, trajectory, value),
    )


def _rollout(member: _Member) -> Rollout:
    ending, graded = member.env.ending, member.graded
    result = None if ending is None else ending.result
    metrics: Metrics = dict(member.tokens.metrics)
    if result is not None:
        metrics.update({"turns": result.turns, **result.metrics})
    of_reward: set[str] = set()
    if ending is not None and ending.reward is not None:
        metrics.update(ending.reward.metrics)
        of_reward |= ending.reward.metrics.keys()
    if graded is not None:
        metrics.update(graded.metrics)
        of_reward |= graded.of_group.keys() - {LOST_REPLIES}
    return Rollout(
        sample=member.episode.sample,
        epoch=member.episode.epoch,
        status=_status(member),
        build=member.episode.build_log,
        reward=None if graded is None else graded.reward,
        stop_reason=None if graded is None else graded.stop_reason,
        error=None if ending is None else ending.error,
        metrics=metrics,
        reward_metrics=of_reward,
        sampled=_nothing if graded is None else graded.sampled,
    )


def _status(member: _Member) -> RolloutStatus:
    if member.graded is not None:
        return RolloutStatus.GRADED
    ending = member.env.ending
    if ending is None:
        return RolloutStatus.CUT
    return RolloutStatus.FAILED if ending.error is not None else RolloutStatus.DROPPED


def _nothing() -> None:
    """Keep nothing of a rollout that the trainer did not get."""
