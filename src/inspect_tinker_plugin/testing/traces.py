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
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from inspect_ai.event import Event, ToolEvent
from inspect_ai.log import EvalError, EvalSample, EvalSampleLimit
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Score
from inspect_ai.solver import TaskState
from pydantic_core import to_jsonable_python

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import EpisodeResult, TurnRequest
from inspect_tinker_plugin.contracts.policy import POLICY_MODEL, POLICY_NAME
from inspect_tinker_plugin.contracts.wording import counted, spell_all_out
from inspect_tinker_plugin.episode.model import POLICY_CONFIG, PolicyGradingError
from inspect_tinker_plugin.testing.replies import SCRIPTED, Player

_DAY = 86_400.0

SCRIPTED_POLICY = f"{SCRIPTED}/{POLICY_NAME}"
"""The policy's name in the eval."""

Json = Any
"""A JSON value."""


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
        left_out = ("script_faults", "ran_out", "grader", "log")
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in left_out
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
    spelt: Json = spell_all_out(json.loads(json.dumps(plain)))
    return spelt


def dump_value(value: Any, names: Names) -> Json:
    """Convert a value; ids of messages in it are renamed, and the model's name is left out."""
    return _rename(jsonable(value), names)


def _rename(value: Json, names: Names) -> Json:
    if isinstance(value, list):
        return [_rename(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("role") not in _ROLES or "content" not in value:
        return {key: _rename(item, names) for key, item in value.items()}
    # Which provider answers differs by construction: scripted model or policy.
    message = {key: item for key, item in value.items() if key != "model"}
    for key in ("id", "tool_call_id"):
        # a user message that stands for several tool results has a list of ids
        if isinstance(message.get(key), list):
            message[key] = [names(each) for each in message[key]]
        elif message.get(key):
            message[key] = names(message[key])
    calls = [{**call, "id": names(call["id"])} for call in message.pop("tool_calls", None) or ()]
    if calls:  # an empty list of a reply to the Responses API is left out by Inspect's log
        message["tool_calls"] = calls
    return message


def dump_requests(requests: Sequence[TurnRequest], names: Names, *, ordered: bool) -> list[Json]:
    """Convert all calls of a model; those of a concurrent solver are sorted by content."""
    if not ordered:
        requests = sorted(
            requests, key=lambda request: [(m.role, m.text) for m in request.messages]
        )
    return [
        {
            "messages": dump_value(request.messages, names),
            "tools": jsonable(request.tools),
            "tool_choice": jsonable(request.tool_choice),
            "options": jsonable(request.config.model_copy(update=dict.fromkeys(POLICY_CONFIG))),
        }
        for request in requests
    ]


def dump_output(output: ModelOutput, names: Names) -> Json:
    """Convert the final output, without model name, timing and usage."""
    kept = output.model_dump(include={"error": True, "choices": {"__all__": {"stop_reason"}}})
    for choice, each in zip(kept["choices"], output.choices, strict=True):
        choice["message"] = dump_value(each.message, names)
    return kept


def dump_logged_error(error: EvalError | None) -> Json:
    """Return a logged error's type and message.

    The type is in the traceback: the first line after the last frames that is not indented.
    """
    if error is None:
        return None
    head = r"(?m)^(?:  \+ Exception Group )?Traceback \(most recent call last\):"
    last = re.split(head, error.traceback)[-1]
    shown = re.search(r"(?m)^(?:  \| )?([A-Za-z_][\w.]*)(?::|$)", last)
    kind = shown.group(1) if shown else "unknown"
    return {"type": kind.rsplit(".", 1)[-1], "message": internals.without_markup(error.message)}


def _dump_exception(error: BaseException | None) -> Json:
    if error is None:
        return None
    message = internals.without_markup(getattr(error, "message", repr(error)))
    return {"type": type(error).__name__, "message": message}


def _dump_tool_events(events: Sequence[Event], names: Names, *, ordered: bool) -> Json:
    """Return the tool calls among the events, in the order in which the model made them."""
    calls = [event for event in events if isinstance(event, ToolEvent)]
    # calls of one reply run in parallel, so their events come in any order
    calls.sort(key=lambda event: names.place(event.id))
    parts = ("function", "arguments", "result", "error")
    dumped = [{part: jsonable(getattr(event, part)) for part in parts} for event in calls]
    return dumped if ordered else sorted(dumped, key=repr)


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
    log = None if result.build_log is None else result.build_log()
    trace = _trace(
        result.state,
        scores={name: each.score for name, each in result.scores.items()},
        store=dict(result.state.store.items()),
        limit=result.limit,
        events=events if log is None else log.events,
        players={"policy": policy, **others},
        ordered=ordered,
    )
    error = _dump_exception(None if result.error is None else result.error.__cause__)
    return replace(trace, error=error, grader=_missing_grader(result.error), log=log)


def trace_of_log(
    sample: EvalSample,
    *,
    policy: Player,
    others: Mapping[str, Player],
    ordered: bool = True,
) -> Trace:
    """Return the trace of a sample that Inspect logged."""
    trace = _trace(
        sample,
        scores=sample.scores or {},
        store=sample.store,
        limit=sample.limit,
        events=sample.events,
        players={"policy": policy, **others},
        ordered=ordered,
    )
    return replace(trace, error=dump_logged_error(sample.error), log=sample)


def _trace(
    ended: TaskState | EvalSample,
    *,
    scores: Mapping[str, Score],
    store: Mapping[str, Any],
    limit: EvalSampleLimit | None,
    events: Sequence[Event],
    players: Mapping[str, Player],
    ordered: bool,
) -> Trace:
    """Return the trace of a sample that ended, without its error."""
    names = Names()
    # the policy's requests are the first to be named
    requests = {
        name: dump_requests(player.requests, names, ordered=ordered)
        for name, player in players.items()
    }
    faults = []
    for name, player in players.items():
        if player.refusals:
            played = len(player.requests) - player.refusals
            faults.append(f"the script of {name!r} ran out after {counted(played, 'turn')}")
        if player.unused:
            faults.append(f"the script of {name!r} has {player.unused} unused replies")
    return Trace(
        requests=requests.pop("policy"),
        other_models=requests,
        script_faults=faults,
        ran_out=any(player.refusals for player in players.values()),
        messages=dump_value(ended.messages, names),
        output=dump_output(ended.output, names),
        scores=dump_value(scores, names),
        limit=jsonable(limit),
        error=None,
        store=dump_value(store, names),
        metadata=dump_value(ended.metadata, names),
        tool_events=_dump_tool_events(events, names, ordered=ordered),
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

    Without ``same_tokens``, the count in the reason of a token or cost limit is left out. Paths in
    ``ignore`` leave out everything below them; ``*`` is anything.
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


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:159]}…"
