"""Scripted policies: prepared replies, for rollouts, audits and tests without a model."""

from __future__ import annotations

from inspect_tinker_plugin.scripted.policy import (
    ScriptedPolicy,
    load_renderer,
    load_tokenizer,
    tokenizer_path,
)
from inspect_tinker_plugin.scripted.replies import (
    Script,
    ScriptTurn,
    call,
    default_script,
    say,
    scripted_model,
    submit,
    unparsed_call,
)

__all__ = [
    "Script",
    "ScriptTurn",
    "ScriptedPolicy",
    "call",
    "default_script",
    "load_renderer",
    "load_tokenizer",
    "say",
    "scripted_model",
    "submit",
    "tokenizer_path",
    "unparsed_call",
]
