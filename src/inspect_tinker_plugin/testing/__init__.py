"""The test kit: scripted models, and the check that an episode does what an eval does."""

from __future__ import annotations

from inspect_tinker_plugin.testing.parity import ParityReport, check_parity, check_parity_async
from inspect_tinker_plugin.testing.scripted import scripted_model
from inspect_tinker_plugin.testing.scripts import Script, call, say, submit, unparsed_call

__all__ = [
    "ParityReport",
    "Script",
    "call",
    "check_parity",
    "check_parity_async",
    "say",
    "scripted_model",
    "submit",
    "unparsed_call",
]
