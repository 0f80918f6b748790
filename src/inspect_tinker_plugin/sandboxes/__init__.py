"""Sandboxes for RL: the ``docker_pool`` provider, its configuration and its metrics."""

from __future__ import annotations

from inspect_tinker_plugin.sandboxes.config import DockerPoolConfig
from inspect_tinker_plugin.sandboxes.metrics import (
    SandboxMetrics,
    process_metrics,
    record_sandbox_metrics,
    sandbox_metrics,
)

__all__ = [
    "DockerPoolConfig",
    "SandboxMetrics",
    "process_metrics",
    "record_sandbox_metrics",
    "sandbox_metrics",
]
