"""The compared parts of two logged samples: all that `inspect view` shows except times and ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inspect_ai.event import Event, SpanBeginEvent
from inspect_ai.log import EvalSample

from inspect_tinker_plugin.testing.traces import (
    Names,
    dump_logged_error,
    dump_output,
    dump_value,
    jsonable,
)

FIELDS = (
    "id",
    "epoch",
    "input",
    "choices",
    "target",
    "files",
    "turn_count",
    "message_limit",
    "token_limit",
    "token_limit_type",
    "token_limit_usage",
    "time_limit",
    "role_usage",
    "error_retries",
    "store",
    "metadata",
)

# An eval also keeps Python's own log records, and the moment at which it interrupts.
EVENTS_OF_AN_EVAL = {"logger", "interrupt"}


def logged(sample: EvalSample, *, ordered: bool) -> dict[str, Any]:
    """The compared parts of a logged sample by name."""
    names = Names()
    parts: dict[str, Any] = {
        "messages": dump_value(sample.messages, names),
        "output": dump_output(sample.output, names),
        "scores": dump_value(sample.scores or {}, names),
        "limit": jsonable(sample.limit),
        "error": dump_logged_error(sample.error),
        "usage": [jsonable(usage) for usage in sample.model_usage.values()],
        **{field: dump_value(getattr(sample, field), names) for field in FIELDS},
    }
    shown = [each for each in sample.events if each.event not in EVENTS_OF_AN_EVAL]
    spans = {each.id: each for each in shown if isinstance(each, SpanBeginEvent)}
    events = [_placed(each, spans) for each in shown]
    parts["events"] = events if ordered else sorted(events)
    return parts


def _placed(event: Event, spans: Mapping[str, SpanBeginEvent]) -> str:
    """The kind of an event, after the spans around it."""
    place: list[str] = [event.event]
    around = spans.get(event.span_id or "")
    while around is not None:
        place.append(f"{around.type}:{around.name}")
        around = spans.get(around.parent_id or "")
    return "/".join(reversed(place))
