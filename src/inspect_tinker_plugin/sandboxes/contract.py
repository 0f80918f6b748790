"""What a sandbox provider of a plugin is."""

from __future__ import annotations

from collections.abc import Callable

from inspect_ai.util import SandboxEnvironmentSpec

SandboxMapper = Callable[[SandboxEnvironmentSpec], SandboxEnvironmentSpec]
"""Gives the specification to use instead of what a task or a sample asks for."""
