"""Sandboxes for RL: the ``docker_pool`` provider, its configuration and its metrics."""

from __future__ import annotations

from inspect_tinker_plugin.docker_pool.config import DockerPoolConfig
from inspect_tinker_plugin.docker_pool.environment import prewarm
from inspect_tinker_plugin.docker_pool.metrics import (
    SandboxMetrics,
    process_metrics,
    record_sandbox_metrics,
    sandbox_metrics,
)

__all__ = [
    "DockerPoolConfig",
    "SandboxMetrics",
    "prewarm",
    "process_metrics",
    "record_sandbox_metrics",
    "sandbox_metrics",
]
