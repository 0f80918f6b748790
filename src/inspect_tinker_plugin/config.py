"""Options of a dataset, checked when it is built: everything that is not the task itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from inspect_ai.util import SandboxEnvironmentType

from inspect_tinker_plugin.episode.task import SolverLike
from inspect_tinker_plugin.episode.types import EpisodeOptions
from inspect_tinker_plugin.errors import Cause, ConfigError
from inspect_tinker_plugin.rewards import GroupRewardSpec, RewardSpec

Penalty = float | Literal["raise"]
OnError = Penalty | Mapping[str, Penalty]
"""``"raise"``, one penalty for every cause, or a penalty by cause (others raise).

``inside_sandbox`` is the exception: it costs 0 unless it is named, since a policy that can raise
it at will would otherwise have its bad episodes run again.
"""

_PROVOKED: Mapping[Cause, float] = {Cause.INSIDE_SANDBOX: 0.0}


@dataclass(frozen=True)
class ErrorPolicy:
    """What a failed episode becomes: an exception for the cookbook, or a stated penalty."""

    penalties: Mapping[Cause, float] = field(default_factory=lambda: dict(_PROVOKED))
    """Penalty by cause; a cause that is not listed raises."""

    @classmethod
    def of(cls, on_error: OnError) -> ErrorPolicy:
        """Read ``on_error``.

        Raises:
            ConfigError: An unknown cause, or a penalty that is not a finite number.
        """
        if isinstance(on_error, Mapping):
            given = {_cause(cause): _penalty(value) for cause, value in on_error.items()}
            stated = {**_PROVOKED, **given}
            return cls({cause: value for cause, value in stated.items() if value is not None})
        penalty = _penalty(on_error)
        return cls() if penalty is None else cls(dict.fromkeys(Cause, penalty))

    def penalty(self, cause: Cause) -> float | None:
        """Return the penalty for a cause, ``None`` when it is to be raised."""
        return self.penalties.get(cause)


def _cause(name: str) -> Cause:
    try:
        return Cause(name)
    except ValueError:
        known = ", ".join(Cause)
        raise ConfigError(f"on_error: unknown cause {name!r}; the causes are {known}") from None


def _penalty(value: object) -> float | None:
    if value == "raise":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"on_error: {value!r} is neither 'raise' nor a finite number")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How a task becomes batches of groups of episodes.

    ``P`` is the number of groups in a batch and ``G`` the number of episodes in a group, as
    in the cookbook.
    """

    batch_size: int = 1
    """Groups a batch (P)."""

    group_size: int = 1
    """Episodes a group (G); they share the sample."""

    max_samples: int | None = None
    """Use only the first so many samples."""

    sample_ids: Sequence[int | str] | None = None
    """Use only these samples, by id."""

    epochs: int = 1
    """Passes over the samples."""

    shuffle: bool = False
    """Visit the samples in another order in every epoch."""

    seed: int | None = None
    """Seed of the order; 0 when ``None``."""

    solver: SolverLike | None = None
    """Replaces the task's solver."""

    sandbox: SandboxEnvironmentType | None = None
    """Replaces the task's sandbox."""

    reward: RewardSpec = "mean"
    """Aggregator of one episode: expression, object or function."""

    group_reward: GroupRewardSpec | None = None
    """Aggregator of a whole group, applied after the episodes' own rewards."""

    tool_executor: Any = None
    """Who carries out tool calls: a name, an object, or a mapping from tool patterns."""

    on_error: OnError = "raise"
    """What a failed episode becomes, by cause."""

    log_dir: Path | None = None
    """Folder for one ``.eval`` log a batch."""

    rollout_limits: Any = None
    """A ``tinker_cookbook.rl.rollout_limits.RolloutLimits`` that the envs advertise."""

    episode: EpisodeOptions = field(default_factory=EpisodeOptions)
    """How each episode is run."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size", "epochs"):
            _require_positive(name, getattr(self, name))
        for name in ("max_turns", "message_limit", "token_limit", "time_limit", "working_limit"):
            _require_positive(name, getattr(self.episode, name), optional=True)
        _require_positive("max_samples", self.max_samples, optional=True)
        if self.max_samples is not None and self.sample_ids is not None:
            raise ConfigError("max_samples and sample_ids exclude each other; give one of them")
        _require_ids(self.sample_ids)
        ErrorPolicy.of(self.on_error)


def _require_ids(ids: object) -> None:
    if ids is None:
        return
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ConfigError(f"sample_ids is a list of ids, such as [{ids!r}], not {ids!r:.80}")
    if not ids:
        raise ConfigError("sample_ids is empty, so there is no sample; None takes all of them")


def _require_positive(name: str, value: object, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
