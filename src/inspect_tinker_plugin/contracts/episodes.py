"""The types of an episode: its states, what the policy is asked and answers, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inspect_ai.agent import Agent
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample, EvalSampleLimit
from inspect_ai.model import ChatMessage, GenerateConfig, Model, ModelOutput, ModelUsage
from inspect_ai.scorer import SampleScore
from inspect_ai.solver import Solver, TaskState
from inspect_ai.tool import ToolChoice, ToolInfo

from inspect_tinker_plugin.contracts.errors import EpisodeError


class EpisodeState(StrEnum):
    """The state of an episode. It only moves down this list, to one of the last two."""

    NEW = "new"
    """Nothing has run."""

    STARTING = "starting"
    """Input, sandbox, files and set-up script are being prepared; the solver has not begun."""

    RUNNING = "running"
    """The solver runs, or waits for the policy."""

    STOPPING = "stopping"
    """The solver has ended or was told to; scorers, clean-up and release run."""

    SCORED = "scored"
    """There is a result: scores, an error, or both."""

    CLOSED = "closed"
    """Closed before there was a result, so there will be none."""

    def before(self, other: EpisodeState) -> bool:
        """Whether this state comes before another."""
        return _ORDER[self] < _ORDER[other]


_ORDER = {state: place for place, state in enumerate(EpisodeState)}

SolverLike = Solver | Agent | Sequence[Solver | Agent]
"""What may replace a task's solver: a solver, an agent, or a sequence of them."""

RoleModel = str | Model | Mapping[str, Any]
"""A model for a role: one, its name, or a mapping with ``model``, ``model_args`` and options of
generation, as ``inspect eval --model-role`` takes it."""

Metrics = dict[str, float | int]
"""Numbers by name, as in ``tinker_cookbook.rl.types.Metrics``."""


FAILED = "failed"
"""Metric of every rollout: 1 if it failed, else 0. Its mean is the share of those that failed; the
cookbook averages ``error/<cause>`` over those that have it."""


SOLVER_TIMEOUT = "limit/solver_timeout"
"""Metric of an episode whose solver ended with a ``TimeoutError`` that nothing handled."""


MONITOR = "monitor/"
"""Prefix of the metrics of what watches an episode (``episode/monitors.py``)."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One call of the model under training, parked until the policy answers."""

    index: int
    """Number of this model call in its episode, from 0."""

    messages: Sequence[ChatMessage]
    """The conversation exactly as Inspect would pass it to a provider."""

    tools: Sequence[ToolInfo]
    """Tools offered, with their JSON schemas; empty when there are none."""

    tool_choice: ToolChoice
    """``"auto"``, ``"any"``, ``"none"`` or a forced tool."""

    config: GenerateConfig
    """Generation options of this call, after all of Inspect's merging."""

    dialect: str | None = None
    """The model API (``chat``, ``responses``, ``anthropic``, ``google``) that the call used to
    reach a bridge of Inspect's in a sandbox, ``unknown`` for a bridge into this process; ``None``
    when no program translated its messages."""

    side: bool = False
    """Whether a program asked for another model, so that the reply is not trained on."""


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """How an episode ended: the source of rewards, logs and metrics.

    Absent, failed and zero are different: ``scores`` holds what was scored, ``error`` is
    set when anything failed, and neither implies the other (a solver may fail after a
    score was given, a sample without a scorer has neither).
    """

    task: str
    """Name of the task."""

    sample: Sample
    """The sample, with its id, target and metadata."""

    epoch: int
    """Epoch of the sample, from 1."""

    state: TaskState
    """The final state: messages, output, store, metadata."""

    scores: Mapping[str, SampleScore]
    """Every score, by the name that an eval log would use."""

    limit: EvalSampleLimit | None
    """The limit that ended the episode, if there was one."""

    error: EpisodeError | None
    """What failed, and its cause; the original exception is its ``__cause__``."""

    turns: int
    """Model calls that the policy answered."""

    usage: ModelUsage = field(default_factory=ModelUsage)
    """Tokens of the policy: ``input_tokens`` summed over turns, ``output_tokens`` sampled."""

    truncated: bool = False
    """Whether the last reply was cut at the sampler's token limit."""

    expected_scores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the task's scorers, in order, each with the keys that its dict score must have
    (those that its metrics name). A scorer that returned ``None`` is listed, without a score."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of sandboxes and times, e.g. ``sandbox/acquire_s``, ``time/scoring_s``."""

    build_log: Callable[[], EvalSample] | None = None
    """Builds the ``EvalSample`` of this episode, as Inspect would have logged it."""

    def score_values(self) -> dict[str, Any]:
        """Score values by scorer name."""
        return {name: score.score.value for name, score in self.scores.items()}


Outcome = TurnRequest | EpisodeResult
"""What an episode waits for next: an answer to another model call, or nothing (its result)."""

Reply = ModelOutput | Exception
"""The answer to a parked model call: an output, or an error to raise inside the solver."""
