"""What plugins return: stages of samples, observers and their events, samplers, tool executors."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ContentAudio,
    ContentDocument,
    ContentImage,
    ContentText,
    ContentVideo,
    ModelOutput,
)
from inspect_ai.scorer import SampleScore
from inspect_ai.tool import ToolCall, ToolResult

from inspect_tinker_plugin.contracts.episodes import Metrics
from inspect_tinker_plugin.contracts.errors import InspectRLError
from inspect_tinker_plugin.contracts.wording import object_name


@dataclass(frozen=True)
class SampleStage:
    """How one plugin changes the samples of a task: it drops some, then transforms the rest."""

    keep: Callable[[Sample], bool] | None = None
    """Decides whether a sample stays; ``None`` keeps all. It needs one pass over the dataset."""

    transform: Callable[[Sample], Sample] | None = None
    """Returns the sample to use, from a copy of the task's; called when a sample is needed."""


@dataclass(frozen=True, kw_only=True)
class EpisodeStarted:
    """An episode is about to run."""

    task: str
    """Name of the task."""

    sample: Sample
    """A copy of the sample."""

    epoch: int
    """Epoch of the sample, from 1."""

    episode: str
    """Id of the episode, the same in all of its events."""


@dataclass(frozen=True, kw_only=True)
class TurnTaken:
    """The policy has answered a model call."""

    episode: str
    """Id of the episode."""

    index: int
    """Number of the model call, from 0."""

    messages: Sequence[ChatMessage]
    """A copy of the conversation that the policy saw."""

    output: ModelOutput
    """A copy of the policy's answer."""


@dataclass(frozen=True, kw_only=True)
class EpisodeEnded:
    """An episode has ended, with or without a failure."""

    episode: str
    """Id of the episode."""

    task: str
    """Name of the task."""

    sample_id: int | str | None
    """Id of the sample."""

    epoch: int
    """Epoch of the sample, from 1."""

    messages: Sequence[ChatMessage]
    """A copy of the final conversation."""

    scores: Mapping[str, SampleScore]
    """Copies of the scores."""

    reward: float | None
    """The reward, before that of its group; ``None`` when there is none."""

    limit: str | None
    """Type of the limit that ended the episode, if there was one."""

    error: str | None
    """What failed, in words, if anything did."""

    cause: str | None
    """The cause of a failure, as in ``on_error``."""

    turns: int
    """Model calls that the policy answered."""

    metrics: Metrics = field(default_factory=dict)
    """Metrics of the episode."""


class EpisodeObserver:
    """Base class of observers: override the methods of interest, plain or async.

    Plain methods run inline and should be quick. An exception in a method is logged once.
    """

    def on_episode_start(self, event: EpisodeStarted, /) -> Any:
        """An episode is about to run."""

    def on_turn(self, event: TurnTaken, /) -> Any:
        """The policy has answered a model call."""

    def on_episode_end(self, event: EpisodeEnded, /) -> Any:
        """An episode has ended, with or without a failure."""


@dataclass(frozen=True, kw_only=True)
class SamplePool:
    """The samples that a sampler chooses from."""

    task: str
    """Name of the task."""

    samples: Sequence[Sample]
    """The samples; one is looked up when it is asked for."""

    group_size: int
    """Episodes per group."""

    seed: int
    """The dataset's seed, 0 if it has none."""


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """How a group ended that was returned to the trainer, or was found in a log."""

    position: int
    """Position of its sample in the pool, from 0."""

    rewards: tuple[float, ...]
    """Rewards of its episodes, as the trainer got them; fewer than a group's if some failed."""

    step: int | None = None
    """Step of the batch that it belongs to, from 0; ``None`` for attempts from logs."""


class Sampler:
    """Base class of samplers: override ``choose``, and what else is of interest.

    What a sampler chooses may depend on the pool, on the outcomes that it was told, in their order,
    and on the step; not on chance without a fixed seed, and not on earlier choices. Then nothing
    of it needs to be saved: a run that is continued makes a new sampler, and tells it the outcomes
    up to its checkpoint.
    """

    def begin(self, pool: SamplePool, /) -> None:
        """Get to know the samples; called once, before everything else."""

    def learn(self, outcome: GroupOutcome, /) -> None:
        """Take note of a group's rewards: first of those in logs, then of the run's own."""

    def choose(self, step: int, count: int, /) -> Sequence[int]:
        """Choose the samples of a batch.

        Args:
            step: The step that the batch is for, from 0.
            count: Groups of the batch.

        Returns:
            ``count`` positions in the pool; one may be there more than once.
        """
        raise NotImplementedError

    def figures(self) -> Mapping[str, float]:
        """Return figures about the current state, kept beside each choice; none by default."""
        return {}


