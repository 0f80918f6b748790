"""The rows of an export: prompts of samples, and conversations of logged ones, branch by branch.

The prompt of a sample is its first model call: its solver runs up to there, without a sandbox if
possible. Conversations come from the log's model events: its final messages hold one branch of
several, and solvers take out what the model did say (``react()`` its call of ``submit``).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.event import Event, ModelEvent, SpanBeginEvent
from inspect_ai.log import EvalSample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    ModelOutput,
)
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolInfo
from inspect_ai.util import SandboxEnvironment, sandboxenv
from pydantic_core import to_json

from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.errors import ExportError
from inspect_tinker_plugin.episode.runner import EpisodeRunner
from inspect_tinker_plugin.options import DatasetOptions
from inspect_tinker_plugin.tasks.samples import choice_name, choice_places

_SCORERS = {"scorers", "scorer"}
"""Types of the spans in which a sample is scored; model calls in them are those of a judge."""

_CUT = {"max_tokens", "model_length", "content_filter"}
"""Reasons for which a reply ends that are not the model's own; it must not learn to stop there."""


@dataclass(frozen=True)
class Conversation:
    """One branch: calls of the model, each of which begins with the whole one before."""

    messages: Sequence[Mapping[str, Any]]
    """The model's last prompt, and its last reply; keys as in an export."""

    trained: Sequence[bool]
    """For each message, whether it holds words of the model to train on. A reply that two
    branches share is trained on in the first; replies that were cut or do not parse, and words
    that only look like the model's (few-shot examples), in none."""

    tools: str
    """The tools offered, as JSON."""

    tokens: int | None
    """Length as the model's provider counted it at the last call; ``None`` if it did not count."""

    @property
    def prompt(self) -> int:
        """Messages before the first that is trained on."""
        return self.trained.index(True)


def conversations(sample: EvalSample, model: str) -> list[Conversation]:
    """Return the branches of a sample, in the order of their first calls.

    Args:
        sample: A sample with its events.
        model: The model that was evaluated; the calls of others are not its words.
    """
    calls = _link_calls([_Call.of(event) for event in _calls(sample.events, model)])
    if not calls:
        raise ExportError(f"it has no call of {model}.")
    continued = {id(call.parent) for call in calls if call.parent is not None}
    taken: set[int] = set()
    found = [_branch(call, taken) for call in _in_order(calls, continued)]
    kept = [each for each in found if any(each.trained)]
    if not kept:
        raise ExportError(
            "none of the model's replies is whole: all were cut, do not parse, or are empty "
            "without a stop of the model's own."
        )
    return kept


@dataclass(eq=False)
class _Call:
    """A call of the model, and the one that it continues."""

    event: ModelEvent
    messages: list[dict[str, Any]]
    tools: str
    prefixes: list[bytes]
    """Digests of the first messages: of none, of the first, of the first two …"""
    parent: _Call | None = None

    @classmethod
    def of(cls, event: ModelEvent) -> _Call:
        said = event.output.choices[0].message
        messages = [message_row(message) for message in [*event.input, said]]
        tools = tools_json(event.tools)
        digest = hashlib.sha256(tools.encode("utf-8", "surrogatepass"))
        prefixes = [digest.digest()]
        for message in messages:
            text = json.dumps(message, sort_keys=True)
            digest.update(len(text).to_bytes(8, "big") + text.encode())
            prefixes.append(digest.digest())
        return cls(event, messages, tools, prefixes)

    @property
    def path(self) -> list[_Call]:
        """The calls of the branch up to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


def _calls(events: Sequence[Event], model: str) -> Iterator[ModelEvent]:
    """Yield the answered calls of the model, except those in which it is a judge."""
    judging: set[str] = set()
    for event in events:
        if isinstance(event, SpanBeginEvent):
            if event.type in _SCORERS or event.parent_id in judging:
                judging.add(event.id)
        elif (
            isinstance(event, ModelEvent)
            and event.model == model
            and event.role is None
            and event.span_id not in judging
            and event.error is None
            and not event.pending
            and event.output.choices
            and event.output.error is None
        ):
            yield event


def _link_calls(calls: Sequence[_Call]) -> Sequence[_Call]:
    """Find for each call the latest one that its prompt continues."""
    ends: dict[bytes, _Call] = {}
    for call in calls:
        for prefix in reversed(call.prefixes[:-1]):
            if prefix in ends:
                call.parent = ends[prefix]
                break
        ends[call.prefixes[-1]] = call
    return calls


def _in_order(calls: Sequence[_Call], continued: set[int]) -> list[_Call]:
    """Return the last call of each branch, ordered by the branches' first calls."""
    position = {id(call): number for number, call in enumerate(calls)}
    ends = [call for call in calls if id(call) not in continued]
    return sorted(ends, key=lambda end: (position[id(end.path[0])], position[id(end)]))


