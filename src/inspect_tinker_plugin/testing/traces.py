"""The traces of a parity check: what each side did, and where two sides differ.

A trace is plain JSON with only random values removed; each difference is found by its path and
described in one line.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from inspect_ai.event import Event, ToolEvent
from inspect_ai.log import EvalError, EvalSample, EvalSampleLimit
from inspect_ai.model import ChatMessage, ModelOutput
from inspect_ai.scorer import Score
from pydantic_core import to_jsonable_python

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL, POLICY_NAME
from inspect_tinker_plugin.contracts.wording import all_spelt_out, counted
from inspect_tinker_plugin.episode.model import PolicyGradingError
from inspect_tinker_plugin.testing.replies import SCRIPTED, Player

_DAY = 86_400.0

SCRIPTED_POLICY = f"{SCRIPTED}/{POLICY_NAME}"
"""The policy's name in the eval."""

Json = Any
"""A JSON value."""


# How calls reach the server, not what is asked of the model: a parked policy call has
# its own connection limits.
_TRANSPORT_OPTIONS = {
    "max_connections",
    "adaptive_connections",
    "max_retries",
    "timeout",
    "attempt_timeout",
    "batch",
    "cache",
}

_ROLES = {"system", "user", "assistant", "tool"}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything that the parity contract compares, from one run of one sample."""

    requests: Sequence[Json]
    """Each model call: messages, tools with their schemas, tool choice, options."""
    other_models: Mapping[str, Sequence[Json]]
    """The same for each other scripted model (a grader …), by name."""
    messages: Json
    output: Json
    scores: Json
    limit: Json
    error: Json
    """``{"type", "message"}`` of the exception that ended the sample, or ``None``."""
    store: Json
    metadata: Json
    tool_events: Json
    """Every tool call that was carried out: function, arguments, result, error."""
    script_faults: Sequence[str] = ()
    """Why the script does not fit this run: it ran out, or has replies left over."""
    ran_out: bool = False
    """Whether a script ran out, so that the rest of the run shows nothing."""
    grader: str | None = None
    """The model role to set, if the run failed since the policy would have been the grader."""
    log: EvalSample | None = field(default=None, compare=False)
    """The sample as logged."""

    def comparable(self) -> dict[str, Json]:
        """The compared parts by name."""
        return {
            "requests": self.requests,
            "other_models": self.other_models,
            "messages": self.messages,
            "output": self.output,
            "scores": self.scores,
            "limit": self.limit,
            "error": self.error,
            "store": self.store,
            "metadata": self.metadata,
            "tool_events": self.tool_events,
        }


class Names:
    """Renames generated ids to ``id1``, ``id2`` … in order of appearance.

    Only the ids are replaced, so two runs agree exactly when the same messages and
    calls carry the same ids in the same places.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        """Return the stand-in for an id."""
        return f"id{self.place(name)}"

    def place(self, name: str) -> int:
        """Return when an id first appeared, counted from 1."""
        return self._places.setdefault(name, len(self._places) + 1)


def jsonable(value: Any) -> Json:
    """Convert a value as a round trip through a log file would.

    As there, what JSON cannot express (an object, a function) is ``None``, and half a surrogate
    pair is spelt out.
    """
    plain = to_jsonable_python(
        value, exclude_none=True, inf_nan_mode="constants", fallback=lambda _: None
    )
    spelt: Json = all_spelt_out(json.loads(json.dumps(plain)))
    return spelt


def dump_message(message: ChatMessage, names: Names) -> Json:
    """Convert a message; generated ids are renamed and the model's name is left out."""
    return _renamed(jsonable(message), names)


def dump_value(value: Any, names: Names) -> Json:
    """Convert any other value; messages inside it (a grader's conversation, say) as elsewhere."""
    return _renamed(jsonable(value), names)


def _renamed(value: Json, names: Names) -> Json:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("role") not in _ROLES or "content" not in value:
        return {key: _renamed(item, names) for key, item in value.items()}
    # Which provider answers differs by construction: scripted model or policy.
    message = {key: item for key, item in value.items() if key != "model"}
    for key in ("id", "tool_call_id"):
        # a user message that stands for several tool results has a list of ids
        if isinstance(message.get(key), list):
            message[key] = [names(each) for each in message[key]]
        elif message.get(key):
            message[key] = names(message[key])
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**tool_call, "id": names(tool_call["id"])} for tool_call in message["tool_calls"]
        ]
    return message


