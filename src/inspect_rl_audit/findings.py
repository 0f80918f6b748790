"""The findings of an audit: code, severity, place, evidence and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from inspect_rl_audit.records import EpisodeRecord


class Severity(StrEnum):
    """The severity of a finding, the worst first."""

    HIGH = "high"
    """Training on this task teaches the wrong thing, or nothing."""
    MEDIUM = "medium"
    """Part of the reward is wrong, or is wrong for a policy that looks for it."""
    LOW = "low"
    """Worth knowing before a long run."""
    INFO = "info"
    """Checks that were skipped and why, and figures."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)

    def at_least(self, other: Severity) -> bool:
        """Whether this is as severe as ``other``, or more."""
        return self.rank <= other.rank


@dataclass(frozen=True)
class Code:
    """One kind of finding."""

    name: str
    severity: Severity
    """The usual severity; evidence may lower it."""
    meaning: str
    advice: str


def _read_codes() -> Mapping[str, Code]:
    text = Path(__file__).with_name("codes.txt").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: Code(name, Severity(usual), *words) for name, usual, *words in rows}


CODES = _read_codes()
"""Every code of the built-in probes, by name."""


_CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of a task, or a fact worth knowing about it."""

    code: str
    """Stable name of the kind of finding, as ``docs/audit.md`` lists it: ``empty-reply``."""

    severity: Severity
    """How bad it is."""

    message: str
    """What was seen, in one or two sentences."""

    sample: int | str | None = None
    """Id of the sample; ``None`` when the finding is about the task, or about many samples."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The evidence, as JSON: ``log`` (an ``.eval`` file), ``sample`` and ``epoch`` in it,
    ``policy``, ``reward``, ``samples``, ``excerpt`` …"""

    advice: str = ""
    """What to do about it; the code's advice if empty."""

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise ValueError(f"{self.code!r} is no code: write words-with-hyphens")


def ordered(findings: list[Finding]) -> list[Finding]:
    """Sort findings: the worst first, then by code and sample."""
    return sorted(findings, key=lambda f: (f.severity.rank, f.code, str(f.sample or "")))


Evidence = dict[int | str, tuple[str, Mapping[str, Any]]]
"""Messages and evidence by sample."""


SHOWN = 12
"""Findings with the same code that name one sample each; further samples share one finding."""


def finding(
    code: str,
    message: str,
    record: EpisodeRecord | None = None,
    *,
    sample: int | str | None = None,
    severity: Severity | None = None,
    evidence: Mapping[str, Any] | None = None,
    **more: Any,
) -> Finding:
    """Make a finding with a built-in code.

    Args:
        code: One of the built-in codes; the advice is the code's.
        message: What was seen.
        record: The episode that shows it.
        sample: The sample, when it is about one.
        severity: Instead of the code's.
        evidence: Evidence of another kind than an episode.
        more: Further evidence.
    """
    shown = record.evidence() if record is not None else dict(evidence or {})
    return Finding(
        code=code,
        severity=severity or CODES[code].severity,
        sample=sample,
        message=message,
        evidence=shown | more,
        advice=CODES[code].advice,
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
        found.append(finding(code, message, severity=severity, samples=rest))
    return found
