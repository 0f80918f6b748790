"""The test kit: scripted models, parts of plugins in episodes, and episodes beside evals."""

from __future__ import annotations

from inspect_tinker_plugin.testing.kit import (
    ParityReport,
    check_parity,
    check_parity_async,
    play_episode,
    run_sampler,
    run_tool_calls,
)
from inspect_tinker_plugin.testing.policy import (
    ScriptedPolicy,
    load_renderer,
    load_tokenizer,
    tokenizer_path,
)
from inspect_tinker_plugin.testing.replies import (
    Script,
    ScriptTurn,
    call,
    say,
    scripted_model,
    submit,
    unparsed_call,
)

__all__ = [
    "ParityReport",
    "Script",
    "ScriptTurn",
    "ScriptedPolicy",
    "call",
    "check_parity",
    "check_parity_async",
    "load_renderer",
    "load_tokenizer",
    "play_episode",
    "run_sampler",
    "run_tool_calls",
    "say",
    "scripted_model",
    "submit",
    "tokenizer_path",
    "unparsed_call",
]