def dump_request(request: TurnRequest, names: Names) -> Json:
    """Convert a model call to its compared form."""
    options = jsonable(request.config)
    return {
        "messages": [dump_message(message, names) for message in request.messages],
        "tools": [jsonable(tool) for tool in request.tools],
        "tool_choice": jsonable(request.tool_choice),
        "options": {k: v for k, v in options.items() if k not in _TRANSPORT_OPTIONS},
    }


def dump_requests(requests: Sequence[TurnRequest], names: Names, *, ordered: bool) -> list[Json]:
    """Convert all calls of a model; those of a concurrent solver are sorted by content."""
    if not ordered:
        requests = sorted(
            requests, key=lambda request: [(m.role, m.text) for m in request.messages]
        )
    return [dump_request(request, names) for request in requests]


def dump_output(output: ModelOutput, names: Names) -> Json:
    """Convert the final output, without model name, timing and usage."""
    return {
        "choices": [
            {"message": dump_message(choice.message, names), "stop_reason": choice.stop_reason}
            for choice in output.choices
        ],
        "error": output.error,
    }


def dump_scores(scores: Mapping[str, Score] | None, names: Names) -> Json:
    """Convert scores, by name: value, answer, explanation, metadata, reason, edit history."""
    return {name: dump_value(score, names) for name, score in (scores or {}).items()}


def dump_limit(limit: EvalSampleLimit | None) -> Json:
    """Return type, value and reason of a limit."""
    return None if limit is None else jsonable(limit)


def dump_exception(error: BaseException | None) -> Json:
    """Return an exception's type and message, as :func:`dump_logged_error` reads a log's."""
    if error is None:
        return None
    message = internals.without_markup(getattr(error, "message", repr(error)))
    return {"type": type(error).__name__, "message": message}


def dump_logged_error(error: EvalError | None) -> Json:
    """Return a logged error's type and message.

    The type is in the traceback: the first line after the last frames that is not indented.
    """
    if error is None:
        return None
    last = error.traceback.rpartition("Traceback (most recent call last):")[2]
    shown = re.search(r"^([A-Za-z_][\w.]*)(?::|$)", last, re.MULTILINE)
    kind = shown.group(1) if shown else "unknown"
    return {"type": kind.rsplit(".", 1)[-1], "message": internals.without_markup(error.message)}


def dump_tool_events(events: Sequence[Event], names: Names, *, ordered: bool) -> Json:
    """Return the tool calls among the events, in the order in which the model made them."""
    calls = [event for event in events if isinstance(event, ToolEvent)]
    dumped = [
        {
            "function": event.function,
            "arguments": jsonable(event.arguments),
            "result": jsonable(event.result),
            "error": None if event.error is None else jsonable(event.error),
        }
        # calls of one reply run in parallel, so their events come in any order
        for event in sorted(calls, key=lambda event: names.place(event.id))
    ]
    return dumped if ordered else sorted(dumped, key=repr)


def script_faults(players: Mapping[str, Player]) -> list[str]:
    """Return what is wrong with scripts that were played: too short, or too long."""
    faults = []
    for name, player in players.items():
        if player.refusals:
            played = len(player.requests) - player.refusals
            faults.append(f"the script of {name!r} ran out after {counted(played, 'turn')}")
        if player.unused:
            faults.append(f"the script of {name!r} has {player.unused} unused replies")
    return faults


def _of_players(
    policy: Player, others: Mapping[str, Player], names: Names, *, ordered: bool
) -> dict[str, Any]:
    """Return what a trace says of the models: the policy's requests are the first to be named."""
    return {
        "requests": dump_requests(policy.requests, names, ordered=ordered),
        "other_models": {
            name: dump_requests(player.requests, names, ordered=ordered)
            for name, player in others.items()
        },
        "script_faults": script_faults({"policy": policy, **others}),
        "ran_out": any(player.refusals for player in (policy, *others.values())),
    }


def _missing_grader(error: BaseException | None) -> str | None:
    while error is not None and not isinstance(error, PolicyGradingError):
        error = error.__cause__
    return None if error is None else error.role or "grader"