SamplerSpec = str | Callable[[], Sampler]
"""What ``sampler=`` takes: an expression, or a function that makes a new sampler."""

Memory: TypeAlias = MutableMapping[Any, Any]
"""What executors keep between calls; keys start with the executor itself."""


@dataclass(frozen=True, kw_only=True)
class ToolScope:
    """The episode that tool calls belong to, with the memory of its executors.

    Executors are shared and never change; whatever they need to keep is stored here.
    """

    task: str
    """Name of the task."""

    sample_id: int | str | None
    """Id of the sample."""

    epoch: int = 1
    """Epoch of the sample, from 1."""

    episode: Memory = field(default_factory=dict)
    """Kept for this episode."""

    group: Memory = field(default_factory=dict)
    """Kept for the episodes of one group."""

    dataset: Memory = field(default_factory=dict)
    """Kept for all episodes of a dataset in this process."""

    def memory(self, span: Literal["episode", "group", "dataset"]) -> Memory:
        """Return the memory of a span."""
        return {"episode": self.episode, "group": self.group, "dataset": self.dataset}[span]


@dataclass(frozen=True, kw_only=True)
class ToolInvocation:
    """One tool call that Inspect has parsed, approved and validated, about to be carried out."""

    call: ToolCall
    """A copy of the call, with the changes of an approver."""

    arguments: dict[str, Any]
    """Arguments as the tool's function takes them (dataclasses and models made of JSON)."""

    scope: ToolScope
    """The episode, and the memory of executors."""

    inspect: Callable[..., Awaitable[ToolResult]] = field(repr=False)
    """The tool's own function."""

    given: list[type] = field(default_factory=list, repr=False, compare=False)
    """Types of the tool's own results in this call; an executor may pass them on."""

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return self.call.function

    async def run(self) -> ToolResult:
        """Let Inspect carry the call out: call the tool's own function."""
        try:
            result = await self.inspect(**self.arguments)
        except SystemExit as error:  # the tool's own, not its executor's
            raise RuntimeError(f"a tool raised {error!r}") from error
        self.given.append(type(result))
        return result


@runtime_checkable
class ToolExecutor(Protocol):
    """Decides how one tool call is carried out: run it, replace, cache, limit or simulate it.

    What it returns or raises reaches messages, events and limits as if the tool had done so: a
    ``ToolError`` or ``TimeoutError`` is reported to the model, another exception ends the
    episode. Several calls may run at once. Keep it a frozen dataclass: it is shared by
    episodes and travels to worker processes.
    """

    async def __call__(self, invocation: ToolInvocation, /) -> ToolResult:
        """Carry out a call."""
        ...


ToolFunction: TypeAlias = Callable[[ToolInvocation], Awaitable[ToolResult]]
"""An async function that serves as an executor."""


class ToolExecutorError(InspectRLError):
    """A tool executor returned something that is not a result of a tool.

    Inspect would show the model its text, e.g. ``None``, as if the tool had returned that.

    Attributes:
        executor: its expression or name.
        tool: name of the tool that was called.
    """

    def __init__(self, message: str, *, executor: str, tool: str) -> None:
        super().__init__(message)
        self.executor = executor
        self.tool = tool


async def carry_out(
    executor: ToolExecutor | ToolFunction,
    invocation: ToolInvocation,
    *,
    name: str | None = None,
    origin: str = "",
) -> ToolResult:
    """Let an executor carry out a call, and check the result.

    Args:
        executor: the executor.
        invocation: the call.
        name: the executor's name for messages, if not its own.
        origin: the plugin that it comes from, for the message.

    Raises:
        ToolExecutorError: it returned no tool result, or would have ended the process. Results of
            the tool itself are accepted.
    """
    name = name or object_name(executor)
    try:
        answer: Any = executor(invocation)
        result: Any = await answer if inspect.isawaitable(answer) else answer
    except SystemExit as error:
        raise ToolExecutorError(
            f"tool executor {name!r}{origin} raised {error!r} for a call of {invocation.tool!r}",
            executor=name,
            tool=invocation.tool,
        ) from error
    if _is_result(result) or type(result) in invocation.given:
        return cast(ToolResult, result)
    if inspect.iscoroutine(result):
        result.close()
    raise ToolExecutorError(
        f"tool executor {name!r}{origin} gave {result!r:.80} for a call of {invocation.tool!r}, "
        "not a result of a tool: text, a number, content or a list of content",
        executor=name,
        tool=invocation.tool,
    )


_CONTENT = (ContentText, ContentImage, ContentAudio, ContentVideo, ContentDocument)


def _is_result(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, _CONTENT) for each in value)
    return isinstance(value, (str, int, float, *_CONTENT))
