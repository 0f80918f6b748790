"""What Inspect loads through the entry point: names only; implementations are imported lazily."""

from __future__ import annotations

from inspect_tinker_plugin import _startup

# Importing the package has done this, unless Inspect was in the middle of its own import then.
_startup.install()

# The sandbox provider `docker_pool`; the Docker SDK is imported when an engine is used.
from inspect_tinker_plugin.docker_pool.environment import DockerPoolSandboxEnvironment  # noqa: E402

__all__ = ["DockerPoolSandboxEnvironment"]
