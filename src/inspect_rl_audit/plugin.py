"""The plugin: the command ``inspect rl audit``, and the built-in probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

from inspect_rl_audit.command import audit
from inspect_rl_audit.contract import Probe
from inspect_rl_audit.probes.answers import AnswerChecks
from inspect_rl_audit.probes.baselines import Baselines
from inspect_rl_audit.probes.gold import GoldAnswers
from inspect_rl_audit.probes.replies import ReplyCheats
from inspect_rl_audit.probes.samples import SampleChecks
from inspect_rl_audit.probes.sandbox import SandboxCheats
from inspect_rl_audit.probes.scorer import ScorerChecks
from inspect_rl_audit.probes.signal import Cost, Signal
from inspect_tinker_plugin.plugins import hookimpl

AUDIT_PROBES: Mapping[str, Callable[..., Probe]] = {
    "samples": SampleChecks,
    "baselines": Baselines,
    "gold": GoldAnswers,
    "replies": ReplyCheats,
    "sandbox": SandboxCheats,
    "answers": AnswerChecks,
    "scorer": ScorerChecks,
    "signal": Signal,
    "cost": Cost,
}


@hookimpl
def inspect_rl_commands() -> Mapping[str, click.Command]:
    """Return ``audit``."""
    return {"audit": audit}


@hookimpl
def inspect_rl_audit_probes() -> Mapping[str, Callable[..., Probe]]:
    """Return ``samples``, ``baselines``, ``gold``, ``replies``, ``sandbox`` and the others."""
    return AUDIT_PROBES
