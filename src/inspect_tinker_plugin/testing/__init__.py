"""The test kit: scripted models, and the check that an episode matches an eval."""

from __future__ import annotations

from inspect_tinker_plugin.scripted.policy import (
    ScriptedPolicy,
    load_renderer,
    load_tokenizer,
    tokenizer_path,
)
from inspect_tinker_plugin.scripted.replies import (
    Script,
    call,
    say,
    scripted_model,
    submit,
    unparsed_call,
)
from inspect_tinker_plugin.scripted.replies import ScriptTurn as Turn
from inspect_tinker_plugin.testing.cases import Expect, case
from inspect_tinker_plugin.testing.parity import ParityReport, check_parity, check_parity_async

__all__ = [
    "Expect",
    "ParityReport",
    "Script",
    "ScriptedPolicy",
    "Turn",
    "call",
    "case",
    "check_parity",
    "check_parity_async",
    "load_renderer",
    "load_tokenizer",
    "say",
    "scripted_model",
    "submit",
    "tokenizer_path",
    "unparsed_call",
]
