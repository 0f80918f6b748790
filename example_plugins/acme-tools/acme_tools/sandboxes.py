"""A sandbox provider for machines without a container engine."""

from __future__ import annotations

from inspect_ai.util import SandboxEnvironmentSpec


def on_this_machine(spec: SandboxEnvironmentSpec) -> SandboxEnvironmentSpec:
    """Use Inspect's ``local`` sandbox for tasks that ask for Docker; no protection at all."""
    return SandboxEnvironmentSpec("local") if spec.type == "docker" else spec
