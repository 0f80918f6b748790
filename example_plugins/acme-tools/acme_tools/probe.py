"""A probe for audits: does it pay to shout?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inspect_rl_audit import AuditContext, Finding, Play, Severity, always


@dataclass(frozen=True)
class Shouting:
    """Plays a policy that shouts one word, whatever it is asked."""

    word: str = "YES"

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        plays = [
            Play(policy=f"shouting:{self.word}", sample=sample, reply=always(f"{self.word}!!!"))
            for sample in audit.chosen
        ]
        return [
            Finding(
                code="acme-shouting",
                severity=Severity.MEDIUM,
                sample=record.sample,
                message=f"Shouting {self.word!r} earns the full reward.",
                evidence=record.evidence(),
                advice="Fold case and drop exclamation marks, or compare the whole answer.",
            )
            for record in await audit.stage.run(plays)
            if audit.reference.is_full(record.reward)
        ]
