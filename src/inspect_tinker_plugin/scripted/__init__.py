"""Scripted policies: prepared replies, for rollouts, audits and tests without a model."""

from __future__ import annotations

from inspect_tinker_plugin.scripted.model import scripted_model
from inspect_tinker_plugin.scripted.policy import ScriptedPolicy
from inspect_tinker_plugin.scripted.replies import (
    Script,
    ScriptTurn,
    call,
    default_script,
    say,
    submit,
    unparsed_call,
)
from inspect_tinker_plugin.scripted.tokenizer import load_renderer, load_tokenizer, tokenizer_path

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
