"""The type of a plugin's sandbox provider."""

from __future__ import annotations

from collections.abc import Callable

from inspect_ai.util import SandboxEnvironmentSpec

SandboxMapper = Callable[[SandboxEnvironmentSpec], SandboxEnvironmentSpec]
"""Returns the specification to use instead of the one that a task or a sample asks for."""
