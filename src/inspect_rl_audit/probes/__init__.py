"""The built-in probes, one module per side of a task; here by name, in the order of an audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inspect_rl_audit.contract import Probe
from inspect_rl_audit.probes.answers import AnswerChecks
from inspect_rl_audit.probes.baselines import Baselines
from inspect_rl_audit.probes.cheats import SandboxCheats
from inspect_rl_audit.probes.cost import Cost
from inspect_rl_audit.probes.gold import GoldAnswers
from inspect_rl_audit.probes.replies import ReplyCheats
from inspect_rl_audit.probes.samples import SampleChecks
from inspect_rl_audit.probes.scorer import ScorerChecks
from inspect_rl_audit.probes.signal import Signal

__all__ = ["AUDIT_PROBES"]

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
