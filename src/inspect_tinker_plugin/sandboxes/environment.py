"""Former module of ``prewarm``, which is now in ``inspect_tinker_plugin.sandboxes``."""

from __future__ import annotations

from inspect_tinker_plugin.docker_pool.environment import DockerPoolSandboxEnvironment, prewarm

__all__ = ["DockerPoolSandboxEnvironment", "prewarm"]
