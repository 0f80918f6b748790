"""Monitors of a task: Inspect's sentinel, resolved once and counted in the metrics of an episode.

Inspect runs them at model and tool calls; this module only names them and reads what they report.
They do in an episode what they do in an eval: a protocol may change, reject or end a step; monitors
without a protocol are only observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspect_ai import Task
from inspect_ai.event import Event

from inspect_tinker_plugin import inspect_internals as internals
from inspect_tinker_plugin.contracts.episodes import MONITOR, Metrics
from inspect_tinker_plugin.contracts.errors import ConfigError

_ACTS = frozenset({"modify", "reject", "terminate"})


@dataclass(frozen=True)
class Monitors:
    """The monitors and protocols that watch the episodes of a task."""

    root: Any = None
    """The protocol that Inspect asks at each step; ``None`` if nothing watches."""
    monitors: Sequence[str] = ()
    """Paths of the monitors, such as ``suspicion`` or ``threshold/suspicion``."""
    protocols: Sequence[str] = ()
    """Paths of the protocols."""
    config: Any = None
    """How a log states them."""

    def __bool__(self) -> bool:
        return self.root is not None

    def measure(self, events: Sequence[Event]) -> Metrics:
        """Return the metrics of an episode.

        ``monitor/PATH`` is the highest suspicion that a monitor reported, 0 if it had no step to
        watch, and missing if it failed at each; ``monitor/PATH/failed`` counts its failures, and
        ``monitor/PATH/unfinished`` the steps at which a limit cut it off.
        ``monitor/PATH/blocked`` is 1 if a protocol changed, rejected or ended a step, and
        ``monitor/PATH/flagged`` is 1 if a report asked for an audit or was handed on.
        """
        if not self:
            return {}
        seen = {path: _Seen() for path in (*self.monitors, *self.protocols)}
        reports = [event for event in events if event.event == "sentinel"]
        # a protocol that ends the episode cuts off those beside it, which is no limit's doing
        ended = any(event.action == "terminate" for event in reports)
        for event in reports:
            if not (ended and event.status == "cancelled"):
                path = event.path or internals.unqualified_name(event.factory)
                seen.setdefault(path, _Seen()).add(event)
        return {
            f"{MONITOR}{path}{kind}": value
            for path, reports in seen.items()
            for kind, value in reports.figures(is_monitor=path in self.monitors).items()
        }


@dataclass
class _Seen:
    suspicion: list[float] = field(default_factory=list)
    failed: int = 0
    unfinished: int = 0
    blocked: bool = False
    flagged: bool = False

    def add(self, event: Any) -> None:
        self.failed += event.status == "error"
        self.unfinished += event.status == "cancelled"
        if event.status != "reported":
            return
        self.flagged |= event.audit or event.action == "escalate"
        self.blocked |= event.action in _ACTS
        if event.suspicion is not None:
            many = isinstance(event.suspicion, Mapping)
            self.suspicion.append(max(event.suspicion.values()) if many else event.suspicion)

    def figures(self, *, is_monitor: bool) -> Metrics:
        found: Metrics = {"/flagged": float(self.flagged)}
        if not is_monitor:
            return {**found, "/blocked": float(self.blocked)}
        for kind, count in (("/failed", self.failed), ("/unfinished", self.unfinished)):
            if count:
                found[kind] = count
        if self.suspicion or not self.failed:
            found[""] = max(self.suspicion, default=0.0)
        return found


def resolve_monitors(task: Task, given: Any) -> Monitors:
    """Resolve the monitors of a task, or those that replace them.

    Args:
        task: The task, with or without a ``sentinel``.
        given: A name, a configuration or a configuration file, over the task's own.

    Raises:
        ConfigError: ``inspect_sentinel`` is missing, or cannot make them.
    """
    spec = getattr(task, "sentinel", None) if given is None else given
    if not spec:
        return Monitors()
    try:
        root, layer = internals.resolve_sentinel(spec)
        found = list(_walk(layer.model_dump(), "", is_root=True))
    except (internals.PrerequisiteError, TypeError, ValueError) as error:
        reason = internals.in_one_line(error)
        raise ConfigError(f"task {task.name!r}: sentinel: {reason}") from error
    return Monitors(
        root,
        [path for path, is_protocol in found if not is_protocol],
        [path for path, is_protocol in found if is_protocol],
        layer,
    )


def _walk(layer: Any, prefix: str, *, is_root: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the paths that reports have, and whether each is a protocol's."""
    if isinstance(layer, Mapping) and not isinstance(layer.get("name"), str):
        entries = dict(layer)
    else:
        listed = layer if isinstance(layer, list) else [layer]
        entries = {internals.unqualified_name(each["name"]): each for each in listed}
    for name, entry in entries.items():
        path = f"{prefix}{name}"
        yield path, internals.is_protocol(entry["name"])
        # what a lone protocol at the root has below it bears no prefix
        below = "" if is_root and entry is layer else f"{path}/"
        # several monitors are further fields of an entry, and a lone one is among its arguments
        nested = [entry[each] for each in entry if each not in _OF_ENTRY]
        lone = [each for each in entry.get("params", {}).values() if _is_registered(each)]
        for inner in (*nested, *lone):
            yield from _walk(inner, below)


_OF_ENTRY = frozenset({"name", "params", "version", "meta", "type"})


def _is_registered(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") in ("monitor", "protocol")
