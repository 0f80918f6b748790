"""The names of the model under training: ``rl/policy`` for Inspect, and ``rl/NAME`` in logs."""

from __future__ import annotations

POLICY_PROVIDER = "rl"
POLICY_NAME = "policy"
POLICY_MODEL = f"{POLICY_PROVIDER}/{POLICY_NAME}"
