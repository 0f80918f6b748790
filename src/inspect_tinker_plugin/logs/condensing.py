"""Makes a record small before it is written: long texts and repeated messages are kept once.

The result is that of Inspect's ``condense_sample`` as JSON. Inspect copies each object on its way,
and looks through all of the record twice more; here, the record is made into JSON values first, and
those are changed in place. What is rare in a rollout is left to Inspect: single events of other
types, and whole records with contents of other types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from typing import Any

from inspect_ai.event import (
    Event,
    ModelEvent,
    SampleInitEvent,
    ScoreEvent,
    SpanBeginEvent,
    SpanEndEvent,
    StateEvent,
    StoreEvent,
    ToolEvent,
)
from inspect_ai.log import EvalSample, condense_sample
from inspect_ai.model import ChatMessage
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.surrogates import all_spelt_out

logger = getLogger(__name__)

_LONG = 100
"""Characters above which a text in an event is kept once, as an attachment."""

_COMMON = (SampleInitEvent, SpanBeginEvent, SpanEndEvent, StateEvent, StoreEvent, ScoreEvent)

_CONTENTS = frozenset({"text", "reasoning", "image", "audio", "video", "document"})
"""Kinds of content with one field that may be long, or a file's data. It has the kind's name."""

_DATA = re.compile(r"data:[^,]*;base64,")


class _UncommonError(Exception):
    """A record has something that is left to Inspect."""


def condensed(record: EvalSample) -> dict[str, Any]:
    """Return the fields of a condensed record as JSON values.

    Raises:
        Exception: It cannot be written to a log.
    """
    names = internals.optional_names()
    if names is not None:
        try:
            return _Condensing(names.mm3_hash).fields(record)
        except Exception as reason:  # whatever it is: Inspect copes with it, or says what is wrong
            logger.debug("a record is left to Inspect: %r", reason)
    fields: dict[str, Any] = from_json(internals.to_json_safe(_by_inspect(record), indent=None))
    return fields


def _by_inspect(record: EvalSample) -> EvalSample:
    try:
        return condense_sample(record)
    except PydanticSerializationError:  # half surrogate pairs in messages to the model
        plain = to_jsonable_python(record, exclude_none=True, fallback=lambda _: None)
        return condense_sample(EvalSample.model_validate(all_spelt_out(plain)))


class _Condensing:
    """What the parts of one record share: attachments, and the messages of its model calls."""

    def __init__(self, hash_of: Callable[[str], str]) -> None:
        self._hash_of = hash_of
        self._attachments: dict[str, str] = {}
        self._pool: list[Any] = []
        self._places: dict[bytes, int] = {}
        self._seen: dict[int, int] = {}

    def fields(self, record: EvalSample) -> dict[str, Any]:
        """Return the record's fields as JSON values."""
        if record.attachments or record.events_data or record.error_retries:
            raise _UncommonError
        events = self._others_condensed(record.events)
        bare = [
            event.model_copy(update={"input": []}) if isinstance(event, ModelEvent) else event
            for event in events
        ]
        fields: dict[str, Any] = _jsonable(record.model_copy(update={"events": bare}))
        for event, made in zip(events, fields["events"], strict=True):
            self._change(event, made)
        if isinstance(record.input, list):
            self._messages(fields["input"], self._data)
        self._messages(fields["messages"], self._data)
        fields["attachments"] = self._attachments
        fields["events_data"] = {"messages": self._pool, "calls": []}
        return fields

    def _others_condensed(self, events: Sequence[Event]) -> Sequence[Event]:
        """Let Inspect condense the events of other types."""
        others = [event for event in events if not _is_common(event)]
        if not others:
            return events
        if any(isinstance(event, ModelEvent) for event in others):
            raise _UncommonError  # its messages belong to the same pool
        made = condense_sample(
            EvalSample.model_construct(id=0, epoch=1, input="", target="", events=others)
        )
        self._attachments.update(made.attachments)
        instead = iter(made.events)
        return [event if _is_common(event) else next(instead) for event in events]

    def _change(self, event: Event, made: dict[str, Any]) -> None:
        if isinstance(event, ModelEvent):
            self._change_call(event, made)
        elif isinstance(event, SampleInitEvent):
            sample = made["sample"]
            if isinstance(sample["input"], str):
                sample["input"] = self._text(sample["input"])
            else:
                self._messages(sample["input"], self._text)
            if "state" in made:
                made["state"] = self._value(made["state"])
        elif isinstance(event, StateEvent | StoreEvent):
            for change in made["changes"]:
                if "value" in change:
                    change["value"] = self._value(change["value"])
        elif isinstance(event, ToolEvent) and _is_common(event):
            made["arguments"] = self._value(made["arguments"])

    def _change_call(self, event: ModelEvent, made: dict[str, Any]) -> None:
        for tool in made["tools"]:
            tool["description"] = self._text(tool["description"])
        self._messages([choice["message"] for choice in made["output"]["choices"]], self._text)
        if event.input:
            made["input_refs"] = list(_ranges(self._in_pool(event.input)))

    def _in_pool(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the places of messages in the pool, which gets those that it does not have."""
        new = {id(message): message for message in messages if id(message) not in self._seen}
        made = _jsonable(list(new.values()))
        self._messages(made, self._text)
        for key, message in zip(new, made, strict=True):
            said = to_json({name: value for name, value in message.items() if name != "id"})
            place = self._places.setdefault(said, len(self._pool))
            if place == len(self._pool):
                self._pool.append(message)
            self._seen[key] = place
        return [self._seen[id(message)] for message in messages]

    def _messages(self, messages: Sequence[dict[str, Any]], text: Callable[[str], str]) -> None:
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                message["content"] = text(content)
                continue
            for part in content:
                kind = part["type"]
                if kind not in _CONTENTS:
                    raise _UncommonError
                part[kind] = text(part[kind])
            for call in message.get("tool_calls") or ():
                call["arguments"] = self._value(call["arguments"], text)
                view = call.get("view")
                if view and view["content"]:
                    view["content"] = text(view["content"])

    def _value(self, value: Any, text: Callable[[str], str] | None = None) -> Any:
        text = text or self._text
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            for key, each in value.items():
                if isinstance(each, str):
                    value[key] = text(each)
                elif isinstance(each, dict | list):
                    self._value(each, text)
        elif isinstance(value, list):
            value[:] = [self._value(each, text) for each in value]
        return value

    def _text(self, text: str) -> str:
        return self._attached(text) if len(text) > _LONG else text

    def _data(self, text: str) -> str:
        return self._attached(text) if _DATA.match(text) else text

    def _attached(self, text: str) -> str:
        key = self._hash_of(text)
        self._attachments[key] = text
        return f"attachment://{key}"


def _is_common(event: Event) -> bool:
    if isinstance(event, ModelEvent):
        return event.call is None
    if isinstance(event, ToolEvent):
        return isinstance(event.result, str) and not event.events
    return isinstance(event, _COMMON)


def _jsonable(value: Any) -> Any:
    return to_jsonable_python(value, exclude_none=True, fallback=lambda _: None)


def _ranges(places: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places as ranges, each with its first place and the one after its last."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield [places[first], places[at - 1] + 1]
            first = at
