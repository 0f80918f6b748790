"""Audits whether a task is fit to train on: probes run real episodes and report what they find."""

from __future__ import annotations

from inspect_rl_audit.answers import always
from inspect_rl_audit.codes import CODES, Code
from inspect_rl_audit.contract import AuditContext, Probe, Reference
from inspect_rl_audit.findings import Finding, Severity
from inspect_rl_audit.options import AuditOptions
from inspect_rl_audit.records import EpisodeRecord
from inspect_rl_audit.resolve import resolve_probes
from inspect_rl_audit.run import AuditReport, run_audit
from inspect_rl_audit.stage import Play, Stage

__all__ = [
    "CODES",
    "AuditContext",
    "AuditOptions",
    "AuditReport",
    "Code",
    "EpisodeRecord",
    "Finding",
    "Play",
    "Probe",
    "Reference",
    "Severity",
    "Stage",
    "always",
    "resolve_probes",
    "run_audit",
]
