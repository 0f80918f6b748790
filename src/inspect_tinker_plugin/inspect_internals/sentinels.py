"""Sentinels: the monitors and protocols that Inspect runs at model and tool calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from inspect_ai.util import registry_info

from inspect_tinker_plugin.inspect_internals.tasks import PrerequisiteError, registry_lookup

__all__ = ["SentinelFailure", "is_protocol", "resolve_sentinel", "sentinel_solving"]

try:
    from inspect_ai._sentinel._config import (
        SentinelConfig,
        _is_constructed,
        _require_sentinel,
        resolve_sentinel_root,
        sentinel_config,
    )
    from inspect_ai._sentinel._context import SentinelFailure
    from inspect_ai._sentinel._scope import sentinel_solving
except ImportError:  # up to 0.3.277 there are none

    class SentinelFailure(Exception):  # type: ignore[no-redef]
        """What Inspect raises for a monitor or protocol that raised ``error``."""

        error: Exception

    def sentinel_solving() -> AbstractContextManager[None]:  # type: ignore[misc]
        """Mark nothing."""
        return nullcontext()

    def _require_sentinel() -> None:
        raise PrerequisiteError("this release of inspect-ai has no sentinels")


def resolve_sentinel(spec: Any) -> tuple[Any, Any]:
    """Make the monitors and protocols of a task; those without a protocol are only observed.

    Args:
        spec: What ``Task(sentinel=...)`` and ``--sentinel`` take, or monitors alone.

    Returns:
        The protocol at the root, and the configuration that a log states.

    Raises:
        PrerequisiteError: This release of Inspect, or ``inspect_sentinel``, does not have them.
    """
    _require_sentinel()
    package: Any = import_module("inspect_sentinel")
    if isinstance(spec, str | SentinelConfig) or not _is_constructed(spec):
        spec = import_module("inspect_sentinel._integration").sentinel_from_config(spec)
    listed = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else [spec]
    if all(registry_info(each).type == "monitor" for each in listed):
        spec = package.observe_only(spec if isinstance(spec, dict) else list(listed))
    return resolve_sentinel_root(spec), sentinel_config(spec)


def is_protocol(name: str) -> bool:
    """Whether a protocol has this registry name, rather than a monitor."""
    names = (name, f"inspect_sentinel/{name}")
    return any(registry_lookup("protocol", each) is not None for each in names)