def trace_of_result(
    result: EpisodeResult,
    *,
    policy: Player,
    others: Mapping[str, Player],
    ordered: bool = True,
    events: Sequence[Event] = (),
) -> Trace:
    """Return the trace of an episode.

    Its tool events come from the log, or from ``events`` when the episode has no log.
    """
    names = Names()
    log = None if result.build_log is None else result.build_log()
    state = result.state
    return Trace(
        **_of_players(policy, others, names, ordered=ordered),
        messages=[dump_message(message, names) for message in state.messages],
        output=dump_output(state.output, names),
        scores=dump_scores({name: each.score for name, each in result.scores.items()}, names),
        limit=dump_limit(result.limit),
        error=dump_exception(None if result.error is None else result.error.__cause__),
        grader=_missing_grader(result.error),
        store=dump_value(dict(state.store.items()), names),
        metadata=dump_value(state.metadata, names),
        tool_events=dump_tool_events(events if log is None else log.events, names, ordered=ordered),
        log=log,
    )


def trace_of_log(
    sample: EvalSample,
    *,
    policy: Player,
    others: Mapping[str, Player],
    ordered: bool = True,
) -> Trace:
    """Return the trace of a sample that Inspect logged."""
    names = Names()
    return Trace(
        **_of_players(policy, others, names, ordered=ordered),
        messages=[dump_message(message, names) for message in sample.messages],
        output=dump_output(sample.output, names),
        scores=dump_scores(sample.scores, names),
        limit=dump_limit(sample.limit),
        error=dump_logged_error(sample.error),
        store=dump_value(sample.store, names),
        metadata=dump_value(sample.metadata, names),
        tool_events=dump_tool_events(sample.events, names, ordered=ordered),
        log=sample,
    )


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for a value that one side does not have; ``None`` is a value."""


@dataclass(frozen=True)
class Difference:
    """One place where the two sides disagree."""

    path: str
    """Where, e.g. ``requests[1].tools[0].name``."""
    eval: Json
    """What ``inspect_ai.eval`` had, or ``ABSENT``."""
    episode: Json
    """What the episode had, or ``ABSENT``."""

    def __str__(self) -> str:
        return f"{self.path}: eval {_short(self.eval)}, episode {_short(self.episode)}"


def compare_traces(
    eval_side: Trace,
    episode_side: Trace,
    *,
    same_tokens: bool = True,
    ignore: Sequence[str] = (),
) -> list[Difference]:
    """Return all differences between two traces, in the order of the run.

    Args:
        eval_side: The run under ``inspect_ai.eval``.
        episode_side: The run as an episode.
        same_tokens: Whether both sides count tokens alike. If not, the count in the reason
            of a token or cost limit is left out; nothing else is.
        ignore: Paths to leave out, with everything below them; ``*`` is anything.
    """
    left, right = eval_side.comparable(), episode_side.comparable()
    if eval_side.ran_out or episode_side.ran_out:
        # What follows is up to each side: some solvers ask again, and a rollout just ends.
        played = min(len(eval_side.requests), len(episode_side.requests))
        left, right = ({"requests": side["requests"][:played]} for side in (left, right))
    elif not same_tokens:
        for side in (left, right):
            side["limit"] = _without_count(side["limit"])
    left_out = [re.compile(re.escape(path).replace(r"\*", ".*") + r"(?![^.\[])") for path in ignore]
    return [
        each
        for each in differences(left, right)
        if not any(path.match(each.path) for path in left_out)
    ]


def _without_count(limit: Json) -> Json:
    if limit is None or limit["type"] not in ("token", "cost"):
        return limit
    return {**limit, "reason": re.sub(r"value: [^;]+;", "value: …;", limit["reason"])}


def differences(left: Json, right: Json, path: str = "") -> Iterator[Difference]:
    """Compare two JSON values recursively; numbers agree only within their type, NaN equals NaN."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(key for key in right if key not in left)]:
            where = f"{path}.{key}" if path else str(key)
            yield from differences(left.get(key, ABSENT), right.get(key, ABSENT), where)
    elif isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            yield from differences(
                left[index] if index < len(left) else ABSENT,
                right[index] if index < len(right) else ABSENT,
                f"{path}[{index}]",
            )
    elif not _same(left, right):
        yield Difference(path, left, right)


def _same(left: Json, right: Json) -> bool:
    if _is_now(left) and _is_now(right):
        return True
    if isinstance(left, str) and isinstance(right, str):
        return left.replace(SCRIPTED_POLICY, POLICY_MODEL) == right  # its name in an eval
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and bool(left == right)


def _is_now(value: Json) -> bool:
    """Whether a value is a time of today, by a clock that each side reads for itself."""
    if isinstance(value, str) and len(value) > len("2000-01-01"):
        try:
            value = datetime.fromisoformat(value).timestamp()
        except ValueError:
            return False
    return isinstance(value, float) and abs(time.time() - value) < _DAY


def _short(value: Json, width: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
