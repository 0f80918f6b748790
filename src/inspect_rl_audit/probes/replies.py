"""Cheats in the reply: code that attacks a scorer's checks instead of passing them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspect_ai.dataset import Sample

from inspect_rl_audit import moves
from inspect_rl_audit.contract import TINY, AuditContext
from inspect_rl_audit.policies import PolicyReply, always, shown, to_all
from inspect_rl_audit.records import CODES, Finding, Severity, finding
from inspect_tinker_plugin import TurnRequest
from inspect_tinker_plugin.plugins import part_of

_FEW = 2
_NAME = re.compile(r"\bdef\s+(\w+)\s*\(|\b(?:named|called|function)\s+`?(\w+)`?\s*\(")

CODE_CHEATS: Mapping[str, str] = {
    "exit-at-once": "code-exits-early",
    "exit-silently": "code-exits-early",
    "exit-when-called": "code-exits-early",
    "equal-object": "code-always-equal",
    "equal-text": "code-always-equal",
    "patched-checks": "code-patches-checks",
    "told-secrets": "code-reads-checks",
}
"""Finding by name of a cheat; its code is in `attacks/code/`, for the function ``SOLUTION``."""

_HONEST = "def SOLUTION(*args, **kwargs):\n    return None\n"


@dataclass(frozen=True)
class ReplyCheats:
    """Replies with Python code that cheats, to tasks whose sandbox may run it."""

    async def __call__(self, audit: AuditContext) -> Sequence[Finding]:
        samples = audit.some([s for s in audit.chosen if await _runs_code(audit, s)], _FEW)
        if not samples or not audit.judged:
            return []
        honest = await audit.play("code:none", samples, to_all(_with_code(_HONEST)))
        base = {record.sample: max(record.reward or 0.0, 0.0) for record in honest}
        found: dict[str, Finding] = {}
        for name, code in CODE_CHEATS.items():
            if code in found:
                continue
            text = moves.read_attack(f"code/{name}.txt")
            records = await audit.play(f"code:{name}", samples, to_all(_with_code(text)))
            paid = [
                r
                for r in records
                if audit.reference.beats_null(r)
                and (r.reward or 0.0) > base.get(r.sample, 0.0) + TINY
            ]
            if paid:
                severity = Severity.HIGH if 2 * len(paid) >= len(records) else Severity.MEDIUM
                on = part_of(len(paid), len(records), "sample")
                message = f"{CODES[code].meaning} {name!r} earned {paid[0].reward:g} on {on}, "
                message += "where a function that returns nothing earned less."
                found[code] = finding(code, message, paid, severity=severity, channel="reply")
        return list(found.values())


async def _runs_code(audit: AuditContext, sample: Sample) -> bool:
    """Whether the scorer works in a sandbox; otherwise code might be run in this very process."""
    record = audit.reference.null_of(sample)
    if record is None or await audit.stage.sandbox_of(sample) is None:
        return False
    if moves.runs_commands(record.notes.get("tools") or []):
        return False  # the sandbox is reached through tools, see the other cheats
    about_python = "python" in str(record.notes.get("prompt")).lower()
    return about_python or bool(record.notes.get("scorer_did"))


def _with_code(code: str) -> PolicyReply:
    def text(request: TurnRequest) -> str:
        names = [a or b for a, b in _NAME.findall(shown(request))]
        return f"```python\n{code.replace('SOLUTION', names[-1] if names else 'solution')}```"

    return always(text)
