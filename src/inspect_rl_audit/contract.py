"""The contract of probes: what a probe is, and the context that it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_rl_audit.codes import CODES
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.stage import Stage

TINY = 1e-6
"""Rewards closer than this count as equal."""

Evidence = dict[int | str, tuple[str, Mapping[str, Any]]]
"""Messages and evidence by sample."""

SHOWN = 12
"""Findings with the same code that name one sample each; further samples share one finding."""


@runtime_checkable
class Probe(Protocol):
    """Examines one aspect of a task and reports its problems.

    A probe runs episodes on the stage of its `AuditContext`, examines the samples, or reads
    logs. It is called once per audit; an audit that is continued calls it again, and the stage
    then returns the earlier episodes from its journal.
    """

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        """Examine the task and return the findings."""
        ...


@dataclass(frozen=True)
class Reference:
    """The rewards of honest policies: without an answer, and with the right one."""

    null: Mapping[int | str, EpisodeRecord]
    """By sample: "I do not know."."""

    gold: Mapping[int | str, EpisodeRecord]
    """By sample: the right answer in the form that pays best; samples without one are absent."""

    form: str
    """The form of the right answer that earns a reward on most samples."""

    full: float
    """The full reward: 1, or what the right answer earns if that is more."""

    @property
    def scored(self) -> bool:
        """Whether episodes reach their scores; they do not when a judge is missing."""
        causes = {record.cause for record in self.null.values()}
        return bool(causes - {"judge", "sandbox", "solver", "tool", "policy"})

    @property
    def judge_missing(self) -> bool:
        """Whether every score asks a model that is not available."""
        return {record.cause for record in self.null.values()} == {"judge"}

    @property
    def gold_works(self) -> bool:
        """Whether the right answer earns the full reward on some sample."""
        return any(self.is_full(record.reward) for record in self.gold.values())

    def null_of(self, sample: Sample) -> EpisodeRecord | None:
        """Return the episode of the policy without an answer."""
        return None if sample.id is None else self.null.get(sample.id)

    def gold_of(self, sample: Sample) -> EpisodeRecord | None:
        """Return the episode with the right answer."""
        return None if sample.id is None else self.gold.get(sample.id)

    def pays(self, sample: Sample) -> bool:
        """Whether the right answer to a sample earns the full reward."""
        record = self.gold_of(sample)
        return record is not None and self.is_full(record.reward)

    def is_full(self, reward: float | None) -> bool:
        """Whether a reward is the full one."""
        return reward is not None and reward >= self.full - TINY

    def beats_null(self, record: EpisodeRecord) -> bool:
        """Whether an episode earned more than an honest policy without an answer."""
        if record.reward is None:
            return False
        null = self.null.get(record.sample)
        base = null.reward if null is not None and null.reward is not None else 0.0
        return record.reward > max(base, 0.0) + TINY


@dataclass(frozen=True, kw_only=True)
class AuditContext:
    """What every probe of an audit receives."""

    task: Task
    """The task; it must not be changed."""

    samples: Sequence[Sample]
    """Its samples, filtered and transformed as for training, each with an id."""

    chosen: Sequence[Sample]
    """A few of them, spread over the dataset: for checks that need many episodes per sample."""

    wide: Sequence[Sample]
    """More of them, including ``chosen``: for checks with one or two episodes per sample."""

    stage: Stage
    """Runs episodes."""

    reference: Reference
    """The rewards of honest policies."""

    folder: Path
    """The audit's folder; a probe may write its own files below it."""

    options: Any = None
    """The `AuditOptions` of this audit."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers for the summary; a probe adds its own under its own name."""

    say: Callable[[str], None] = lambda line: None
    """Shows a line of progress."""

    @property
    def judged(self) -> bool:
        """Whether rewards can be checked: not if a judge is missing, or no episode runs."""
        return bool(self.task.scorer) and self.reference.scored

    def gold_of(self, sample: Sample) -> str | None:
        """Return the answer that ``--gold`` names; ``None`` if that is the target."""
        return self.options.gold_of(sample) if self.options is not None else None


def finding(
    code: str,
    message: str,
    *,
    sample: int | str | None = None,
    severity: Severity | None = None,
    evidence: Mapping[str, Any] | None = None,
    advice: str | None = None,
) -> Finding:
    """Make a finding with a built-in code; severity and advice default to the code's."""
    known = CODES[code]
    return Finding(
        code=code,
        severity=severity or known.severity,
        sample=sample,
        message=message,
        evidence=evidence or {},
        advice=advice or known.advice,
    )


def per_sample(
    code: str,
    seen: Mapping[int | str, tuple[str, Mapping[str, Any]]],
    *,
    severity: Severity | None = None,
) -> list[Finding]:
    """Make a finding for each of the first samples, and one for all others together.

    Args:
        code: One of the built-in codes.
        seen: Message and evidence by sample.
        severity: Instead of the code's.
    """
    ids = list(seen)
    found = [
        finding(code, seen[id][0], sample=id, severity=severity, evidence=seen[id][1])
        for id in ids[:SHOWN]
    ]
    if rest := ids[SHOWN:]:
        message = f"{CODES[code].meaning} The same holds for {len(rest)} more samples."
        found.append(finding(code, message, severity=severity, evidence={"samples": rest}))
    return found
