"""The findings of an audit: code, severity, place, evidence and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


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
