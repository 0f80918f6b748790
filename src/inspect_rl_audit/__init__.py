"""Audits whether a task is fit to train on: probes run real episodes and report what they find."""

from __future__ import annotations

from inspect_rl_audit.contract import AuditContext, AuditOptions, Probe, Reference
from inspect_rl_audit.policies import Play, always
from inspect_rl_audit.records import CODES, Code, EpisodeRecord, Finding, Severity
from inspect_rl_audit.report import AuditReport
from inspect_rl_audit.run import resolve_probes, run_audit
from inspect_rl_audit.stage import Stage

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
