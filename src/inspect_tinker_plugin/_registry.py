"""What Inspect loads through the package's entry point: names, with the work behind them late."""

from __future__ import annotations

from inspect_tinker_plugin import _startup

# Where start-up files are off (`python -S`), the first look-up by Inspect is the moment.
_startup.install()

# The sandbox provider `docker_pool`; the Docker SDK is imported when an engine is used.
from inspect_tinker_plugin.sandboxes.environment import (  # noqa: E402
    DockerPoolSandboxEnvironment,
)

__all__ = ["DockerPoolSandboxEnvironment"]
