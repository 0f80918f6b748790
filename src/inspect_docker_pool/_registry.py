"""What Inspect loads through the entry point: the sandbox provider ``docker_pool``.

The Docker SDK is imported when an engine is used.
"""

from __future__ import annotations

from inspect_docker_pool.environment import DockerPoolSandboxEnvironment

__all__ = ["DockerPoolSandboxEnvironment"]
