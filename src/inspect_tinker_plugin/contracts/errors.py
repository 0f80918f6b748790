"""Every error of this package, and what happens with a failed episode.

The tree::

    InspectRLError
    ├── ConfigError (also ValueError)      bad input, found before anything runs
    │   ├── TaskNotFoundError              no such task, file or registered name
    │   ├── TaskError                      the task cannot be used: no scorer, …
    │   ├── RendererError                  the renderer cannot carry tools or a content type
    │   ├── RewardError                    a reward that does not fit its scores or arguments
    │   ├── ExpressionError                a fault at a place of an expression (expressions)
    │   ├── PluginError                    a broken or clashing plugin
    │   ├── ExportError                    an export that cannot be written or continued
    │   └── VersionError                   an unsupported release of a dependency
    ├── SandboxError                       a sandbox could not start or went away
    │   └── AgentBridgeError               programs inside cannot reach the model (agents)
    ├── UnscoredError                      a reward needs a score that is missing (rewards)
    ├── AggregatorError                    a reward aggregator raised or timed out (rewards)
    ├── ToolExecutorError                  a tool executor gave no result of a tool (tools)
    ├── EpisodeClosedError                 an episode was stepped after it had been closed
    └── EpisodeError                       one episode failed; ``cause`` says in which part

Errors of other code (solvers, scorers, tools, sandboxes) become an ``EpisodeError``; their cause is
stamped where that code is called (``episode/boundaries.py``). An :class:`ErrorPolicy` decides
whether it is raised or becomes a penalty, and ``rl/ending.py`` applies that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Literal


class InspectRLError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(InspectRLError, ValueError):
    """Bad input that was found before any episode ran."""


class TaskNotFoundError(ConfigError):
    """A task name or file specification does not lead to a task."""


class TaskError(ConfigError):
    """A task exists but cannot be turned into an RL environment."""


class RendererError(ConfigError):
    """A renderer cannot carry what the task needs (tools, a content type)."""


class RewardError(ConfigError):
    """A reward aggregator is unknown, malformed or does not fit the scores."""


class PluginError(ConfigError):
    """An installed plugin is broken, or two of them claim one name."""


class ExportError(ConfigError):
    """An export cannot be written, read back or continued."""


class VersionError(ConfigError):
    """A dependency has a release that this package does not support."""


class SandboxError(InspectRLError):
    """A sandbox could not be provided, or was lost while in use.

    Providers raise errors of their own: any exception that has the attribute is one
    (``contracts/sandboxes.py``).

    Attributes:
        inside_sandbox: whether commands inside the sandbox provoked it.
    """

    inside_sandbox = False


class AgentBridgeError(SandboxError):
    """Programs in a sandbox cannot reach the model, or not any more.

    Programs can bring that about themselves: they may take the port, or end what listens on it.
    """

    inside_sandbox = True


class EpisodeClosedError(InspectRLError):
    """An episode was asked for more after it had been closed (clean-up, time-out, cancel)."""


class Cause(StrEnum):
    """The part that an episode failed in: the key of ``on_error`` and of ``error/<cause>``."""

    SOLVER = "solver"
    """The task's setup, solver, agent or cleanup raised."""
    SCORER = "scorer"
    """A scorer raised."""
    UNSCORED = "unscored"
    """Scoring ended without a number: no score, ``None``, NaN or an unscored value."""
    JUDGE = "judge"
    """A model other than the policy (grader, user simulator) failed or timed out."""
    SANDBOX = "sandbox"
    """The sandbox did not start, or an operation of it failed, other than ``inside_sandbox``."""
    INSIDE_SANDBOX = "inside_sandbox"
    """An operation failed for what is inside the sandbox: a file that is missing or cannot be
    used, a command that ran too long, no process or memory left. Before the policy's first reply
    nothing is: it has done nothing yet."""
    ARGUMENTS = "arguments"
    """The policy gave a tool an argument that Inspect cannot convert to the tool's types."""
    TOOL = "tool"
    """A tool raised an error that Inspect does not report back to the model."""
    POLICY = "policy"
    """The model under training was asked for something that cannot be honoured."""
    REWARD = "reward"
    """The reward aggregator raised, timed out or gave no finite number."""


class EpisodeError(InspectRLError):
    """One episode failed. Never turned into a reward unless ``on_error`` says so.

    Attributes:
        cause: the part that failed.
        task: name of the task.
        sample_id: id of the sample.
        epoch: epoch of the sample, from 1.
        call: the call that raised it, if it was one of a sandbox, a tool or a model.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: Cause,
        task: str,
        sample_id: int | str | None,
        epoch: int = 1,
        call: str = "",
    ) -> None:
        super().__init__(message)
        self.call = call
        self.cause = cause
        self.task = task
        self.sample_id = sample_id
        self.epoch = epoch

    def __str__(self) -> str:
        where = f"task {self.task!r}, sample {self.sample_id!r}, epoch {self.epoch}"
        return f"[{self.cause}] {where}: {super().__str__()}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by keyword, so that a worker process can hand the error back."""
        rebuild = partial(
            EpisodeError,
            cause=self.cause,
            task=self.task,
            sample_id=self.sample_id,
            epoch=self.epoch,
            call=self.call,
        )
        return rebuild, (self.args[0],)


Penalty = float | Literal["raise"]
OnError = Penalty | Mapping[str, Penalty]
"""``"raise"``, one penalty for every cause, or a penalty by cause (others raise).

The causes of `PRICED` are the exception: one that is not named costs what the worst episode of its
kind would get, since a policy that can raise it at will would otherwise have its bad episodes run
again.
"""

PRICED = frozenset({Cause.INSIDE_SANDBOX, Cause.ARGUMENTS})
"""Causes that only the policy can bring about; they have the built-in price."""


@dataclass(frozen=True)
class ErrorPolicy:
    """What a failed episode becomes: an exception for the cookbook, or a stated penalty."""

    penalties: Mapping[Cause, float] = field(default_factory=dict)
    """Penalty by cause; a cause that is not listed raises, or has the built-in price."""

    built_in: frozenset[Cause] = PRICED
    """Causes that have the built-in price (``rewards/builtin.py``)."""

    @classmethod
    def of(cls, on_error: OnError) -> ErrorPolicy:
        """Read ``on_error``.

        Raises:
            ConfigError: An unknown cause, or a penalty that is not a finite number.
        """
        if isinstance(on_error, Mapping):
            given = {_cause(cause): _penalty(value) for cause, value in on_error.items()}
            penalties = {cause: value for cause, value in given.items() if value is not None}
            return cls(penalties, cls.built_in - given.keys())
        penalty = _penalty(on_error)
        return cls() if penalty is None else cls(dict.fromkeys(Cause, penalty), frozenset())

    def penalty(self, cause: Cause) -> float | None:
        """Return the stated penalty for a cause, ``None`` when there is none."""
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