def _branch(end: _Call, taken: set[int]) -> Conversation:
    trained = [False] * len(end.messages)
    for call in end.path:
        if id(call) not in taken:
            taken.add(id(call))
            trained[len(call.messages) - 1] = _is_whole(call.event.output)
    return Conversation(end.messages, trained, end.tools, _tokens(end.event.output))


def _is_whole(output: ModelOutput) -> bool:
    """Return whether a message holds all that the model wrote; a reply may also be empty."""
    choice = output.choices[0]
    calls = choice.message.tool_calls or []
    return (
        choice.stop_reason not in _CUT
        and not any(call.parse_error for call in calls)
        and bool(calls or choice.message.text or choice.stop_reason == "stop")
    )


def _tokens(output: ModelOutput) -> int | None:
    usage = output.usage
    if usage is None or not usage.output_tokens:
        return None
    read = (usage.input_tokens_cache_read or 0) + (usage.input_tokens_cache_write or 0)
    return usage.input_tokens + read + usage.output_tokens


def require_text(row: Mapping[str, Any]) -> None:
    """Check that a row can be written."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ExportError(f"its text cannot be written as UTF-8 ({error.reason}).") from error


def message_row(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates take it.

    It has ``role`` and ``content``; reasoning, tool calls, and the call that is answered, where
    they apply.
    """
    content, reasoning = _content(message)
    made: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": to_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
        if message.error is not None:
            made["content"] = f"Error: {message.error.message}"  # as Inspect's providers say it
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.function is not None:
            made["name"] = message.function
    return made


def _content(message: ChatMessage) -> tuple[str, str | None]:
    """Return the text and the reasoning of a message."""
    if isinstance(message.content, str):
        return message.content, None
    texts, reasoning = [], []
    for part in message.content:
        if isinstance(part, ContentText):
            texts.append(part.text)
        elif isinstance(part, ContentReasoning):
            # What a provider encrypted is not what the model thought; its summary may be there.
            reasoning.append((part.summary or "") if part.redacted else part.reasoning)
        else:
            raise ExportError(
                f"it has content of type {part.type!r} in a {message.role} message; an "
                "export carries text only."
            )
    return "\n".join(texts), "\n".join(filter(None, reasoning)) or None


def tools_json(tools: Sequence[ToolInfo]) -> str:
    """Describe tools as chat templates and OpenAI-compatible servers expect them, as JSON."""
    return to_text([_tool(tool) for tool in tools])


def _tool(tool: ToolInfo) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters.model_dump(exclude_none=True),
        },
    }


def to_text(value: object) -> str:
    """Write JSON: dates as ISO text, models as objects, anything unknown as its ``str``."""
    try:
        return to_json(
            value, fallback=str, inf_nan_mode="strings", bytes_mode="base64", by_alias=True
        ).decode()
    except Exception as error:
        raise ExportError(f"it has a value that JSON cannot hold ({error}).") from error


PROBE = "inspect_rl_probe"


@dataclass
class _Watch:
    """What one episode did before its first model call."""

    state: TaskState | None = None
    asked_for_sandbox: bool = False


# An episode runs in its own task, which starts with a copy of this context.
_watch: ContextVar[_Watch] = ContextVar("inspect_rl_first_turn")


@dataclass(frozen=True)
class FirstTurn:
    """The first model call of a sample."""

    request: TurnRequest
    state: TaskState
    """The solver's state at that moment."""


