"""Audits whether a task is fit to train on: probes run real episodes and report what they find."""

from __future__ import annotations

from inspect_tinker_plugin.audit.answers import always
from inspect_tinker_plugin.audit.codes import CODES, Code
from inspect_tinker_plugin.audit.contract import AuditContext, Probe, Reference
from inspect_tinker_plugin.audit.findings import Finding, Severity
from inspect_tinker_plugin.audit.options import AuditOptions
from inspect_tinker_plugin.audit.records import EpisodeRecord
from inspect_tinker_plugin.audit.resolve import resolve_probes
from inspect_tinker_plugin.audit.run import AuditReport, run_audit
from inspect_tinker_plugin.audit.stage import Play, Stage

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
