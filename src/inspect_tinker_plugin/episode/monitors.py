"""What watches an episode: the monitors of its task, and Inspect's hooks on samples.

Inspect runs monitors at model and tool calls; here they are named, and what they report is read.
They do in an episode what they do in an eval: a protocol may change, reject or end a step; monitors
without a protocol are only observed. Hooks are called in the order in which an eval calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from logging import getLogger
from typing import Any

import anyio
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.event import Event
from inspect_ai.log import EvalSample, EvalSampleSummary
from inspect_ai.solver import TaskState

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
                path = event.path or internals.registry_unqualified_name(event.factory)
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
        entries = {internals.registry_unqualified_name(each["name"]): each for each in listed}
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


_LONGEST_END = 60.0
"""Seconds that the hooks at the end of an episode may take, also of one that was cancelled."""

logger = getLogger(__name__)


@dataclass
class SampleHooks:
    """The hooks around one episode; calls nothing unless some are installed and enabled.

    Attributes:
        run: Id of the dataset, which hooks see as the run and as the eval.
    """

    run: str
    enabled: bool
    _sample: str = ""
    _summary: EvalSampleSummary | None = None

    async def report_init(self, sample: Sample, state: TaskState, began: datetime) -> None:
        """Report a sample whose input has been read and whose sandbox has not started."""
        if not self.enabled:
            return
        assert sample.id is not None
        self._sample = state.uuid
        self._summary = EvalSampleSummary(
            id=sample.id,
            epoch=state.epoch,
            uuid=state.uuid,
            input=sample.input,
            choices=sample.choices,
            target=sample.target,
            metadata=sample.metadata or {},
            started_at=began.isoformat(),
        )
        await internals.emit("sample_init", self.run, self._sample, summary=self._summary)

    async def report_start(self) -> None:
        """Report that the solver is about to begin."""
        if self._summary is not None:
            given = {"summary": self._summary}
            await internals.emit("sample_start", self.run, self._sample, **given)
            await internals.emit("sample_attempt_start", self.run, self._sample, **given, attempt=1)

    def follow_events(self, transcript: internals.Transcript) -> None:
        """Report events while the solver runs, from the task group of the running sample on."""
        if self._summary is not None:
            internals.follow_events(transcript, self.run, self._sample)

    async def report_scoring(self) -> None:
        """Report that scorers are about to begin."""
        if self._summary is not None:
            await internals.emit("sample_scoring", self.run, self._sample)

    async def report_end(self, sample: EvalSample) -> None:
        """Report the end of an episode whose start has been reported, also of a cancelled one.

        Never raises: the episode has its result.
        """
        if self._summary is None:
            return
        summary, self._summary = self._summary, None
        given = {"summary": summary, "attempt": 1, "error": sample.error, "will_retry": False}
        with anyio.move_on_after(_LONGEST_END, shield=True) as scope:
            try:
                await internals.drain_events()
                await internals.emit("sample_attempt_end", self.run, self._sample, **given)
                await internals.emit("sample_end", self.run, self._sample, sample=sample)
            except Exception as error:  # a limit: the others are warned of by Inspect
                logger.warning("a hook at the end of sample %s has failed: %r", sample.id, error)
        if scope.cancelled_caught:
            logger.warning(
                "hooks at the end of sample %s took more than %g s", sample.id, _LONGEST_END
            )
