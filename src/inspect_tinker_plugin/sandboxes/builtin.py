"""The built-in sandbox providers by name."""

from __future__ import annotations

from collections.abc import Mapping

from inspect_ai.util import SandboxEnvironmentSpec

from inspect_tinker_plugin.sandboxes.contract import SandboxMapper

SANDBOX_PROVIDERS: Mapping[str, SandboxMapper] = {
    "docker_pool": lambda spec: SandboxEnvironmentSpec("docker_pool", spec.config),
}
"""Everything else in Inspect's registry needs no mapping."""
