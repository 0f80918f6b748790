"""The Inspect sandbox ``docker_pool``: its configuration, its metrics and its errors."""

from __future__ import annotations

from inspect_docker_pool.config import DockerPoolConfig
from inspect_docker_pool.context import (
    SandboxMetrics,
    process_metrics,
    record_sandbox_metrics,
)
from inspect_docker_pool.errors import (
    SandboxConfigError,
    SandboxDiedError,
    SandboxEngineError,
    SandboxError,
    SandboxImageError,
    SandboxMisusedError,
    SandboxStartError,
)

__all__ = [
    "DockerPoolConfig",
    "SandboxConfigError",
    "SandboxDiedError",
    "SandboxEngineError",
    "SandboxError",
    "SandboxImageError",
    "SandboxMetrics",
    "SandboxMisusedError",
    "SandboxStartError",
    "process_metrics",
    "record_sandbox_metrics",
]