class FirstTurns:
    """Finds the first model call of each sample of a task.

    A sample with a sandbox is first tried with a stand-in, without its files and set-up
    script. Only when the solver uses the sandbox, or fails, is it run again with the
    real one: most agents first use theirs in a tool call, which comes later.
    """

    def __init__(self, task: Task, options: DatasetOptions | None = None) -> None:
        options = replace(options or DatasetOptions(), max_turns=None)
        task = _add_observer(task)
        self._real = EpisodeRunner(
            task,
            options=options,
            solver=options.solver,
            sandbox=options.sandbox,
            first_calls=True,
        )
        bare = copy.copy(task)
        bare.sandbox = (
            None  # or Inspect would warn that the stand-in does not use its configuration
        )
        self._probe = EpisodeRunner(
            bare, options=options, solver=options.solver, sandbox=PROBE, first_calls=True
        )

    async def of(self, sample: Sample) -> FirstTurn:
        """Run a sample up to its first model call."""
        if self._real.sandbox is None and sample.sandbox is None:
            return await self._run(self._real, sample, _Watch())
        watch = _Watch()
        try:
            bare = sample.model_copy(update={"sandbox": None, "files": None, "setup": None})
            turn = await self._run(self._probe, bare, watch)
            if not watch.asked_for_sandbox:
                return turn
        except ExportError:
            pass
        return await self._run(self._real, sample, _Watch())

    async def _run(self, runner: EpisodeRunner, sample: Sample, watch: _Watch) -> FirstTurn:
        episode = runner.episode(sample)
        token = _watch.set(watch)
        try:
            outcome = await episode.start()
        finally:
            _watch.reset(token)
            await episode.close()
        if isinstance(outcome, EpisodeResult):
            raise ExportError(_why(outcome))
        assert watch.state is not None
        return FirstTurn(outcome, watch.state)


def _why(result: EpisodeResult) -> str:
    if result.error is not None:
        cause = result.error.__cause__ or result.error
        return f"[{result.error.cause}] {type(cause).__name__}: {_one_line(cause)}"
    if result.limit is not None:
        return f"a {result.limit.type} limit ended it before the first model call."
    return "its solver ended without asking the model, so there is no prompt."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _add_observer(task: Task) -> Task:
    """Put the observer in front of everything that the task's episodes run."""
    setup = task.setup if isinstance(task.setup, Sequence) else [task.setup]
    observed = copy.copy(task)
    observed.setup = [_observe(), *(each for each in setup if each is not None)]
    return observed


@solver(name="inspect_rl_observe")
def _observe() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _watch.get().state = state
        return state

    return solve


def row_of(task: str, sample: Sample, request: TurnRequest, state: TaskState) -> dict[str, Any]:
    """Make the row of a sample.

    Args:
        task: Name of the task.
        sample: The sample, with its id.
        request: The first model call of its episode.
        state: The state of the episode at that moment; it holds the order of choices that
            the solver shuffled.
    """
    row: dict[str, Any] = {
        "id": str(sample.id),
        "prompt": [message_row(message) for message in request.messages],
        "answer": _answer(sample, state),
        "info": info_of(sample),
        "task": task,
        "tools": tools_json(request.tools),
    }
    require_text(row)
    return row


def _answer(sample: Sample, state: TaskState) -> str:
    """Return the target as one string: itself, or a JSON list when there are several."""
    targets = [sample.target] if isinstance(sample.target, str) else list(sample.target)
    if sample.choices:
        positions = [choice.original_position for choice in state.choices]
        targets = [_rename(target, sample.choices, positions) for target in targets]
    return targets[0] if len(targets) == 1 else to_text(targets) if targets else ""


def _rename(target: str, choices: Sequence[str], positions: Sequence[int]) -> str:
    """Rename choices where the solver shows them in another order; other targets are left alone.

    Args:
        target: Names of the sample's own order.
        choices: The sample's choices.
        positions: For each shown choice, its position in the sample.
    """
    if not choice_places(target, choices):
        return target
    shown = {choice_name(old): choice_name(new) for new, old in enumerate(positions)}
    return re.sub(r"\d+|[^\W\d]", lambda name: shown.get(name[0].upper(), name[0]), target)


def info_of(sample: Sample) -> str:
    """Return the column ``info`` of a sample.

    Raises:
        ExportError: It has a value that JSON cannot hold.
    """
    return to_text(
        {
            "sample_id": sample.id,
            "target": sample.target,
            "choices": sample.choices,
            "metadata": sample.metadata or {},
            "files": sorted(sample.files) if sample.files else [],
            "sandbox": sample.sandbox,
        }
    )


@sandboxenv(name=PROBE)
class ProbeSandbox(SandboxEnvironment):
    """Stands in for a sandbox until the first model call; a solver that uses it is run again."""

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Make the stand-in; nothing is started."""
        return {"default": ProbeSandbox()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Do nothing: there is nothing to release."""

    async def exec(self, *args: Any, **kwargs: Any) -> Any:
        """Record the use and refuse it."""
        watch = _watch.get()
        # Inspect itself tries a command before the solver starts.
        watch.asked_for_sandbox |= watch.state is not None
        raise RuntimeError("the sandbox is not started yet")

    write_file = read_file = connection = exec
